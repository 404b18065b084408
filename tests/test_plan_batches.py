"""`rj.largest_batch`: the batches that it tries. `rj.batches`: examples per second, and why a larger batch gains nothing."""

from __future__ import annotations

import functools
import json

import numpy as np
import pytest
from typer.testing import CliRunner

import remat_jax as rj
from remat_jax.cli.app import app
from remat_jax.errors import ArgumentError, InfeasibleBudget
from remat_jax.planning import batch as batch_module
from remat_jax.planning import batches as module
from remat_jax.planning import loop
from tests import plan_by_hand
from tests.plan_models import job
from tests.workloads import needs_gpu_compiler

KB = 1000


@pytest.fixture
def planner(monkeypatch):
    """A compiler and a planner that are formulas of the rows: the bytes, and the seconds, of which `extra` is recomputation."""
    asked, planned = [], []

    def install(seconds=float, extra=lambda rows: 0.0, needs=lambda rows: 700 * rows, nothing_compiled_above=10**9):
        def leanest(workload, budget, target, host_budget, *, timeout):
            rows = workload.batch[0].shape[0]
            asked.append(rows)
            error = InfeasibleBudget(f"{rows} rows", needs(rows)) if needs(rows) > budget else None
            return (None if rows > nothing_compiled_above else needs(rows)), error

        def plan(workload, budget, *rest, timeout, progress=None):
            rows = workload.batch[0].shape[0]
            planned.append(rows)
            if needs(rows) > budget:
                raise InfeasibleBudget(f"{rows} rows", needs(rows))
            total = seconds(rows)
            values = {"seconds": total, "base_seconds": total - extra(rows), "device_bytes": needs(rows)}
            return plan_by_hand.plan(budget=budget, workload=workload.name, **values)

        monkeypatch.setattr(batch_module, "leanest", leanest)
        monkeypatch.setattr(batch_module, "plan", plan)
        monkeypatch.setattr(module, "plan", plan)
        return asked, planned

    return install


@pytest.mark.parametrize("start", [1, 7, 300])
@pytest.mark.parametrize(
    ("needs", "largest"),
    [
        (lambda rows: 10_000 + 700 * rows, 128),
        (lambda rows: 10_000 + 700 * rows + (3000 if rows % 2 else 0), 128),
        (lambda rows: 99_000 + rows, 1000),
        (lambda rows: 1000 * (1 + (rows - 1) // 4), 400),
        (lambda rows: 7 * rows * rows, 119),
    ],
)
def test_the_largest_batch_is_found(planner, needs, largest, start):
    asked, _ = planner(needs=needs)
    answer = rj.largest_batch(job, 100_000, "cpu", start=start)
    assert answer.batch == largest and needs(largest) <= 100_000 < needs(largest + 1)
    assert [rows for rows, _ in answer.tried] == asked and len(set(asked)) == len(asked) <= 20


def test_where_memory_grows_evenly_few_are_compiled(planner):
    asked, _ = planner(needs=lambda rows: 10_000 + 700 * rows)
    assert rj.largest_batch(job, 1_000_000, "cpu").batch == 1414
    assert len(asked) <= 8


def test_batches_too_large_to_compile_are_bisected(planner):
    planner(needs=lambda rows: 10_000 + 700 * rows, nothing_compiled_above=100)
    largest = rj.largest_batch(job, 70_000, "cpu")
    assert largest.batch == 85 and "too large" in str(largest) and largest.to_dict()["batch"] == 85


def test_a_batch_of_one_that_does_not_fit(planner):
    planner(needs=lambda rows: 200_000 + rows)
    with pytest.raises(InfeasibleBudget, match="1 rows"):
        rj.largest_batch(job, 100_000, "cpu", start=8)


def test_a_jump_in_memory_is_bisected(planner):
    """Two batches say repeatedly that the limit is just above the smaller one."""
    asked, _ = planner(needs=lambda rows: rows if rows <= 500 else 1_000_000 + rows)
    assert rj.largest_batch(job, 2000, "cpu").batch == 500 and len(asked) <= 40


def test_powers_of_two_the_largest_batch_and_one_that_does_not_fit(planner):
    _, planned = planner(lambda rows: 1.0 + 0.5 * rows)
    one_layer = functools.partial(job, layers=1)
    table = rj.batches(one_layer, 70 * KB, "cpu")
    assert [row.batch for row in table.rows] == [1, 2, 4, 8, 16, 32, 64, 100, 101]
    assert sorted(planned) == [1, 2, 4, 8, 16, 32, 64, 100]
    assert table.best.batch == 100 == rj.largest_batch(one_layer, 70 * KB, "cpu").batch
    assert [row.examples_per_second for row in table.rows[:2]] == [1 / 1.5, 2 / 2.0]
    assert (table.rows[-1].fits, table.rows[-1].device_bytes) == (False, 70_700)
    assert table.why == "Batch 101 does not fit: it needs at least 69.0 KiB, and the budget is 68.4 KiB."
    data = json.loads(json.dumps(table.to_dict()))
    assert data["best"] == 100 and data["rows"][-2]["examples_per_second"] == pytest.approx(100 / 51)
    assert data["rows"][-2]["plan"]["device_bytes"] == 70_000 and data["rows"][-1]["plan"] is None


FITS = "Batch 64 is the largest that was planned, and it fits."


@pytest.mark.parametrize(
    ("seconds", "extra", "best", "why"),
    [
        (lambda rows: rows + 0.001, 0, 64, f"From batch 32 to 64 the rate is flat: 0.0016 % more. {FITS}"),
        (lambda rows: rows * (1 + 1e-4 * rows), 0, 16, "From batch 16 to 64 the rate is flat: 0.48 % less."),
        (lambda rows: rows * (1.0 if rows < 64 else 1.25), 16, 16, "(20 % of its time, and 0 % at batch 16)."),
        (lambda rows: rows**1.5, 0, 16, "Batch 64 has 50 % fewer examples per second: its compute takes longer for each"),
        (lambda rows: 10.0 + rows, 0, 64, FITS),
    ],
    ids=["flat up to the best", "flat from the best", "recomputation", "slower", "larger is better"],
)
def test_why_a_larger_batch_gains_nothing(planner, seconds, extra, best, why):
    planner(seconds, lambda rows: extra * (rows >= 64))
    table = rj.batches(job, 70 * KB, "cpu", batches=(64, 16, np.int64(32), 16))
    assert ([row.batch for row in table.rows], table.best.batch) == ([16, 32, 64], best) and why in table.why
    assert str(table).count(" best ") == 1 and "examples/s" in str(table)


def test_batches_above_one_that_does_not_fit_are_not_planned(planner):
    _, planned = planner(lambda rows: 1.0 + rows)
    table = rj.batches(job, 70 * KB, "cpu", batches=[8, 200, 400])
    assert planned == [8, 200] and [row.device_bytes for row in table.rows] == [5600, 140_000, None]
    assert table.why == "Batch 200 does not fit: it needs at least 136.7 KiB, and the budget is 68.4 KiB."
    with pytest.raises(InfeasibleBudget, match="200 rows"):
        rj.batches(job, 70 * KB, "cpu", batches=[400, 200])


def test_bad_arguments(planner):
    planner(lambda rows: 1.0, needs=lambda rows: 5)
    for bad in ((), "8", 8, (0,), (1.5,), (True,), (2**25,)):
        with pytest.raises(ArgumentError, match="batches=.*: expected batch sizes, whole numbers from 1 to 16777216"):
            rj.batches(job, 70 * KB, "cpu", batches=bad)
    for call, first in ((rj.largest_batch, 1), (functools.partial(rj.batches, batches=(8,)), 8)):
        with pytest.raises(ArgumentError, match="make_workload=3: expected a function"):
            call(3, 70 * KB, "cpu")
        with pytest.raises(ArgumentError, match=rf"make_workload\({first}\) returned None: expected a remat_jax.Workload"):
            call(lambda rows: None, 70 * KB, "cpu")
    with pytest.raises(ArgumentError, match="timeout=0: expected a positive number"):
        rj.batches(job, 70 * KB, "cpu", timeout=0)
    with pytest.raises(ArgumentError, match="a batch of .* still fits; memory does not seem to grow"):
        rj.largest_batch(lambda rows: job(8), 100_000, "cpu")
    with pytest.raises(ArgumentError, match="start=0: expected a batch size"):
        rj.largest_batch(job, 100_000, "cpu", start=0)


JOB = """
from __future__ import annotations
from tests.plan_models import job as make

workload = make(64)

def job(rows, layers=2):
    return make(rows, layers=layers)

def fails(rows):
    raise ValueError(f"no {rows}")

def nothing(rows): return rows
def none(): return workload
"""


@pytest.fixture
def command(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(JOB)
    return lambda *arguments: CliRunner().invoke(app, ["batch", *map(str, arguments)])


def test_the_command_plans_and_saves_the_best(command, monkeypatch):
    monkeypatch.setattr(loop, "MOST_COMPILED", 2)
    asked = ("train.py:job", "-b", "500 KiB", "--target", "cpu", "--batches", "128,4096")
    done = command(*asked, "--save", "best.json", "--json")
    assert done.exit_code == 0, done.stderr
    data = json.loads(done.stdout)
    assert [row["fits"] for row in data["rows"]] == [True, False] and "Batch 4096 does not fit" in data["why"]
    best = next(row for row in data["rows"] if row["batch"] == data["best"])
    made = rj.Plan.load("best.json", job(data["best"], layers=2))
    assert (made.device_bytes, made.seconds) == (best["device_bytes"], best["seconds"]) and made.device_bytes <= 500 * 1024
    assert best["examples_per_second"] == pytest.approx(best["batch"] / best["seconds"]) and "batch 128: " in done.stderr


@pytest.mark.parametrize(
    ("name", "options", "status", "message"),
    [
        ("job", ["--batches", "4096"], 3, "is less than the arguments of a step of 'perceptrons', which take 576.0 KiB"),
        ("workload", [], 2, "workload='train.py:workload' is a Workload: expected a function from a batch size"),
        ("none", [], 2, "cannot be called with a batch size alone (too many positional arguments)"),
        ("fails", ["--batches", "8"], 2, "with batch 8: running it raised ValueError: no 8"),
        ("nothing", ["--batches", "8"], 2, "gave a int for batch 8: expected a remat_jax.Workload"),
        ("job", ["--batches", "8,x"], 2, "batches='8,x': expected batch sizes separated by commas, such as 8,16,32"),
    ],
)
def test_bad_usage_of_the_command(command, name, options, status, message):
    done = command(f"train.py:{name}", "-b", "500 KiB", "--target", "cpu", *options)
    assert done.exit_code == status and message in " ".join(done.stderr.split()), done.stderr


@needs_gpu_compiler
def test_on_a_gpu_times_come_from_the_compiled_schedules():
    (row,) = rj.batches(lambda rows: job(rows, layers=1), "8 MB", "h200", batches=(512,)).rows
    assert row.plan.timed and row.examples_per_second == 512 / row.plan.seconds > 1e6
