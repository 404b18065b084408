"""Stacked bars: the parts, and the drawing."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from remat_jax.report.stacked_bars import grouped, merged_layers, module_memory_figure, stacked_figure, without_common_root
from remat_jax.report.svg import text_width

MIB = 2**20
SVG = "{http://www.w3.org/2000/svg}"
MEMORY = {
    "off": {
        **{(f"Net/block_{index}/up", "forward"): 8 * MIB for index in range(12)},
        ("Net/block_11/up", "backward"): 4 * MIB,
        ("Net/head", "forward"): 2 * MIB,
        ("", "other"): 3 * MIB,
        ("parameters", "argument"): 5 * MIB,
        ("parameters", "backward"): 1 * MIB,
        ("batch[0]", "argument"): 1 * MIB,
        ("batch[1]", "argument"): 1 * MIB,
    },
    "full": {("Net/block_3/up", "recomputed"): 8 * MIB, ("Net/head", "forward"): 2 * MIB, ("parameters", "argument"): 5 * MIB},
}


def bars(picture):
    """(x, y, width, colour, tooltip) of every bar, without the legend."""
    rects = [rect for rect in ElementTree.fromstring(picture.svg()).iter(f"{SVG}rect") if len(rect)]
    return [
        (float(rect.get("x")), float(rect.get("y")), float(rect.get("width")), rect.get("fill"), rect[0].text) for rect in rects
    ]


def hatched(picture):
    """The tooltips of the hatched bars; the stripes follow their bar."""
    tooltips, tooltip = [], None
    for element in ElementTree.fromstring(picture.svg()).iter():
        if element.tag in (f"{SVG}rect", f"{SVG}title"):
            tooltip = element.text
        elif element.get("class") == "hatch":
            tooltips.append(tooltip)
    return tooltips


def test_the_largest_arguments_of_a_finished_step_are_parts_and_a_module_of_the_same_name_is_none_of_them():
    sizes = {"state.params": 8, "state.opt_state": 16, "batch": 1, "rng": 2, "net": 4}
    live = {(f"argument {name}", "argument"): size * MIB for name, size in sizes.items()}
    live |= {("argument state.params", "forward"): 2 * MIB, ("net", "forward"): 4 * MIB, ("up", "forward"): 3 * MIB}
    bars = grouped({"off": live}, 2)["off"]
    assert {part: size // MIB for (part, kind), size in bars.items() if kind == "kept"} == {
        **{"argument state.opt_state": 16, "argument state.params": 10, "argument net": 4, "other arguments": 3},
        **{"net": 4, "up": 3},
    }


def test_every_byte_is_in_one_part_and_layers_are_together():
    bars = grouped(MEMORY, 2)
    assert bars["off"] == {
        ("block_*/up", "kept"): 96 * MIB,
        ("block_*/up", "working set"): 4 * MIB,
        ("head", "kept"): 2 * MIB,
        ("of no module", "working set"): 3 * MIB,
        ("parameters", "kept"): 5 * MIB,
        ("parameters", "working set"): 1 * MIB,
        ("batch", "kept"): 2 * MIB,
    }
    assert {policy: sum(bar.values()) for policy, bar in bars.items()} == {
        policy: sum(bar.values()) for policy, bar in MEMORY.items()
    }


def test_a_module_that_matters_in_a_small_bar_has_a_colour_too():
    memory = {
        "off": {("a", "forward"): 1000 * MIB, ("b", "forward"): 30 * MIB, ("c", "forward"): 20 * MIB},
        "full": {("c", "recomputed"): 9 * MIB, ("b", "forward"): MIB},
    }
    assert list(grouped(memory, 2)["off"]) == [("a", "kept"), ("c", "kept"), ("other modules", "kept")]
    assert list(grouped(memory, 1)["full"]) == [("other modules", "kept"), ("other modules", "working set")]


def test_only_a_number_that_differs_is_a_layer_and_only_the_outermost():
    assert merged_layers(["layers/0/attn", "layers/1/attn", "enc_1/conv_0", "enc_1/conv_1"]) == [
        "layers/*/attn",
        "layers/*/attn",
        "enc_1/conv_*",
        "enc_1/conv_*",
    ]
    assert merged_layers(["block_0/Dense_0:dot#0", "block_1/Dense_1:dot#0"]) == [
        "block_*/Dense_0:dot#0",
        "block_*/Dense_1:dot#0",
    ]
    assert merged_layers(["l_0:input#0", "l_1:input#0", "l_1:input#1"]) == ["l_*:input#0", "l_*:input#0", "l_1:input#1"]
    assert merged_layers(["block_3/up"]) == ["block_3/up"]
    assert without_common_root(["Net/a", "Net/b", "a"]) == ["a", "b", "a"] and without_common_root([]) == []


def test_the_panels_show_bytes_and_shares():
    picture = module_memory_figure(MEMORY, "net on h200")
    texts = [text.text for text in ElementTree.fromstring(picture.svg()).iter(f"{SVG}text")]
    assert texts[0] == "net on h200" and [text for text in texts if text in MEMORY] == ["off", "full"]
    assert {"on the device at the peak, MiB", "of each bar, %"} <= set(texts)
    whole = bars(picture)
    left, right = ([bar for bar in whole if (bar[0] > 520) == is_right] for is_right in (False, True))
    per_mib = left[0][2] / 96
    tops = sorted({bar[1] for bar in whole})
    assert sum(bar[2] for bar in left if bar[1] == tops[0]) == pytest.approx(113 * per_mib, abs=0.1)
    assert sum(bar[2] for bar in left if bar[1] == tops[1]) == pytest.approx(15 * per_mib, abs=0.1)
    sums = [sum(bar[2] for bar in right if bar[1] == top) for top in tops]
    assert sums[0] == pytest.approx(sums[1], abs=0.1) and sums[0] > 400
    # Recomputed in the bar of `full`: hatched in the colour of what `off` keeps.
    kept, again = left[0], next(bar for bar in left if bar[1] == tops[1])
    assert kept[4] == "off: A block_*/up, kept 96.0 MiB, 85.0 % (100,663,296 bytes)"
    assert again[4] == "full: A block_*/up, working set 8.0 MiB, 53.3 % (8,388,608 bytes)"
    assert kept[3] == again[3] and again[4] in hatched(picture) and kept[4] not in hatched(picture)
    assert [text for text in texts if text.endswith("0 MiB")] == ["113.0 MiB", "15.0 MiB"]
    legend = ["A", "block_*/up", "B", "head", "C", "of no module", "D", "parameters", "E", "batch"]
    assert texts[-11:] == [*legend, "hatched: recomputed or backward"]
    # A wide enough part has its letter, so colour is not its only mark.
    assert texts.count("A") == 6 and texts.count("E") == 1


def test_the_legend_is_inside_the_picture_also_with_long_names():
    path = "a/very_long_name_of_a_module/inside_another_long_name_of_a_module"
    memory = {"off": {(f"{path}/{index * 'x'}y", "forward"): index + 1 for index in range(9)}}
    picture = module_memory_figure(memory, "long")
    keys = [text for text in ElementTree.fromstring(picture.svg()).iter(f"{SVG}text") if text.get("font-size") == "12"]
    assert len(keys) == 8 and len({key.get("y") for key in keys}) > 1
    assert all(float(key.get("x")) + text_width(key.text, 12) <= 1000 for key in keys)
    assert all(float(key.get("y")) < picture.height for key in keys)


@pytest.mark.parametrize(
    ("memory", "modules", "message"),
    [({}, 7, "no policy"), ({"off": {}}, 7, "no array is alive under 'off'"), (MEMORY, 0, "modules=0: expected 1 to 7")],
)
def test_what_cannot_be_drawn_is_an_error(memory, modules, message):
    with pytest.raises(ValueError, match=message):
        module_memory_figure(memory, "t", modules)


def test_in_a_narrow_picture_the_limit_leaves_out_the_names_above_the_bars():
    picture = stacked_figure(
        {"off": {("a", "kept"): 40}, "full": {("a", "kept"): 10}}, "bytes", limit=("budget", 30), width=380
    )
    root = ElementTree.fromstring(picture.svg())
    names = [float(text.get("y")) for text in root.iter(f"{SVG}text") if text.text in ("off", "full")]
    dashed = [path.get("d") for path in root.iter(f"{SVG}path") if path.get("stroke-dasharray")]
    spans = [tuple(float(number) for number in re.findall(r" ([\d.]+)", path)) for path in dashed[:2]]
    assert [top - name for name, (top, _) in zip(names, spans, strict=True)] == pytest.approx([4, 4])
    assert [bottom - top for top, bottom in spans] == pytest.approx([32, 32])
