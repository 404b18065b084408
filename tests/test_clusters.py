"""The benchmark of decoders on clusters: its table from recorded rows, claims that can fail, its steps."""

from __future__ import annotations

import json

import jax
import pytest

from benchmarks.clusters import __main__ as command
from benchmarks.clusters import cases, layer, table
from benchmarks.clusters.rows import PLAN, STATE
from benchmarks.record import ROOT
from examples.models.moe import MoeConfig
from remat_jax.hardware import target

GB = 10**9
OFF = {
    "case": "8b",
    "workload": "w",
    "target": "8xh200",
    "policy": "off",
    "budget": 100 * GB,
    "device_bytes": 200 * GB,
    "exchanged_bytes": 6 * GB,
    "host_bytes": 0,
    "host_bytes_per_host": 0,
    "collectives": {"all-gather": [10, 50 * GB], "reduce-scatter": [5, 20 * GB]},
}
FULL = OFF | {"policy": "full", "device_bytes": 60 * GB, "collectives": {"all-gather": [12, 50 * GB], "all-to-all": [1, GB]}}
STATED = FULL | {"policy": STATE, "host_bytes": 5 * GB, "host_bytes_per_host": 40 * GB}
PLANNED = FULL | {"policy": PLAN, "warnings": [], "seconds": 1.25}
INPUTS = FULL | {"policy": "offload_inputs", "seconds": 1.2}


def test_the_table_says_what_fits_and_what_is_sent():
    lines = [line.split() for line in table.table([OFF, FULL, STATED]).splitlines()[1:]]
    assert lines[0] == ["w", "off", "200.0", "no", "6.0", "(3%)", "10", "50.0", "5", "20.0"]
    assert lines[1] == ["w", "full", "60.0", "yes", "6.0", "(10%)", "12", "50.0", "1.0"]
    assert lines[2] == ["w", *STATE.split(), "60.0", "yes", "6.0", "(10%)", "40.0", "12", "50.0", "1.0"]
    assert "70.0 at least" in table.table([{**OFF, "policy": PLAN, "infeasible": 70 * GB}])
    measured = FULL | {"seconds": 1.5, "collective_seconds": [0.25, 1.0], "wall_seconds": 4.2}
    assert table.summary(measured) == "60.0 GB, step 1.50 s, collectives 1.00 s, 0.25 overlapped (measured in 4 s)"
    timed = [OFF | {"seconds": 1.0}, FULL | {"seconds": 1.5}, PLANNED, INPUTS]
    line = "w, estimated seconds as compiled: plan 1.25, offload_inputs 1.20, full 1.50"
    assert table.compiled_seconds(timed) == [line], "off does not fit"
    over = INPUTS | {"device_bytes": 101 * GB}
    assert table.compiled_seconds([*timed[:3], over]) == [line.replace("offload_inputs 1.20, ", "")]
    assert table.gathered_again([OFF, FULL]) == [
        "w: all-gather under full against off: +2 arrays, +0.000 GB",
        "w: all-to-all under full against off: +1 arrays, +1.000 GB",
    ]
    again = FULL | {"device_bytes": 1}
    rows = table.ordered([FULL, OFF, again, PLANNED | {"case": "70b"}], ["8b", "70b"], ["off", "full", PLAN])
    assert rows == [OFF, again, PLANNED | {"case": "70b"}], "the last of equal rows counts"


@pytest.mark.parametrize(
    ("failure", "row"),
    [
        ("w, plan: the plan needs 102.4 GiB", PLANNED | {"device_bytes": 110 * GB}),
        ("w, plan: a host has less", PLANNED | {"warnings": ["a host has less"]}),
        ("w, plan: 1.60 s as compiled, and full 1.50 s", PLANNED | {"seconds": 1.6}),
        ("w, plan: all-to-all of 9.0 GB, and 1.0 under full", PLANNED | {"collectives": {"all-to-all": [1, 9 * GB]}}),
        ("w, full: 51.0 GB are gathered, and 50.0 under off", FULL | {"collectives": {"all-gather": [12, 51 * GB]}}),
        (f"w, {STATE}: nothing is in host memory", STATED | {"host_bytes": 0}),
    ],
)
def test_a_claim_can_fail(failure, row):
    timed = FULL | {"seconds": 1.5}
    assert table.failures([OFF, timed, STATED, PLANNED, INPUTS]) == [], "4 % are the estimate's error"
    assert table.failures([OFF, row, timed] if row["policy"] == PLAN else [OFF, row]) == [failure]


def test_the_decoders_have_their_published_sizes_and_their_state_goes_to_the_hosts():
    sizes = {}
    for name, case in cases.CASES.items():
        work = case.make(case.hosts[0])
        sizes[name] = sum(leaf.size for leaf in jax.tree.leaves(work.params)) / 1e9
        assert work.mesh.size == target(cases.on_gpus("h200", case.hosts[0])).devices
    assert {name: round(size, 1) for name, size in sizes.items()} == {"8b": 8.0, "70b": 70.6, "405b": 405.9, "moe": 235.1}
    moved = cases.with_state_on_hosts(cases.CASES["8b"].make(1)).step("full")
    kinds = [place.memory_kind for place in jax.tree.leaves(moved.shardings[1])]
    assert kinds.count("pinned_host") == len(kinds) - 1, "all but the step count"


def test_every_recorded_result_holds_what_the_benchmark_claims(capsys):
    files = sorted((ROOT / "benchmarks" / "results").glob("*-clusters-*.json"))
    assert files and command.main(["--show", *map(str, files)]) == 0
    shown = capsys.readouterr().out
    note = (ROOT / "docs" / "notes" / "clusters.md").read_text(encoding="utf-8")
    assert all(line.rstrip() in note for line in shown.splitlines()), "the note has the table that the command prints"
    assert {row["case"] for path in files for row in json.loads(path.read_text(encoding="utf-8"))["rows"]} >= {"8b", "70b"}


def test_a_layer_of_experts_takes_as_long_on_more_hosts(capsys):
    config = MoeConfig(64, 64, 32, num_heads=8, num_kv_heads=8, num_experts=8)
    times = {hosts: layer.layer_seconds(hosts, "h200", config, 64) for hosts in (1, 2)}
    assert layer.apart(times) < layer.LARGEST_SPREAD and min(times[2]) > 0
    assert layer.say({2: (1.0, 2.0), 64: (1.0, 2.2)}) == 1 and "6.7 % longer" in capsys.readouterr().out
