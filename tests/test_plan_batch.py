"""`rj.largest_batch`: the batches that it tries, and its answer."""

from __future__ import annotations

import pytest

import remat_jax as rj
from remat_jax.errors import ArgumentError, InfeasibleBudget
from remat_jax.planning import batch as module
from tests.plan_by_hand import plan
from tests.plan_models import job


@pytest.fixture
def compiler(monkeypatch):
    """A compiler that is a formula of the rows and records its calls."""
    asked = []

    def install(needs, nothing_compiled_above=10**9):
        def leanest(workload, budget, target, host_budget, *, timeout):
            rows = workload.batch[0].shape[0]
            asked.append(rows)
            size = needs(rows)
            error = InfeasibleBudget(f"{rows} rows", size) if size > budget else None
            return (None if rows > nothing_compiled_above else size), error

        monkeypatch.setattr(module, "leanest", leanest)
        monkeypatch.setattr(
            module, "plan", lambda workload, budget, *rest, **options: plan(budget=budget, workload=workload.name)
        )
        return asked

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
def test_the_largest_batch_is_found(compiler, needs, largest, start):
    asked = compiler(needs)
    answer = rj.largest_batch(job, 100_000, "cpu", start=start)
    assert answer.batch == largest and needs(largest) <= 100_000 < needs(largest + 1)
    assert [rows for rows, _ in answer.tried] == asked and len(set(asked)) == len(asked) <= 20


def test_where_memory_grows_evenly_few_are_compiled(compiler):
    asked = compiler(lambda rows: 10_000 + 700 * rows)
    assert rj.largest_batch(job, 1_000_000, "cpu").batch == 1414
    assert len(asked) <= 8


def test_batches_too_large_to_compile_are_bisected(compiler):
    compiler(lambda rows: 10_000 + 700 * rows, nothing_compiled_above=100)
    largest = rj.largest_batch(job, 70_000, "cpu")
    assert largest.batch == 85 and "too large" in str(largest) and largest.to_dict()["batch"] == 85


def test_a_batch_of_one_that_does_not_fit(compiler):
    compiler(lambda rows: 200_000 + rows)
    with pytest.raises(InfeasibleBudget, match="1 rows"):
        rj.largest_batch(job, 100_000, "cpu", start=8)


def test_bad_arguments(compiler):
    compiler(lambda rows: 5)
    with pytest.raises(ArgumentError, match="a batch of .* still fits; memory does not seem to grow"):
        rj.largest_batch(lambda rows: job(8), 100_000, "cpu")
    with pytest.raises(ArgumentError, match="make_workload=3: expected a function"):
        rj.largest_batch(3, 100_000, "cpu")
    with pytest.raises(ArgumentError, match=r"make_workload\(1\) returned None: expected a remat_jax.Workload"):
        rj.largest_batch(lambda rows: None, 100_000, "cpu")
    with pytest.raises(ArgumentError, match="start=0: expected a batch size"):
        rj.largest_batch(job, 100_000, "cpu", start=0)


def test_a_jump_in_memory_is_bisected(compiler):
    """Two batches say repeatedly that the limit is just above the smaller one."""
    asked = compiler(lambda rows: rows if rows <= 500 else 1_000_000 + rows)
    assert rj.largest_batch(job, 2000, "cpu").batch == 500 and len(asked) <= 40
