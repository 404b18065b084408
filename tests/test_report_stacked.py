"""Stacked bars: what goes into a part, and what is drawn."""

from __future__ import annotations

from pathlib import Path

import pytest

from remat_jax.report.stacked import grouped, merged_layers, module_memory_figure, save_picture, without_common_root

MIB = 2**20
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


def bars(axes):
    """(y, width, hatch, colour) of every bar of a panel, from left to right."""
    return [
        (round(one.get_y() + one.get_height() / 2), round(one.get_width(), 6), one.get_hatch(), one.get_facecolor())
        for one in axes.patches
    ]


def test_every_byte_is_in_one_part_and_layers_are_together():
    found = grouped(MEMORY, 2)
    assert found["off"] == {
        ("block_*/up", "kept"): 96 * MIB,
        ("block_*/up", "working set"): 4 * MIB,
        ("head", "kept"): 2 * MIB,
        ("of no module", "working set"): 3 * MIB,
        ("parameters", "kept"): 5 * MIB,
        ("parameters", "working set"): 1 * MIB,
        ("batch", "kept"): 2 * MIB,
    }
    assert {policy: sum(bar.values()) for policy, bar in found.items()} == {
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
    figure = module_memory_figure(MEMORY, "net on h200")
    left, right = figure.axes
    assert "net on h200" in figure.get_suptitle() and left.get_xlabel() == "on the device at the peak, MiB"
    assert [label.get_text() for label in left.get_yticklabels()] == ["off", "full"]
    assert sum(width for y, width, _, _ in bars(left) if y == 0) == pytest.approx(113)
    assert sum(width for y, width, _, _ in bars(left) if y == 1) == pytest.approx(15)
    for y in (0, 1):
        assert sum(width for at, width, _, _ in bars(right) if at == y) == pytest.approx(100)
    # Recomputed in the bar of `full`: the same colour as what `off` keeps, hatched.
    kept, again = bars(left)[0], next(one for one in bars(left) if one[0] == 1)
    assert (kept[1], kept[2]) == (96, None) and again[1] == 8 and again[2] and kept[3] == again[3]
    assert [text.get_text() for text in left.texts] == ["113.0 MiB", "15.0 MiB"]
    assert left.get_xlim()[1] > 113 * 1.15, "room for the total beside the longest bar"
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == [
        "block_*/up",
        "head",
        "of no module",
        "parameters",
        "batch",
        "hatched: recomputed or backward",
    ]


def test_the_legend_is_inside_the_picture_also_with_long_names():
    path = "a/very_long_name_of_a_module/inside_another_long_name_of_a_module"
    memory = {"off": {(f"{path}/{index * 'x'}y", "forward"): index + 1 for index in range(9)}}
    figure = module_memory_figure(memory, "long")
    figure.draw_without_rendering()
    (legend,) = figure.legends
    box = legend.get_window_extent()
    assert box.x0 >= 0 and box.x1 <= figure.bbox.x1 and box.y0 >= 0


@pytest.mark.parametrize(
    ("memory", "modules", "message"),
    [({}, 7, "no policy"), ({"off": {}}, 7, "no array is alive under 'off'"), (MEMORY, 0, "modules=0: expected 1 to 7")],
)
def test_what_cannot_be_drawn_is_an_error(memory, modules, message):
    with pytest.raises(ValueError, match=message):
        module_memory_figure(memory, "t", modules)


@pytest.mark.parametrize(("name", "start"), [("m.png", b"\x89PNG"), ("m.svg", b"<?xml"), ("m.pdf", b"%PDF")])
def test_the_same_figures_give_the_same_file(tmp_path, name, start):
    paths = [save_picture(module_memory_figure(MEMORY, "t"), tmp_path / folder / name) for folder in ("one", "two")]
    contents = [Path(path).read_bytes() for path in paths]
    assert contents[0] == contents[1] and contents[0].startswith(start)
