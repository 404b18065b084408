"""Charts and stacked bars of `remat_jax.report`: what is drawn equals what was given."""

from __future__ import annotations

import re
from itertools import combinations, pairwise
from xml.etree import ElementTree

import pytest

from remat_jax.report.chart import Panel, Series, boxes_along, chart, place_labels
from remat_jax.report.stacked_bars import grouped, merged_layers, module_memory_figure, stacked_figure, without_common_root
from remat_jax.report.svg import INK, VERMILLION, text_width

SVG = "{http://www.w3.org/2000/svg}"
CLAIM = Series("claim", INK, [(4, 1.0), (16, 0.5)], dashed=True)
RESULT = Series("measured", VERMILLION, [(4, 0.25), (16, 0.3)], [(4, 0.25), (16, 0.3)])
EIGHTHS = [n / 8 for n in range(8)]
PANEL = Panel("Work", "layers", "share", [CLAIM, RESULT], binary_x=True, percent=True, from_zero=True)


def drawn(*panels):
    return ElementTree.fromstring(chart(panels).svg())


def texts(root):
    return [text.text for text in root.iter(f"{SVG}text")]


def boxes(root, *names):
    """The rectangle (left, top, right, bottom) of each small text with one of the names, in the order of the picture."""
    found = []
    for text in root.iter(f"{SVG}text"):
        if text.text in names and text.get("font-size") == "12":
            x, bottom, width = float(text.get("x")), float(text.get("y")), text_width(text.text, 12)
            left = x - width if text.get("text-anchor") == "end" else x
            found.append((left, bottom - 10, left + width, bottom + 2))
    return found


def named_point(place, others, limit, **options):
    """A picture of three points, the first of them named, left of a limit."""
    points = Series("named", INK, points=[place, *others], names=["a_named_policy", "", ""])
    return chart([Panel("", "x", "y", [points, *options.pop("also", ())], limit=("budget", limit))], **options).svg()


def overlap(a, b):
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def test_lines_are_joined_and_points_are_marked_at_the_same_places():
    root = drawn(PANEL)
    dashed = [path for path in root.iter(f"{SVG}path") if path.get("stroke-dasharray")]
    assert [path.get("stroke") for path in dashed] == [INK, INK]  # the line and its key
    marks = [(circle.get("cx"), circle.get("cy")) for circle in root.iter(f"{SVG}circle")]
    joined = next(path.get("d") for path in root.iter(f"{SVG}path") if path.get("stroke") == VERMILLION)
    assert len(marks) == 3 and joined == "M" + "L".join(" ".join(place) for place in marks[:2])
    assert {"claim", "measured", "Work", "layers", "share"} <= set(texts(root))


def test_values_are_where_the_ticks_say():
    """4, 8 and 16 are equally spaced, and the point of 25 % is a quarter of the way from 0 % to 100 %."""
    root = drawn(PANEL)
    at = {text.text: (float(text.get("x")), float(text.get("y"))) for text in root.iter(f"{SVG}text")}
    assert at["8"][0] - at["4"][0] == pytest.approx(at["16"][0] - at["8"][0], abs=0.02)
    first = next(iter(root.iter(f"{SVG}circle")))
    share = (at["0%"][1] - float(first.get("cy")) - 4.5) / (at["0%"][1] - at["100%"][1])
    assert share == pytest.approx(0.25, abs=1e-3) and float(first.get("cx")) == pytest.approx(at["4"][0], abs=0.02)


def test_names_cover_neither_names_nor_points_nor_lines():
    points = [(1.0, 122.0), (1.29, 14.0), (1.31, 14.0), (1.33, 14.0), (1.0, 122.5), (1.41, 0.0)]
    names = ["off", "checkpoint", "the same", "again", "off", "a name that is long"]
    line = sorted(points)
    root = drawn(Panel("t", "x", "y", [Series("a", INK, line, points, names=names)]))
    joined = next(path.get("d") for path in root.iter(f"{SVG}path") if path.get("stroke") == INK)
    corners = [tuple(map(float, corner.split())) for corner in joined[1:].split("L")]
    marks = [((1 - at) * a + at * c, (1 - at) * b + at * d) for (a, b), (c, d) in pairwise(corners) for at in EIGHTHS]
    marks += [(float(circle.get("cx")), float(circle.get("cy"))) for circle in root.iter(f"{SVG}circle")]
    drawn_names = boxes(root, *names)
    assert len(drawn_names) == 6 and len(marks) == 5 * 8 + 7
    assert [(a, b) for a, b in combinations(drawn_names, 2) if overlap(a, b)] == []
    assert [(box, x) for box in drawn_names for x, y in marks if box[0] < x < box[2] and box[1] < y < box[3]] == []
    assert all(70 <= box[0] and box[2] <= 1000 for box in drawn_names)


def test_a_name_keeps_clear_of_a_line_of_other_names_and_of_the_edge():
    (box,) = place_labels([(50, 50)], [(20, 10)], (0, 0, 100, 100), taken=boxes_along([(50, 50), (100, 50)]))
    assert not box[1] < 50 < box[3] or box[2] < 50
    same_place = place_labels([(50, 50)] * 4, [(30, 10)] * 4, (0, 0, 200, 100))
    assert [(a, b) for a, b in combinations(same_place, 2) if overlap(a, b)] == []
    assert len(place_labels([(5, 5)] * 9, [(30, 10)] * 9, (0, 0, 10, 10))) == 9, "a full area has each name all the same"
    # To the right it would be cut off; the first place inside the area is to the left, slightly higher than the point.
    (at_the_edge,) = place_labels([(98, 50)], [(30, 10)], (0, 0, 100, 100))
    assert at_the_edge == pytest.approx((59.818, 48.623, 89.818, 58.623), abs=1e-3)


def test_a_name_keeps_clear_of_the_ring_around_its_point_and_of_the_limit():
    """Right of its point, the name would cross the limit."""
    point = (2.0, 1.0)
    picture = named_point(point, [(1.0, 2.0), (4.0, 3.0)], 2.2, also=[Series("ring", VERMILLION, rings=[point])])
    root = ElementTree.fromstring(picture)
    ring = next(circle for circle in root.iter(f"{SVG}circle") if circle.get("stroke") == VERMILLION)
    x, y = float(ring.get("cx")), float(ring.get("cy"))
    (name,), (limit,) = boxes(root, "a_named_policy"), boxes(root, "budget")
    assert not overlap(name, (x - 11, y - 11, x + 11, y + 11))
    assert not name[0] <= limit[2] + 6 <= name[2]


def test_a_limit_has_a_gap_for_a_name_that_must_cross_it():
    picture = named_point((2.0, 1.0), [(1.0, 2.0), (4.0, 3.0)], 2.2, width=240)
    ((left, above, right, below),) = boxes(ElementTree.fromstring(picture), "a_named_policy")
    lines = re.findall(rf'd="M([\d.]+) ([\d.]+)L[\d.]+ ([\d.]+)" fill="none" stroke="{VERMILLION}"', picture)
    (x, top, start), (_, end, bottom) = [tuple(map(float, line)) for line in lines]
    assert left < x < right and top < start <= above + 1 and below - 2 <= end < bottom


def test_a_name_crosses_the_limit_rather_than_go_far_away_and_keeps_clear_of_the_limits_name():
    """As in a report: a line close to the left of the point, and the limit close to the right."""
    line, limit = boxes_along([(40, 0), (45, 200)]), boxes_along([(120, 0), (120, 200)])
    (near,) = place_labels([(50, 100)], [(150, 14)], (0, 0, 600, 200), taken=line, crossed=limit)
    assert near[0] == pytest.approx(59) and near[2] > 120, "beside the point"
    (clear,) = place_labels([(50, 100)], [(60, 14)], (0, 0, 600, 200), crossed=boxes_along([(100, 0), (100, 200)]))
    assert not clear[0] < 100 < clear[2], "a place nearby without crossing"
    root = ElementTree.fromstring(named_point((2.15, 3.0), [(1.0, 1.0), (4.0, 1.0)], 2.2))
    assert not overlap(*boxes(root, "a_named_policy", "budget"))


@pytest.mark.parametrize(("width", "interrupting"), [(800, ["29 B"]), (380, ["off", "full", "29 B"])])
def test_texts_interrupt_the_line_of_the_limit(width, interrupting):
    """In a narrow picture the names are above the bars."""
    memory = {"off": {("a", "kept"): 40}, "full": {("a", "kept"): 29}}
    root = ElementTree.fromstring(stacked_figure(memory, "bytes", limit=("budget", 30), width=width).svg())
    dashed = [path.get("d") for path in root.iter(f"{SVG}path") if path.get("stroke-dasharray")]
    *spans, _of_the_key = [tuple(map(float, re.findall(r" ([\d.]+)", line))) for line in dashed]
    middles = [float(text.get("y")) - 4 for text in root.iter(f"{SVG}text") if text.text in interrupting]
    assert len(spans) == 3, "one line of off and two of full"
    assert len(middles) == len(interrupting) and not any(top < at < bottom for top, bottom in spans for at in middles)


# Stacked bars.


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
    shown = texts(ElementTree.fromstring(picture.svg()))
    assert shown[0] == "net on h200" and [text for text in shown if text in MEMORY] == ["off", "full"]
    assert {"on the device at the peak, MiB", "of each bar, %"} <= set(shown)
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
    assert [text for text in shown if text.endswith("0 MiB")] == ["113.0 MiB", "15.0 MiB"]
    legend = ["A", "block_*/up", "B", "head", "C", "of no module", "D", "parameters", "E", "batch"]
    assert shown[-11:] == [*legend, "hatched: recomputed or backward"]
    # A wide enough part has its letter, so colour is not its only mark.
    assert shown.count("A") == 6 and shown.count("E") == 1


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
