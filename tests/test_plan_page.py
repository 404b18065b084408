"""A plan's page and picture: their contents, and that the page makes no requests."""

from __future__ import annotations

import html
import re
from dataclasses import replace
from xml.etree import ElementTree

import pytest

from remat_jax.planning.explain import beyond_table, signed, time_text
from remat_jax.planning.page import page, picture, with_plan
from remat_jax.planning.plan_data import Beyond, Point
from remat_jax.report.chart import FRONTIER, THE_PLAN, UNUSABLE
from remat_jax.report.svg import GREY, NARROW, WHITE, WIDTH
from remat_jax.report.tables import render
from tests.plan_by_hand import MIB, plan

SVG = "{http://www.w3.org/2000/svg}"


def rows_of(text, label):
    """The exact values, or the texts, of the cells of a table's rows."""
    table = re.search(f'aria-label="{re.escape(label)}"(.*?)</table>', text, re.DOTALL)[1]
    rows = re.findall(r"<tr.*?</tr>", table.partition("<tbody>")[2], re.DOTALL)
    return [[html.unescape(value) for value in re.findall(r'data-value="(.*?)"', row)] for row in rows]


def test_the_page_has_the_plan_and_asks_for_nothing():
    text = page(plan())
    assert '<input id="at" type="range" min="0" max="2" step="1" value="1">' in text
    assert [(row[0], int(row[1]), row[3], row[5]) for row in rows_of(text, "the frontier")] == [
        ("", 60 * MIB, "predicted", "traced"),
        ("the plan", 90 * MIB, "compiled", "traced"),
        ("", 120 * MIB, "predicted", "traced"),
    ]
    named = [(row[0], row[3], row[-1]) for row in rows_of(text, "the named policies")]
    assert named == [("full", "compiled", "within"), ("everything", "predicted", "over"), ("dots", "", "it selects nothing")]
    # The layers of every point are in the page; all but the plan's are hidden.
    points = re.findall(r'<div data-point="(\d)"( hidden)?>', text)
    assert points == [("0", " hidden"), ("1", ""), ("2", " hidden")]
    layers = text.partition('<div data-point="1">')[2]
    parts = rows_of(layers, "residuals of the layers, as a table")
    assert [(row[1], int(row[3])) for row in parts[:3]] == [
        ("saved", 6 * MIB),
        ("offloaded", 24 * MIB),
        ("recomputed", 24 * MIB),
    ]
    assert [row[1] for row in rows_of(layers, "residuals of PlannedLayer 0–2")] == ["save", "offload", "recompute"]
    assert not re.search(r"https?:|src=|@import|url\(|fetch\(|<link", text)
    assert 'type="range"' in text and "color-scheme: light dark" in text and "aria-live" in text


def test_the_page_shows_the_picture_that_is_saved():
    """Drawn for a wide window, beside a picture for a narrow window."""
    text, saved = page(plan()), picture(plan(), title="")
    assert saved.html() in text and saved.svg() == saved.html().replace("<svg", '<svg xmlns="http://www.w3.org/2000/svg"')
    assert picture(plan(), title="", width=NARROW).html() in text
    # The script finds the line's points, and the ring that it copies, by their names.
    for width in (WIDTH, NARROW):
        groups = {group.get("data-series"): list(group) for group in ElementTree.fromstring(picture(plan(), width=width).svg())}
        marks, (ring,) = groups["frontier"], groups["the plan"]
        places = [(mark.get("cx"), mark.get("cy")) for mark in marks]
        assert len(places) == len(set(places)) == 3 and (ring.get("cx"), ring.get("cy")) == places[1]
    assert all(f"[data-series='{name}'] circle" in text for name in (FRONTIER, THE_PLAN))


def test_times_at_assumed_rates_are_ranges_in_tables_too():
    text = page(plan(assumed_rates=("flops",)))
    assert text.count("11 ms to 17 ms") > 2 and "12 ms<" not in text
    told = "the tables give a range for each time"
    assert told in text and told not in page(plan())


def test_a_plan_that_is_beaten_by_a_prediction_is_on_its_page():
    beaten = plan(frontier=plan().frontier[:1] + plan().frontier[2:])
    assert [point.device_bytes for point in with_plan(beaten)] == [60 * MIB, 90 * MIB, 120 * MIB]
    assert [row[0] for row in rows_of(page(beaten), "the frontier")] == ["", "the plan", ""]


def test_the_picture_has_every_policy_and_the_budget():
    drawn = ElementTree.fromstring(picture(plan()).svg())
    texts = [element.text for element in drawn.iter(f"{SVG}text")]
    assert {"budget", "full", "everything", "device memory, MiB", "estimated step, ms"} <= set(texts)
    tooltips = [title.text for title in drawn.iter(f"{SVG}title")]
    assert [text.split(" a step")[0] for text in tooltips if ":" not in text] == [
        "60.0 MiB (predicted), 13 ms",
        "90.0 MiB (compiled), 12 ms",
        "120.0 MiB (predicted), 12 ms",
    ]
    # Points of 60, 90 and 120 MiB, of 13.1, 12.5 and 12 ms.
    (left, top), (middle, centre), (right, bottom) = (
        (float(mark.get("cx")), float(mark.get("cy"))) for mark in list(drawn.iter(f"{SVG}circle"))[:3]
    )
    assert middle - left == pytest.approx(right - middle, abs=0.02)
    assert centre - top == pytest.approx(1.2 * (bottom - centre), abs=0.05)
    # At the upper edge, a quarter above the slowest point of the line, without a tick near its time; between that and the
    # frame a point has its own place.
    for seconds, name in ((0.2, "slow ↑ 200 ms"), (0.0131 * 1.25 * 1.11, "slow")):
        slow = (*plan().named, Point("slow", 70 * MIB, 0, seconds, False))
        texts = [text.text for text in ElementTree.fromstring(picture(plan(named=slow)).svg()).iter(f"{SVG}text")]
        assert name in texts and not {"20", "200"} & set(texts)


def test_a_policy_that_cannot_be_the_plan_is_a_grey_diamond_with_its_reason():
    """A policy without figures, such as `dots` of the handmade plan, has no place."""
    near = Point("dots", 95 * MIB, 0, 0.0122, True, remark="too large with cuBLAS")
    guessed = Point("slim", 98 * MIB, 0, 0.0121, False, remark="probably too large with cuBLAS")
    made = plan(named=(*plan().named[:2], near, guessed, plan().named[2]))
    drawn = ElementTree.fromstring(picture(made).svg())
    groups = {group.get("data-series"): list(group) for group in drawn.iter(f"{SVG}g")}
    assert [mark.tag for mark in groups["a named policy"]] == [f"{SVG}circle"] * 2
    diamonds = groups[UNUSABLE]
    assert [mark.tag for mark in diamonds] == [f"{SVG}polygon"] * 2
    assert [mark.get("fill") for mark in diamonds] == [GREY, WHITE], "a prediction is hollow"
    tips = [mark.find(f"{SVG}title").text for mark in diamonds]
    assert tips[0].startswith("dots: 95.0 MiB (compiled), 12 ms") and tips[0].endswith("; too large with cuBLAS")
    assert tips[1].endswith("; probably too large with cuBLAS")
    texts = [element.text for element in drawn.iter(f"{SVG}text")]
    assert {"dots", "slim", UNUSABLE} <= set(texts) and "Grey diamonds" in page(made)
    assert UNUSABLE not in picture(plan()).svg() and "Grey diamonds" not in page(plan())


def test_figures_on_a_mesh_are_per_device():
    on_mesh = plan(model=replace(plan().model, mesh=(("fsdp", 8),)))
    for made, each, device in ((plan(), "", "the"), (on_mesh, " per device", "each")):
        assert f"<title>by hand on h200, within 100.0 MiB{each}</title>" in page(made)
        text = render(made, 200)
        assert f"Plan for by hand on h200 within 100.0 MiB{each}: 90.0 MiB compiled" in text
        assert f"Compiled: 90.0 MiB on {device} device" in text


def test_a_change_beyond_the_blocks_is_faster_or_slower_than_the_plan():
    beyond = tuple(Beyond("micro_batches", MIB, 0.0125 - gain) for gain in (0.001, -0.001, 0.0))
    table = beyond_table(plan(beyond=beyond))
    cells = {column.header.plain: [cell.plain for cell in column.cells] for column in table.columns}
    assert cells["than this plan"] == ["1 ms faster", "1 ms slower", "0 s"]
    (shown,) = re.findall(r"<h2>Changes beyond the blocks.*?</table>", page(plan(beyond=beyond)), re.DOTALL)
    assert re.findall(r"<td[^>]*>(1 ms \w+|0 s)</td>", shown) == cells["than this plan"]
    assert "Changes beyond the blocks" not in page(plan())


def test_a_negative_range_of_times_does_not_look_like_its_lower_end():
    made = plan(base_seconds=1.0)
    assert signed(made, 0.01) == time_text(made, 0.01) and "-" not in signed(made, -0.01)
    assert signed(made, -0.01) == f"{time_text(made, 0.01)} less"
    assert signed(made, -0.01, "slower") == f"{time_text(made, 0.01)} slower"


def test_a_host_budget_counts():
    text = page(plan(host_budget=24 * MIB))
    assert [row[6] for row in rows_of(text, "the frontier")] == ["over on the host", "within", "over"]
    assert [row[-1] for row in rows_of(text, "the named policies")] == ["within", "over", "it selects nothing"]
    says = re.findall('data-says="(.*?)"', text)
    assert [sentence.partition("; ")[2] for sentence in says] == ["over the budget of host memory", "", "over the budget"]
    assert "host memory" not in "".join(re.findall('data-says=".*?; (.*?)"', page(plan())))
