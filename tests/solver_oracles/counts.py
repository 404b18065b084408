"""Identical blocks: how many follow each policy. Integer counts over the policies of a block that could be best.

Blocks of one kind are interchangeable, so a plan is a count for each policy. Along a run, the policy that needs most while it
runs comes first, and the policy that saves most comes last, nearest the loss: then least is kept while it runs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from remat_jax.errors import InfeasibleBudget, SolverError
from remat_jax.solver.policies import BlockPolicy, peak_bytes
from remat_jax.solver.problem import Stack, check_budget, check_count
from tests.solver_oracles.columns import Column, Programme, Run
from tests.solver_oracles.exact import infeasible, solve_blocks
from tests.solver_oracles.milp import GAP, ROUNDING, TIME_LIMIT
from tests.solver_oracles.pricing import with_priced
from tests.solver_oracles.stack_plans import ExecutablePlan, executable

_FIRST_COLUMNS = 150

_SMALL, _FAR = 200, 1e-3
"""The largest number of residuals of all blocks, and the relative distance to the bound, for which single residuals are
decided.
"""


def solve_counts(
    stack: Stack,
    budget: float = math.inf,
    host_budget: float = math.inf,
    *,
    most_policies: int | None = None,
    gap: float = GAP,
    time_limit: float = TIME_LIMIT,
    node_limit: int | None = None,
    most_rounds: float = math.inf,
    say_least: bool = True,
) -> ExecutablePlan:
    """The fastest plan within both budgets, as counts of policies for each kind of block.

    The same answer as `block.solve_blocks`, with a variable for each policy instead of three for each residual of each block:
    the number of blocks does not matter. Exact up to ``gap`` where `candidates` gives every policy that could be best. Where
    it does not, the plan's ``lower_bound`` says how far it can be from the best; in stacks of many blocks that is little.

    Args:
        budget, host_budget: in bytes; infinite means no limit.
        most_policies: how many different policies blocks of one kind may have; layers that are scanned become as many scans.
        gap: how much the extra time may be above the least, relatively.
        time_limit: of one run of the solver, in seconds.
        node_limit: of one run of the solver, in nodes of its tree: the same on every machine. None for no limit.
        most_rounds: of the solver, each with the working sets of the policies that the last one chose; after them the plan is
            looked for within less than the budget, and may be slower than the gap says. ``lower_bound`` holds all the same.
        say_least: whether the error where nothing fits says the least that does, which takes as long as a plan.

    Raises:
        InfeasibleBudget: nothing fits; the message says the least device memory that does, if it was asked for.
        PlanningError: an argument is wrong.
        SolverError: nothing was found within the time limit.

    >>> from remat_jax.solver.problem import Block, ResidualCosts
    >>> residuals = (ResidualCosts("x", 8.0), ResidualCosts("up", 32.0, 0.5, parents=("x",)))
    >>> plan = solve_counts(Stack((Block("layer", residuals, 1.0, 2.0, repeats=30),)), 700.0)
    >>> [(one.first, one.count, one.policy.choices[1].value) for one in plan.ranges], plan.peak_bytes
    ([(0, 16, 'recompute'), (16, 14, 'save')], 688.0)
    """
    check_budget("budget", budget)
    check_budget("host_budget", host_budget)
    if most_policies is not None:
        check_count("most_policies", most_policies)
    runs = [Run.of(block, stack.link) for block in stack.runs()]
    exact = all(run.complete for run in runs)
    least = -math.inf
    if not exact:
        runs, least = with_priced(stack, runs, budget, host_budget)
    solver = _Counting(stack, runs, host_budget, most_policies, gap, time_limit, node_limit, most_rounds)
    answer = solver.fastest(budget)
    plan = None
    if answer is not None:
        policies, bound, variables = answer
        plan = executable(stack, policies, bound=bound if exact else max(0.0, least), variables=variables)
        plan = replace(plan, timed_out=solver.timed_out)
    if not exact and most_policies is None and _may_be_far(stack, plan):
        return _single(stack, plan, budget, host_budget, gap, time_limit)
    if plan is None:
        if not say_least:
            raise InfeasibleBudget(f"budget={budget!r}, host_budget={host_budget!r}: nothing fits.")
        raise infeasible(budget, host_budget, solver.least())
    return plan


def _may_be_far(stack: Stack, plan: ExecutablePlan | None) -> bool:
    """Whether there is no plan, or a plan that may be improved in a stack small enough to be solved exactly."""
    size = sum(block.repeats * len(block.residuals) for block in stack.blocks)
    return plan is None or (plan.seconds - plan.lower_bound > _FAR * plan.extra_seconds and size <= _SMALL)


def _single(
    stack: Stack, plan: ExecutablePlan | None, budget: float, host_budget: float, gap: float, time_limit: float
) -> ExecutablePlan:
    """The faster of a plan and the plan of the programme over single residuals, with the better of their bounds."""
    of_blocks = solve_blocks(stack, budget, host_budget, gap=gap, time_limit=time_limit)
    if plan is None:
        return of_blocks
    best = min(plan, of_blocks, key=lambda candidate: candidate.seconds)
    return replace(best, lower_bound=min(best.seconds, max(plan.lower_bound, of_blocks.lower_bound)))


class _Counting:
    def __init__(
        self,
        stack: Stack,
        runs: Sequence[Run],
        host_budget: float,
        most_policies: int | None,
        gap: float,
        time_limit: float,
        node_limit: int | None,
        rounds: float,
    ) -> None:
        self.stack, self.runs, self.host_budget, self.most_policies = stack, runs, host_budget, most_policies
        self.gap, self.time_limit, self.node_limit, self.rounds, self.timed_out = gap, time_limit, node_limit, rounds, False
        self.columns: list[Column] = [(at, number) for at, run in enumerate(runs) for number in range(len(run.policies))]

    def fastest(self, budget: float) -> tuple[list[BlockPolicy], float, int] | None:
        """The policies of all blocks, the least possible extra time and the number of integers; None if nothing fits."""
        columns = self.columns
        if len(columns) > _FIRST_COLUMNS * len(self.runs):
            columns = self._promising(budget)
        return self._within(columns, budget) if columns else None

    def _programme(
        self, columns: Sequence[Column], budget: float | None, guarded: set[Column], host_budget: float | None = None
    ) -> Programme:
        host = self.host_budget if host_budget is None else host_budget
        return Programme(self.stack, self.runs, columns, budget, host, guarded, self.most_policies)

    def _promising(self, budget: float) -> list[Column]:
        """The columns that can be part of a plan better than a known one, by their reduced cost. None if nothing fits."""
        programme = self._programme(self.columns, budget * (1 + ROUNDING / 2), set())
        relaxed = programme.model.relaxed()
        if relaxed is None:
            return []
        costs = sorted((relaxed.reduced_costs[programme.variable[number]], number) for number in self.columns)
        first = self._within([column for _, column in costs[: _FIRST_COLUMNS * len(self.runs)]], budget)
        if first is None:
            return self.columns
        reachable = sum(policy.extra_seconds(self.stack.link) for policy in first[0]) - relaxed.objective
        # If the first solution is the best, reachable is 0, and rounding must not drop its columns.
        used = {id(policy) for policy in first[0]}
        return [
            (at, number)
            for cost, (at, number) in costs
            if cost <= reachable * (1 + 1e-6) + 1e-15 or id(self.runs[at].policies[number]) in used
        ]

    def _within(self, columns: Sequence[Column], budget: float) -> tuple[list[BlockPolicy], float, int] | None:
        most = (budget * (1 + ROUNDING / 2), self.host_budget * (1 + ROUNDING / 2))
        (allowed, allowed_host), guarded, bound, patience = most, set[Column](), 0.0, self.rounds
        while allowed > 0 and allowed_host >= 0:
            programme = self._programme(columns, allowed, guarded, allowed_host)
            solution = programme.model.solve(self.gap, self.time_limit, self.node_limit)
            if solution is None:
                if (allowed, allowed_host) == most or patience == math.inf:
                    return None
                # This reduction was too large.
                (allowed, allowed_host), patience = most, math.inf
                continue
            self.timed_out |= solution.timed_out
            if (allowed, allowed_host) == most:
                bound = max(bound, solution.bound)
            chosen = programme.chosen(solution)
            policies = [self.runs[at].policies[number] for (at, number), count in chosen for _ in range(count)]
            over = peak_bytes(self.stack, policies) - budget
            host_over = sum(policy.host_bytes for policy in policies) - self.host_budget
            if over <= budget * ROUNDING and host_over <= self.host_budget * ROUNDING:
                return policies, bound, programme.model.integers
            new = {column for column, _ in chosen} - guarded
            guarded |= new
            patience -= 1
            if not new or patience < 0:
                # Exceeded by HiGHS's tolerance, or by one more of many nearly equal policies: ask for that much less.
                less = 1 if new else 2
                allowed, allowed_host = allowed - less * max(0.0, over), allowed_host - less * max(0.0, host_over)
                if patience < 0 and (allowed <= 0 or allowed_host < 0):
                    (allowed, allowed_host), patience = most, math.inf
        raise SolverError(
            f"HiGHS stays over budget={budget!r} or host_budget={self.host_budget!r} by its tolerance; round them."
        )

    def least(self) -> float | None:
        """The least peak; None if the host budget alone cannot be met."""
        guarded = set[Column]()
        while True:
            programme = self._programme(self.columns, None, guarded)
            solution = programme.model.solve(ROUNDING, self.time_limit)
            if solution is None:
                return None
            chosen = programme.chosen(solution)
            policies = [self.runs[at].policies[number] for (at, number), count in chosen for _ in range(count)]
            new = {column for column, _ in chosen} - guarded
            if not new or peak_bytes(self.stack, policies) <= solution.objective * (1 + 1e-9):
                return peak_bytes(self.stack, policies)
            guarded |= new
