"""A plan's page and picture: what is in them, and that the page asks no server for anything."""

from __future__ import annotations

import json
import re
from xml.etree import ElementTree

import pytest

from remat_jax.planning.page import page, picture, with_plan
from remat_jax.planning.point import Point, unbeaten
from remat_jax.report.frontier import frontier_figure
from tests.plan_by_hand import MIB, plan

SVG = "{http://www.w3.org/2000/svg}"


def data_of(text):
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)[1])


def test_the_page_has_the_plan_and_asks_for_nothing():
    text = page(plan())
    data = data_of(text)
    assert data["chosen"] == 1 and data["budget"] == 100 * MIB
    assert [(one["device"], one["compiled"]) for one in data["points"]] == [
        (60 * MIB, False),
        (90 * MIB, True),
        (120 * MIB, False),
    ]
    assert [one["name"] for one in data["named"]] == ["full", "everything"]
    first = data["points"][1]["parts"][0]
    assert first["where"] == "PlannedLayer 0–2" and first["bytes"] == {
        "save": 6 * MIB,
        "offload": 24 * MIB,
        "recompute": 24 * MIB,
    }
    assert [row[1] for row in first["rows"]] == ["save", "offload", "recompute"]
    assert not re.search(r"https?:|src=|@import|url\(|fetch\(|<link", text)
    assert 'type="range"' in text and "color-scheme: light dark" in text and "aria-live" in text


def test_a_name_cannot_break_out_of_the_page():
    text = page(plan(workload="</script><script>alert(1)</script>"))
    assert "<script>alert" not in text and text.count("<script") == 2 and data_of(text)["title"].startswith("</script>")


def test_a_plan_that_is_beaten_by_a_prediction_is_on_its_page():
    other = plan(frontier=plan().frontier[:1] + plan().frontier[2:])
    assert [one.device_bytes for one in with_plan(other)] == [60 * MIB, 90 * MIB, 120 * MIB]
    assert data_of(page(other))["chosen"] == 1


def test_the_picture_has_every_policy_and_the_budget():
    drawn = ElementTree.fromstring(picture(plan()).svg())
    texts = [one.text for one in drawn.iter(f"{SVG}text")]
    assert {"budget", "full", "everything", "device memory, MiB", "estimated step, ms"} <= set(texts)
    says = [title.text for title in drawn.iter(f"{SVG}title")]
    assert [text for text in says if ":" not in text] == ["60, 13.1", "90, 12.5", "120, 12"]
    slow = (*plan().named, Point("slow", 70 * MIB, 0, 0.2, False))
    drawn = ElementTree.fromstring(picture(plan(named=slow)).svg())
    texts = [one.text for one in drawn.iter(f"{SVG}text")]
    # At the upper edge, a quarter above the slowest of the line, and no tick is anywhere near its time.
    assert "slow ↑ 200 ms" in texts and "20" not in texts and "200" not in texts
    with pytest.raises(ValueError, match="frontier is empty"):
        frontier_figure([], [], (1, 1.0, True), 1, "t")


def test_unbeaten_points():
    def point(size, seconds):
        return Point("", size, 0, seconds, False)

    found = unbeaten(
        [point(4, 1.0), point(1, 3.0), point(2, 3.0), point(3, 2.0), point(5, 1.0), Point("x", None, 0, None, False)]
    )
    assert [(one.device_bytes, one.seconds) for one in found] == [(1, 3.0), (3, 2.0), (4, 1.0)]


def test_a_host_budget_counts():
    text = page(plan(host_budget=24 * MIB))
    rows = re.findall(r"<tr[^>]*>(?:(?!</tr>).)*(within|over on the host|over)</td></tr>", text, re.DOTALL)
    assert data_of(text)["host_budget"] == 24 * MIB and data_of(page(plan()))["host_budget"] is None
    assert rows == ["over on the host", "within", "over", "within", "over"]
