"""Time against memory: the plans of a problem of which none is beaten by another in both."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from remat_jax.errors import InfeasibleBudget
from remat_jax.solver.chain import ChainSolver
from remat_jax.solver.checks import check_count
from remat_jax.solver.counts import solve_counts
from remat_jax.solver.problem import Chain, Stack
from remat_jax.solver.program import Plan

POINTS = 32

SomePlan = TypeVar("SomePlan", bound=Plan)


def stack_frontier(stack: Stack, host_budget: float = math.inf, *, points: int = POINTS) -> tuple[Plan, ...]:
    """Plans of a stack from the least memory that can be reached to that of the fastest, ``points`` at most.

    The two ends are exact, and each plan is the fastest within its own peak up to the solver's gap; between two of them there
    may be others.

    Raises:
        InfeasibleBudget: the host budget alone cannot be met.
        PlanningError: an argument is wrong.

    >>> from remat_jax.solver.problem import Block, Residual
    >>> residuals = (Residual("x", 8.0), Residual("up", 32.0, 0.5, parents=("x",)))
    >>> plans = stack_frontier(Stack((Block("layer", residuals, 1.0, 2.0, repeats=3),)))
    >>> [(one.peak_bytes, one.seconds) for one in plans]
    [(56.0, 10.0), (88.0, 9.5), (120.0, 9.0)]
    """
    return frontier(lambda budget: solve_counts(stack, budget, host_budget), points)


def chain_frontier(chain: Chain, host_budget: float = math.inf, *, points: int = POINTS) -> tuple[Plan, ...]:
    """The same of a chain, among persistent schedules.

    Raises:
        InfeasibleBudget: the host budget alone cannot be met.
        PlanningError: an argument is wrong.

    >>> from remat_jax.solver.problem import Option, Stage
    >>> stages = tuple(Stage(f"s{i}", 1.0, 1.0, (Option("all", 3.0, 1.0, 2.0),)) for i in range(4))
    >>> [(one.peak_bytes, one.seconds) for one in chain_frontier(Chain(stages, 1.0))]
    [(6.0, 18.0), (7.0, 16.0), (8.0, 15.0), (9.0, 14.0), (12.0, 13.0), (14.0, 12.0)]
    """
    return frontier(ChainSolver(chain, host_budget).plan, points)


def frontier(solve: Callable[[float], SomePlan], points: int = POINTS) -> tuple[SomePlan, ...]:
    """The same of any solver that takes a budget and raises `InfeasibleBudget` with the least there is.

    Raises:
        InfeasibleBudget: the solver says so, and names no least.
        PlanningError: ``points`` is no integer, or less than 2.
    """
    check_count("points", points, least=2)
    fastest = solve(math.inf)
    plans = [fastest]
    try:
        solve(math.nextafter(0.0, 1.0))
    except InfeasibleBudget as error:
        if error.least_bytes is None:
            raise
        least = error.least_bytes
        steps = points - 1
        # Downwards: what the fastest left over is then known before the next budget is asked.
        for budget in reversed([least + (fastest.peak_bytes - least) * step / steps for step in range(steps)]):
            if budget < plans[-1].peak_bytes:
                plans.append(solve(budget))
    return tuple(unbeaten_plans(plans))


def unbeaten_plans(plans: Iterable[SomePlan]) -> Iterator[SomePlan]:
    """Of some plans those that no other is as good as in time and device memory, the smallest first.

    Where two are the same in both, the first is kept.
    """
    fastest = math.inf
    for plan in sorted(plans, key=lambda one: (one.peak_bytes, one.seconds)):
        if plan.seconds < fastest:
            fastest = plan.seconds
            yield plan
