"""Charts of `remat_jax.report`: what is drawn equals what was given."""

from __future__ import annotations

import re
from itertools import combinations, pairwise
from xml.etree import ElementTree

import pytest

from remat_jax.report.chart import Panel, Series, boxes_along, chart, place_labels
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


def test_ticks_are_written_plainly():
    labels = texts(drawn(Panel("t", "x", "y", [Series("a", INK, [(4, 1), (256, 128)])], True, True)))
    assert {"4", "64", "256", "2", "128"} <= set(labels) and not any("." in text for text in labels)


def test_panels_stand_side_by_side():
    root = drawn(PANEL, Panel("Other", "x", "y", [RESULT], binary_y=True))
    at = {text.text: float(text.get("x")) for text in root.iter(f"{SVG}text")}
    assert at["Other"] - at["Work"] == 500 and "0.25" in texts(root)


def test_names_cover_neither_names_nor_points_nor_lines():
    points = [(1.0, 122.0), (1.29, 14.0), (1.31, 14.0), (1.33, 14.0), (1.0, 122.5), (1.41, 0.0)]
    names = ["off", "checkpoint", "the same", "again", "off", "a name that is long"]
    line = sorted(points)
    root = drawn(Panel("t", "x", "y", [Series("a", INK, line, points, names=names)]))
    joined = next(path.get("d") for path in root.iter(f"{SVG}path") if path.get("stroke") == INK)
    corners = [tuple(map(float, corner.split())) for corner in joined[1:].split("L")]
    marks = [((1 - at) * a + at * c, (1 - at) * b + at * d) for (a, b), (c, d) in pairwise(corners) for at in EIGHTHS]
    boxes = []
    for text in root.iter(f"{SVG}text"):
        if text.text in names and text.get("font-size") == "12":
            left, bottom = float(text.get("x")), float(text.get("y"))
            boxes.append((left, bottom - 10, left + text_width(text.text, 12), bottom + 2))
    marks += [(float(circle.get("cx")), float(circle.get("cy"))) for circle in root.iter(f"{SVG}circle")]
    assert len(boxes) == 6 and len(marks) == 5 * 8 + 7
    assert [(a, b) for a, b in combinations(boxes, 2) if overlap(a, b)] == []
    assert [(box, x) for box in boxes for x, y in marks if box[0] < x < box[2] and box[1] < y < box[3]] == []
    assert all(70 <= box[0] and box[2] <= 1000 for box in boxes)


def test_a_name_keeps_clear_of_a_line_of_other_names_and_of_the_edge():
    (box,) = place_labels([(50, 50)], [(20, 10)], (0, 0, 100, 100), taken=boxes_along([(50, 50), (100, 50)]))
    assert not box[1] < 50 < box[3] or box[2] < 50
    boxes = place_labels([(50, 50)] * 4, [(30, 10)] * 4, (0, 0, 200, 100))
    assert [(a, b) for a, b in combinations(boxes, 2) if overlap(a, b)] == []
    assert len(place_labels([(5, 5)] * 9, [(30, 10)] * 9, (0, 0, 10, 10))) == 9, "a full area has each name all the same"
    # To the right it would be cut off; the first place inside the area is to the left, slightly higher than the point.
    (at_the_edge,) = place_labels([(98, 50)], [(30, 10)], (0, 0, 100, 100))
    assert at_the_edge == pytest.approx((59.818, 48.623, 89.818, 58.623), abs=1e-3)


def test_a_name_keeps_clear_of_the_ring_around_its_point_and_of_the_limit():
    """Right of its point, the name would cross the limit."""
    point = (2.0, 1.0)
    named = Series("named", INK, points=[point, (1.0, 2.0), (4.0, 3.0)], names=["a_named_policy", "", ""])
    root = drawn(Panel("", "x", "y", [named, Series("ring", VERMILLION, rings=[point])], limit=("budget", 2.2)))
    ring = next(circle for circle in root.iter(f"{SVG}circle") if circle.get("stroke") == VERMILLION)
    limit = next(text for text in root.iter(f"{SVG}text") if text.text == "budget")
    name = next(text for text in root.iter(f"{SVG}text") if text.text == "a_named_policy")
    left, below = float(name.get("x")), float(name.get("y"))
    right, above = left + text_width("a_named_policy", 12), below - 12
    across, down = float(ring.get("cx")), float(ring.get("cy"))
    assert right < across - 11 or left > across + 11 or above > down + 11 or below < down - 11
    assert not left <= float(limit.get("x")) + 6 <= right


def test_a_limit_has_a_gap_for_a_name_that_must_cross_it():
    name, place = "a_policy_with_a_long_name", (2.0, 1.0)
    named = Series("named", INK, points=[place, (1.0, 2.0), (4.0, 3.0)], names=[name, "", ""])
    picture = chart([Panel("", "x", "y", [named], limit=("budget", 2.2))], width=280).svg()
    text = next(text for text in ElementTree.fromstring(picture).iter(f"{SVG}text") if text.text == name)
    left, below = float(text.get("x")), float(text.get("y"))
    lines = re.findall(rf'd="M([\d.]+) ([\d.]+)L[\d.]+ ([\d.]+)" fill="none" stroke="{VERMILLION}"', picture)
    (x, top, start), (_, end, bottom) = [tuple(map(float, line)) for line in lines]
    assert left < x < left + text_width(name, 12)
    assert top < start <= below - 9 and below <= end < bottom


def test_a_limit_is_named_and_in_view():
    picture = chart([Panel("t", "x", "y", [RESULT], limit=("budget", 40.0))])
    x = re.search(r'd="M([\d.]+) [^"]*" fill="none" stroke="#D55E00" stroke-width="1.3" stroke-dasharray', picture.svg())
    assert x is not None and 900 < float(x[1]) < 985 and ">budget<" in picture.svg()


def test_nothing_to_draw_is_refused():
    with pytest.raises(ValueError, match="panels is empty"):
        chart([])
    with pytest.raises(ValueError, match=r"panels\[1\] has no point to draw"):
        chart([PANEL, Panel("t", "x", "y", [Series("a", INK)])])
