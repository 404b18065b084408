"""The benchmark of plans: what its table says, and that a plan which breaks its promise shows."""

from __future__ import annotations

import pytest

from benchmarks import plan as benchmark

ROW = {
    "workload": "w",
    "budget": 3 * 2**20,
    "device_bytes": 2**21,
    "seconds": 0.010,
    "base_seconds": 0.008,
    "best_named": "full",
}
ROW |= {"best_named_seconds": 0.012, "compiled": 5, "wall_seconds": 31.4, "fits": True, "not worse": True}


def test_the_table_has_extra_times_and_their_ratio():
    none = ROW | {"best_named": None, "best_named_seconds": None}
    lines = [line.split() for line in benchmark.table([ROW, none, ROW | {"fits": False}]).splitlines()[1:]]
    assert lines[0] == ["w", "3.0", "MiB", "2.0", "MiB", "10.00", "2.00", "full", "4.00", "1.200", "5", "31", "yes"]
    assert lines[1][7:] == ["none", "fits", "5", "31", "yes"] and lines[2][-1] == "NO"


def test_a_plan_that_breaks_its_promise_fails_the_run(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(benchmark, "budgets", lambda workload, target, shares: [1, 2])
    monkeypatch.setattr(benchmark, "row", lambda workload, budget, target: ROW | {"not worse": budget == 1})
    assert benchmark.main(["--only", "scanned", "--output", str(tmp_path)]) == 1
    assert "NO" in capsys.readouterr().out and (tmp_path / "plan.json").exists()


def test_bad_shares_are_refused():
    with pytest.raises(SystemExit):
        benchmark.parse(["--shares", "1.5"])
