"""The linear programme behind the solvers: scaling, bounds, and known faults of HiGHS."""

from __future__ import annotations

import ctypes
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import scipy.optimize

from remat_jax.errors import SolverError
from remat_jax.solver import Block, ResidualCosts, Stack
from tests.solver_oracles import solve_counts
from tests.solver_oracles.milp import Model


def knapsack(scale=1.0, size=1.0):
    """The largest value of 6, 10, 12 and 7 in sizes 1, 2, 3 and 2 within 5: all except the third, 23."""
    model = Model()
    items = [model.integer(1, -value * scale) for value in (6, 10, 12, 7)]
    model.at_most({item: weight * size for item, weight in zip(items, (1, 2, 3, 2), strict=True)}, 5 * size)
    return model


@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e12])
@pytest.mark.parametrize("size", [1e-9, 1.0, 1e12])
def test_units_do_not_matter(scale, size):
    solution = knapsack(scale, size).solve(gap=1e-6)
    assert solution.values == (1, 1, 0, 1)
    assert solution.objective == pytest.approx(-23 * scale)
    assert solution.bound == pytest.approx(solution.objective, rel=1e-5)


def test_the_relaxation_prices_its_rows():
    """The best by value per size: 6, 5 and 4 per unit; two thirds of the third fit, so a unit of room is worth 4."""
    relaxed = knapsack(size=1000.0).relaxed()
    assert relaxed.objective == pytest.approx(-24)
    assert relaxed.prices == (pytest.approx(-4 / 1000),)
    assert relaxed.reduced_costs[3] == pytest.approx(-7 + 8)


def test_what_cannot_be_is_none():
    model = Model()
    item = model.integer(1)
    model.equal({item: 2.0}, 5.0)
    assert model.solve() is None
    assert model.relaxed() is None


def test_what_highs_prints_is_not_on_standard_output(monkeypatch, capfd):
    original = scipy.optimize.milp

    def noisy(*arguments, **named):
        ctypes.CDLL(None).puts(b"HighsMipSolverData::transformNewIntegerFeasibleSolution tmpSolver.run();")
        ctypes.CDLL(None).puts(b"noise of C")
        return original(*arguments, **named)

    monkeypatch.setattr(scipy.optimize, "milp", noisy)
    print("before")
    assert knapsack().solve() is not None
    print("after")
    printed = capfd.readouterr()
    assert printed.out.split() == ["before", "after"]
    assert printed.err.splitlines() == ["noise of C"]


def test_an_answer_that_breaks_its_rows_is_refused(monkeypatch):
    original = scipy.optimize.milp

    def wrong(*arguments, **named):
        result = original(*arguments, **named)
        result.x = np.ones_like(result.x)
        return result

    monkeypatch.setattr(scipy.optimize, "milp", wrong)
    with pytest.raises(SolverError, match="is not between -inf and"):
        knapsack().solve()


def test_a_time_limit_without_an_answer_is_an_error(monkeypatch):
    def late(*arguments, **named):
        return scipy.optimize.OptimizeResult(status=1, x=None, message="Time limit reached.")

    monkeypatch.setattr(scipy.optimize, "milp", late)
    with pytest.raises(SolverError, match="within time_limit=60.0 seconds: Time limit reached.*Allow it more"):
        knapsack().solve()


def test_two_threads_solve_one_after_the_other(monkeypatch):
    """Each call redirects standard output of the whole process: two at a time could not both restore it."""
    solve, inside, most = scipy.optimize.milp, [], []

    def watched(*arguments, **named):
        inside.append(1)
        most.append(len(inside))
        threading.Event().wait(0.05)
        plan = solve(*arguments, **named)
        inside.pop()
        return plan

    monkeypatch.setattr(scipy.optimize, "milp", watched)
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda _: knapsack().solve(), range(3)))
    assert most == [1, 1, 1]


def hard_knapsacks(items=40, rows=5):
    """Many rows over the same items: the root node of the solver's tree does not finish them."""
    random, model = np.random.default_rng(0), Model()
    chosen = [model.integer(1, -float(value)) for value in random.integers(50, 100, items)]
    for weights in random.integers(20, 100, (rows, items)):
        model.at_most(dict(zip(chosen, map(float, weights), strict=True)), float(weights.sum() // 2))
    return model


def test_a_limit_of_nodes_ends_the_search_at_a_sound_answer_each_time_the_same():
    first, again = (hard_knapsacks().solve(gap=1e-9, node_limit=1) for _ in range(2))
    assert first == again and not first.timed_out
    best = hard_knapsacks().solve(gap=1e-3)
    assert first.bound <= best.objective * (1 - 1e-9) and best.objective <= first.objective
    assert best.objective - best.bound <= 1e-3 * abs(best.objective) < first.objective - first.bound


def test_a_search_that_the_clock_ended_says_so(monkeypatch):
    """An answer exists, but another run may have another; the plan says so."""
    original = scipy.optimize.milp

    def late(*arguments, **named):
        result = original(*arguments, **named)
        result.message = "Time limit reached. (HiGHS Status 13: model_status is Time limit reached)"
        return result

    residuals = (ResidualCosts("x", 8.0), ResidualCosts("up", 32.0, 0.5, parents=("x",)))
    stack = Stack((Block("layer", residuals, 1.0, 2.0, repeats=30),))
    assert not solve_counts(stack, 700.0).timed_out
    monkeypatch.setattr(scipy.optimize, "milp", late)
    assert knapsack().solve().timed_out and solve_counts(stack, 700.0).timed_out


def test_a_programme_without_variables_holds_or_does_not():
    nothing = Model()
    nothing.at_most({}, 5.0)
    solution = nothing.solve()
    assert (solution.values, solution.objective, solution.bound) == ((), 0.0, 0.0)
    nothing.equal({}, 1.0)
    assert nothing.solve() is None
