"""`benchmarks.tpu`: what counts as a broken promise of a plan, and which rows a resumed run makes."""

from __future__ import annotations

from typing import Any

import pytest

import remat_jax as rj
from benchmarks import tpu
from benchmarks.tpu_models import MODELS

GOOD = {"bytes": 140, "seconds": 0.95, "host_bytes": 0}


def row(share: str = "middle", budget: int = 150, **changed: Any) -> dict[str, Any]:
    policies = {tpu.LEAST: {"bytes": 100, "seconds": 1.0}, tpu.MOST: {"bytes": 200, "seconds": 0.8}}
    start = {"chip": "v5e", "model": "NNX", "share": share, "budget": budget, "policies": policies, "wall_seconds": 1.0}
    if "error" in changed:
        return start | changed
    plan = GOOD | changed.pop("plan", {})
    apart = {"device": plan["bytes"], "host": plan["host_bytes"]}
    return start | {"plan": plan, "apart": apart, "named": {}, "tried": [["full", 100]]} | changed


@pytest.mark.parametrize(
    ("rows", "found"),
    [
        ([row()], []),
        ([row(plan={"seconds": 1.004})], []),
        ([row(plan={"seconds": 1.006})], ["v5e, NNX, middle: 0.6% slower than a step that fits"]),
        ([row(named={"a": {"bytes": 150, "seconds": 0.9}})], ["v5e, NNX, middle: 5.6% slower than a step that fits"]),
        ([row(named={"a": {"bytes": 151, "seconds": 0.9}})], []),
        ([row(plan={"bytes": 151})], ["v5e, NNX, middle: 1 bytes over the budget"]),
        ([row(), row("high", 180, plan={"seconds": 0.99})], ["v5e, NNX, high: 4.2% slower than a step that fits"]),
        ([row(error="CompileError: no")], ["v5e, NNX, middle: CompileError: no"]),
    ],
)
def test_broken_promises(rows: list[dict[str, Any]], found: list[str]) -> None:
    assert tpu.faults(rows) == found
    tpu.show(rows)


@pytest.mark.parametrize("space", ["device", "host"])
def test_other_bytes_apart(space: str) -> None:
    changed = row()
    changed["apart"][space] += 1
    (fault,) = tpu.faults([changed])
    assert fault.startswith("v5e, NNX, middle: {'bytes': 140")


def test_a_resumed_run_makes_only_the_missing_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(workload: rj.Workload, policies: list[str], chip: str) -> list[Any]:
        class Report:
            device_bytes, seconds = 1000, 1.0

        class Larger(Report):
            device_bytes = 2000

        return [Report, Larger]

    monkeypatch.setattr(tpu, "measure_many", measured)
    monkeypatch.setattr(tpu, "plan_row", lambda workload, budget, chip, timeout: {"plan": {"bytes": budget}})
    known = [row(share) | {"model": model} for model in MODELS for share in tpu.SHARES if (model, share) != ("NNX", "high")]
    (made,) = tpu.planned(["v5e"], list(MODELS), 1.0, known)
    assert (made["model"], made["share"], made["budget"]) == ("NNX", "high", 1800)
    assert len(list(tpu.planned(["v6e"], ["NNX"], 1.0, known))) == len(tpu.SHARES)
