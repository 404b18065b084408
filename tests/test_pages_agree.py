"""The figures of a plan's page and of a report's page are those that the same command prints with `--json`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from remat_jax.cli.app import app
from remat_jax.report.document import escaped
from remat_jax.report.tables import format_bytes, format_difference
from tests.workloads import needs_gpu_compiler

pytestmark = needs_gpu_compiler

JOB = """
from tests.plan_models import job as stack

def job():
    return stack(65536, scanned=True, layers=4)
"""
ORIGIN = {True: "compiled", False: "traced"}


class Shown:
    """What `plan` and `report` print with `--json` for one workload, and their pages."""

    def __init__(self, folder: Path) -> None:
        (folder / "train.py").write_text(JOB)
        job, pages, saved = f"{folder}/train.py:job", [folder / "plan.html", folder / "report.html"], folder / "plan.json"
        self.plan = self._run("plan", job, "--budget", "130MiB", "--html", pages[0], "--save", saved)
        self.report = self._run("report", job, "--plan", saved, "--output", pages[1])
        self.plan_page, self.report_page = (page.read_text(encoding="utf-8") for page in pages)
        self.in_report: dict[str, Any] = self.report["plan"]
        self.policies: dict[str, dict[str, Any]] = {row["policy"]: row for row in self.report["policies"]}

    def _run(self, *arguments: Any) -> Any:
        done = CliRunner().invoke(app, [*map(str, arguments), "--target", "h200", "--json"])
        assert done.exit_code == 0, done.stderr
        return json.loads(done.stdout)

    @property
    def plans(self) -> list[tuple[dict[str, Any], str]]:
        """The plan and the page that shows it, of each command."""
        return [(self.plan, self.plan_page), (self.in_report, self.report_page)]


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Shown:
    return Shown(tmp_path_factory.mktemp("pages"))


def points(plan: dict[str, Any]) -> list[dict[str, Any]]:
    """The points of the plan's line, with the plan."""
    figures = {name: plan[name] for name in ("device_bytes", "host_bytes", "seconds", "timed")}
    its_own = {"name": "the plan", "compiled": True, **figures}
    others = [point for point in plan["frontier"] if not is_plan(plan, point)]
    return sorted([its_own, *others], key=lambda point: (point["device_bytes"], point["seconds"]))


def is_plan(plan: dict[str, Any], point: dict[str, Any]) -> bool:
    same = (point["device_bytes"], point["seconds"]) == (plan["device_bytes"], plan["seconds"])
    return bool(point["compiled"] and same)


def row(plan: dict[str, Any], point: dict[str, Any]) -> list[str]:
    """A point's row on a page."""
    return [
        point["name"],
        format_bytes(point["device_bytes"]),
        format_bytes(point["host_bytes"]),
        "compiled" if point["compiled"] else "predicted",
        format_difference(point["seconds"], True),
        ORIGIN[point["timed"]],
        point.get("remark") or ("within" if point["device_bytes"] <= plan["budget"] else "over"),
    ]


def test_the_figures_beside_the_slider_are_those_of_the_line(shown: Shown) -> None:
    for plan, page in shown.plans:
        lists = re.findall(r'<dl class="figures".*?</dl>', page)
        assert len(lists) == len(points(plan)) >= 2
        for text, point in zip(lists, points(plan), strict=True):
            extra, left = point["seconds"] - plan["base_seconds"], plan["budget"] - point["device_bytes"]
            share = f" ({100 * abs(extra) / plan['base_seconds']:.2g} %)"
            time = format_difference(point["seconds"], True)
            assert re.findall("<dd>(.*?)</dd>", text) == [
                format_bytes(point["device_bytes"]),
                format_bytes(point["host_bytes"]),
                f"{time}, {'compiled schedule' if point['timed'] else 'traced program'}",
                format_difference(extra, True) + share,
                format_bytes(abs(left)),
            ]
            assert f"{format_bytes(point['device_bytes'])} ({row(plan, point)[3]}), {time} a step" in text
            assert ("The plan: " in text) == (point["name"] == "the plan")


def test_all_estimated_times_are_ranges_of_times_in_the_json(shown: Shown) -> None:
    """In sentences too. Reasons for residuals have prices, traps have nominal times, and facts have rates."""
    for plan, page in shown.plans:
        text = re.sub(
            r'<svg.*?</svg>|<pre>.*?</pre>|<(ul class="findings"|dl class="facts").*?</[ud]l>', "", page, flags=re.DOTALL
        )
        every = [*points(plan), *plan["named"], *shown.policies.values()]
        seconds = [point["seconds"] for point in every if point["seconds"] is not None]
        times = [*seconds, *(each - plan["base_seconds"] for each in seconds), plan["next_gib_seconds"]]
        changed = [change["seconds"] for change in plan["beyond"] if change["seconds"] is not None]
        times += [*changed, *(each - plan["seconds"] for each in changed)]
        for point in (plan, *plan["frontier"]):
            for part in point["parts"]:
                times.append(part["layers"] * (part["recompute_seconds"] + part["copy_seconds"]))
                times += [residual["seconds"] for residual in part["rows"]]
        wanted = {format_difference(abs(time), True) for time in times if time is not None}
        found = re.findall(r"[\d.]+ (?:s|ms|µs|ns)(?: to [\d.]+ (?:s|ms|µs|ns))?\b", text)
        assert len(found) > 20 and set(found) <= wanted | {"0 s"}
        assert escaped(format_difference(plan["seconds"], True)) in text
