"""The benchmark of published models: its table from recorded rows, claims that can fail, and a run with a small model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import remat_jax as rj
from benchmarks.true_shapes import __main__ as command
from benchmarks.true_shapes import cases, claims, rows
from tests import plan_models

GB = 10**9
FULL: dict[str, Any] = {
    "workload": "w",
    "target": "h100",
    "budget": 80 * GB,
    "host_budget": 256 * GB,
    "policy": "full",
    "device_bytes": 60 * GB,
    "host_bytes": 0,
    "residual_device_bytes": 12 * GB,
    "wall_seconds": 1.0,
}
OFFLOAD = FULL | {"policy": "offload_inputs", "device_bytes": 50 * GB, "host_bytes": 11 * GB, "residual_device_bytes": GB}
PLAN = FULL | {
    "policy": "plan",
    "device_bytes": 79 * GB,
    "host_bytes": 5 * GB,
    "planned_device_bytes": 79 * GB,
    "planned_host_bytes": 5 * GB,
    "residual_device_bytes": 30 * GB,
    "estimated_seconds": 0.8,
    "named_seconds": {"full": 1.25, "offload_inputs": 1.5, "off": 0.5},
}
INFEASIBLE = {key: value for key, value in FULL.items() if not key.endswith("_bytes")} | {
    "policy": "plan",
    "infeasible": 85 * GB,
    "held_by": {"parameters": 41 * GB, "working set: layers": 30 * GB},
}


def plan(**changed: Any) -> list[dict[str, Any]]:
    return [FULL, PLAN | changed]


BROKEN: dict[str, list[dict[str, Any]]] = {
    "plan: the plan needs 75.4 GiB, and 4.7 GiB of the host": plan(device_bytes=81 * GB, planned_device_bytes=81 * GB),
    "plan: the plan needs 73.6 GiB, and 279.4 GiB of the host": plan(host_bytes=300 * GB, planned_host_bytes=300 * GB),
    "plan: applied, the plan needs 73.6 GiB of device memory, and reported 65.2 GiB": plan(planned_device_bytes=70 * GB),
    "plan: applied, the plan needs 4.7 GiB of host memory, and reported 1.9 GiB": plan(planned_host_bytes=2 * GB),
    "plan: full fits and is faster: 0.750 s against 0.800": plan(named_seconds={"full": 0.75}),
    "plan: nothing was found to fit, and full does: 55.9 GiB": [FULL, INFEASIBLE],
    "plan: no plan was made: it hung": [FULL, INFEASIBLE | {"error": "it hung"}],
    "offload_inputs: nothing is in host memory": [FULL, OFFLOAD | {"host_bytes": 0}],
    "offload_inputs: it needs more device memory than full: 56.8 GiB, full 55.9 GiB": [
        FULL,
        OFFLOAD | {"device_bytes": 61 * GB},
    ],
}


@pytest.mark.parametrize("message", BROKEN)
def test_each_claim_can_fail(message, tmp_path, monkeypatch, capsys):
    (tmp_path / "one.json").write_text(json.dumps({"provenance": {"versions": {"jax": "1"}}, "rows": BROKEN[message]}))
    assert command.main(["--show", str(tmp_path / "one.json")]) == 1
    assert f"w on h100, {message}\n" in capsys.readouterr().out


def test_a_small_model_through_all_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    job = plan_models.job(scanned=True)
    least, most = (rj.measure(job, policy).device_bytes for policy in ("full", "off"))
    budget = (least + most) // 2
    monkeypatch.setattr(command, "CASES", {"mlp": cases.Case(lambda: job, "all")})
    monkeypatch.setattr(command, "provenance", lambda: {"commit": "a", "versions": {"jax": "1"}})
    targets = ["--targets", f"cpu={budget}+0", "--output", str(tmp_path), "--only", "mlp"]
    status = command.main([*targets, "--policies", "full", "off", "plan"])
    by_policy = {row["policy"]: row for row in json.loads((tmp_path / "true_shapes.json").read_text())["rows"]}
    assert status == 0 and "All claims hold, of 1 plan among 3 rows." in capsys.readouterr().out
    assert (by_policy["full"]["device_bytes"], by_policy["off"]["device_bytes"]) == (least, most)
    assert least < by_policy["plan"]["device_bytes"] <= budget < most
    assert by_policy["plan"]["estimated_seconds"] < by_policy["plan"]["named_seconds"]["full"]
    assert by_policy["plan"]["trained"] == "all" and by_policy["plan"]["layers"]


def test_where_nothing_fits_the_row_says_what_is_the_least_and_what_takes_it() -> None:
    job = plan_models.job(scanned=True)
    row = rows.row(job, "plan", rows.Card("cpu", 10**6))
    assert row["infeasible"] > 10**6 and sum(row["held_by"].values()) == row["infeasible"]
    assert "parameters" in row["held_by"] and not claims.fits(row)
