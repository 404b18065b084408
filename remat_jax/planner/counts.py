"""Identical blocks: how many of them do what. Integer counts over the policies of a block that could be best.

Blocks of one kind are interchangeable, so that a plan is how many follow which policy. Along a run the policy that needs most
while it runs comes first and the one that saves most comes last, nearest the loss: then least is kept when it runs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from remat_jax.errors import SolverError
from remat_jax.planner.block import infeasible, solve_blocks
from remat_jax.planner.candidates import candidates, measures
from remat_jax.planner.checks import check_budget
from remat_jax.planner.milp import GAP, ROUNDING, TIME_LIMIT, Model, Solution
from remat_jax.planner.policies import BlockPolicy, StackPlan, peak_bytes, stack_plan
from remat_jax.planner.problem import Block, HostLink, Stack

_FIRST_COLUMNS = 150


def solve_counts(
    stack: Stack,
    budget: float = math.inf,
    host_budget: float = math.inf,
    *,
    gap: float = GAP,
    time_limit: float = TIME_LIMIT,
) -> StackPlan:
    """The fastest plan within both budgets, as counts of policies for each kind of block.

    The same answer as `block.solve_blocks`, with a variable for each policy instead of three for each residual of each block:
    the number of blocks does not matter. Exact up to ``gap`` where `candidates` gives every policy that could be best;
    ``lower_bound`` of the plan is 0 where it does not.

    Args:
        budget, host_budget: in bytes; infinite means no limit.
        gap: how much the extra time may be above the least, relatively.
        time_limit: of one run of the solver, in seconds.

    Raises:
        InfeasibleBudget: nothing fits; the message says the least device memory that does.
        PlanningError: an argument is wrong.
        SolverError: nothing was found within the time limit.

    >>> from remat_jax.planner.problem import Residual
    >>> residuals = (Residual("x", 8.0), Residual("up", 32.0, 0.5, parents=("x",)))
    >>> plan = solve_counts(Stack((Block("layer", residuals, 1.0, 2.0, repeats=30),)), 700.0)
    >>> [(one.first, one.count, one.policy.choices[1].value) for one in plan.ranges], plan.peak_bytes
    ([(0, 16, 'recompute'), (16, 14, 'save')], 688.0)
    """
    check_budget("budget", budget)
    check_budget("host_budget", host_budget)
    runs = [_Run.of(block, stack.link) for block in stack.runs()]
    exact = all(run.complete for run in runs)
    solver = _Counting(stack, runs, host_budget, gap, time_limit)
    found = solver.fastest(budget)
    if found is None and not exact:
        # What was left out may be what fits.
        return solve_blocks(stack, budget, host_budget, gap=gap, time_limit=time_limit)
    if found is None:
        raise infeasible(budget, host_budget, solver.least())
    policies, bound, variables = found
    plan = stack_plan(stack, policies, bound=bound, variables=variables)
    return plan if exact else _without_bound(plan)


def _without_bound(plan: StackPlan) -> StackPlan:
    from dataclasses import replace

    return replace(plan, lower_bound=0.0)


@dataclass(frozen=True)
class _Run:
    """Blocks of one kind, and the policies that they may follow in the order in which they would come."""

    block: Block
    policies: tuple[BlockPolicy, ...]
    measures: tuple[tuple[float, float, float, float], ...]
    complete: bool

    @classmethod
    def of(cls, block: Block, link: HostLink | None) -> _Run:
        policies, complete = candidates(block, link)
        ordered = sorted(policies, key=lambda one: (-one.transient_bytes, one.saved_bytes, -one.host_bytes))
        return cls(block, tuple(ordered), tuple(measures(one, link) for one in ordered), complete)


_Column = tuple[int, int]
"""A run, and one of its policies."""


class _Counting:
    def __init__(self, stack: Stack, runs: Sequence[_Run], host_budget: float, gap: float, time_limit: float) -> None:
        self.stack, self.runs, self.host_budget = stack, runs, host_budget
        self.gap, self.time_limit = gap, time_limit
        self.columns: list[_Column] = [(at, one) for at, run in enumerate(runs) for one in range(len(run.policies))]

    def fastest(self, budget: float) -> tuple[list[BlockPolicy], float, int] | None:
        """The policies of all blocks, the least extra time possible and the number of integers; None where nothing fits."""
        columns = self.columns
        if len(columns) > _FIRST_COLUMNS * len(self.runs):
            columns = self._promising(budget)
        found = self._within(columns, budget)
        return None if found is None else found

    def _promising(self, budget: float) -> list[_Column]:
        """The columns that can be part of a plan better than one that is known: by their reduced cost, which is exact."""
        programme = _Programme(self, self.columns, budget)
        relaxed = programme.model.relaxed()
        if relaxed is None:
            return []
        least, reduced, _ = relaxed
        costs = sorted(zip((reduced[programme.variable[one]] for one in self.columns), self.columns, strict=True))
        first = self._within([column for _, column in costs[: _FIRST_COLUMNS * len(self.runs)]], budget)
        if first is None:
            return self.columns
        reachable = sum(one.extra_seconds(self.stack.link) for one in first[0]) - least
        return [column for cost, column in costs if cost <= reachable * (1 + 1e-6) + 1e-15]

    def _within(self, columns: Sequence[_Column], budget: float) -> tuple[list[BlockPolicy], float, int] | None:
        allowed, guarded = budget * (1 + ROUNDING / 2), set[_Column]()
        while True:
            programme = _Programme(self, columns, allowed, guarded)
            solution = programme.model.solve(self.gap, self.time_limit)
            if solution is None:
                return None
            chosen = programme.chosen(solution)
            policies = [self.runs[at].policies[one] for (at, one), count in chosen for _ in range(count)]
            over = peak_bytes(self.stack, policies) - budget
            if over <= budget * ROUNDING:
                return policies, solution.bound, programme.model.integers
            new = {column for column, _ in chosen} - guarded
            if not new:
                allowed -= 2 * over
            if allowed <= 0:
                raise SolverError(f"HiGHS goes over the budget={budget!r} by its tolerance; give a budget with fewer digits.")
            guarded |= new

    def least(self) -> float | None:
        """The least peak there is; None where the host budget alone cannot be met."""
        guarded = set[_Column]()
        while True:
            programme = _Programme(self, self.columns, None, guarded)
            solution = programme.model.solve(ROUNDING, self.time_limit)
            if solution is None:
                return None
            chosen = programme.chosen(solution)
            policies = [self.runs[at].policies[one] for (at, one), count in chosen for _ in range(count)]
            new = {column for column, _ in chosen} - guarded
            if not new or peak_bytes(self.stack, policies) <= solution.objective * (1 + 1e-9):
                return peak_bytes(self.stack, policies)
            guarded |= new


class _Programme:
    """Counts of columns as variables. The memory of a run is demanded of its last block, and of `guarded` columns besides.

    A run whose last block fits may still not fit in an earlier one that needs more while it runs. That takes a binary for
    each policy (is it used?), and hardly ever matters: it is demanded only where an answer was seen to break it.
    """

    def __init__(
        self, counting: _Counting, columns: Sequence[_Column], budget: float | None, guarded: set[_Column] | None = None
    ) -> None:
        self.runs, self.columns = counting.runs, sorted(columns)
        self.model = Model()
        self.peak = self.model.real(cost=1.0) if budget is None else None
        self.variable: dict[_Column, int] = {}
        for at, one in self.columns:
            cost = self.runs[at].measures[one][3] if budget is not None else 0.0
            self.variable[at, one] = self.model.integer(self.runs[at].block.repeats, cost)
        for at, run in enumerate(self.runs):
            row = {index: 1.0 for (other, _), index in self.variable.items() if other == at}
            self.model.equal(row, float(run.block.repeats))
        if budget is None or math.isfinite(budget):
            allowed = (budget or 0.0) - counting.stack.fixed_bytes
            for at, run in enumerate(self.runs):
                if run.block.repeats == 1:
                    self._demand(self._kept(at) | self._sizes(at, 1), allowed)
            for column in sorted(guarded or ()):
                self._guard(column, allowed)
        host = {index: self.runs[at].measures[one][2] for (at, one), index in self.variable.items()}
        if math.isfinite(counting.host_budget) and any(host.values()):
            self.model.at_most(host, counting.host_budget)

    def _sizes(self, at: int, measure: int, until: int | None = None) -> dict[int, float]:
        sizes = self.runs[at].measures
        return {
            index: sizes[one][measure]
            for (other, one), index in self.variable.items()
            if other == at and (until is None or one <= until)
        }

    def _kept(self, at: int) -> dict[int, float]:
        return {index: size for before in range(at) for index, size in self._sizes(before, 0).items()}

    def _demand(self, row: dict[int, float], allowed: float) -> None:
        self.model.at_most(row if self.peak is None else {**row, self.peak: -1.0}, allowed)

    def _guard(self, column: _Column, allowed: float) -> None:
        at, one = column
        if column not in self.variable or self.runs[at].block.repeats == 1:
            return
        used = self.model.integer(1)
        self.model.at_most({self.variable[column]: 1.0, used: -float(self.runs[at].block.repeats)}, 0.0)
        saved, need, _, _ = self.runs[at].measures[one]
        self._demand(self._kept(at) | self._sizes(at, 0, one) | {used: need - saved}, allowed)

    def chosen(self, solution: Solution) -> list[tuple[_Column, int]]:
        """The columns that are used and how often, in the order of the forward pass."""
        counts = ((column, round(solution.values[self.variable[column]])) for column in self.columns)
        return [(column, count) for column, count in counts if count]
