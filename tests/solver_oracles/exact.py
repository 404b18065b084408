"""Which residuals of each block are saved, offloaded and recomputed: a mixed-integer linear programme over single residuals.

The model is Checkmate's idea (Jain et al., arXiv:1910.02653) brought down to what a checkpointed block can do: each residual
is made once more at most, inside its own block. `docs/how/planner.md` has the rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from remat_jax.errors import InfeasibleBudget, SolverError
from remat_jax.solver.policies import BlockPolicy, peak_bytes
from remat_jax.solver.problem import Block, Choice, HostLink, ResidualCosts, Stack, check_budget
from remat_jax.solver.table import Prices
from tests.solver_oracles.milp import GAP, ROUNDING, TIME_LIMIT, Model, Solution, unit_beside
from tests.solver_oracles.stack_plans import ExecutablePlan, executable

_ATTEMPTS = 8


def solve_blocks(
    stack: Stack,
    budget: float = math.inf,
    host_budget: float = math.inf,
    *,
    gap: float = GAP,
    time_limit: float = TIME_LIMIT,
) -> ExecutablePlan:
    """The fastest plan within both budgets in which every single block decides on every single residual.

    Exact up to ``gap`` for any blocks, all different or not. It has up to three binaries for each residual of each block;
    where blocks repeat, `counts.solve_counts` answers the same with far fewer.

    Args:
        budget, host_budget: in bytes; infinite means no limit.
        gap: how much the extra time may be above the least, relatively.
        time_limit: of one run of the solver, in seconds.

    Raises:
        InfeasibleBudget: nothing fits; the message says the least device memory that does.
        PlanningError: an argument is wrong.
        SolverError: nothing was found within the time limit.

    >>> from remat_jax.solver.problem import ResidualCosts
    >>> residuals = (ResidualCosts("x", 8.0), ResidualCosts("up", 32.0, 0.5, parents=("x",)))
    >>> plan = solve_blocks(Stack((Block("layer", residuals, 1.0, 2.0, repeats=3),)), 100.0)
    >>> sum(one.count for one in plan.ranges if one.policy.of["up"] == "save"), plan.extra_seconds, plan.peak_bytes
    (2, 0.5, 88.0)
    """
    check_budget("budget", budget)
    check_budget("host_budget", host_budget)
    allowed, allowed_host = budget * (1 + ROUNDING / 2), host_budget * (1 + ROUNDING / 2)
    for _ in range(_ATTEMPTS):
        model = _StackModel(stack, allowed, allowed_host)
        solution = model.solve(gap, time_limit)
        if solution is None:
            raise infeasible(budget, host_budget, _least(stack, host_budget, time_limit))
        policies = model.policies(solution)
        over, host_over = peak_bytes(stack, policies) - budget, sum(policy.host_bytes for policy in policies) - host_budget
        if over <= budget * ROUNDING and host_over <= host_budget * ROUNDING:
            return executable(stack, policies, bound=solution.bound, variables=model.integers)
        # Exceeded by HiGHS's tolerance: ask for that much less.
        allowed, allowed_host = allowed - 2 * max(0.0, over), allowed_host - 2 * max(0.0, host_over)
    raise SolverError(f"HiGHS stays over budget={budget!r} or host_budget={host_budget!r} by its tolerance; round them.")


def infeasible(budget: float, host_budget: float, least: float | None) -> InfeasibleBudget:
    """The error for an infeasible budget, with the least device memory."""
    if least is None:
        return InfeasibleBudget(
            f"host_budget={host_budget!r}: the residuals that can only be offloaded do not fit. Allow more host memory."
        )
    host = "" if math.isinf(host_budget) else f" with host_budget={host_budget!r}"
    return InfeasibleBudget(f"budget={budget!r} is not enough: the least that can be reached{host} is {least!r} bytes.", least)


def _least(stack: Stack, host_budget: float, time_limit: float) -> float | None:
    model = _StackModel(stack, None, host_budget)
    solution = model.solve(ROUNDING, time_limit)
    return None if solution is None else peak_bytes(stack, model.policies(solution))


def cheapest_policy(block: Block, link: HostLink | None, prices: Prices) -> BlockPolicy:
    """The policy of one block with the least extra seconds + prices × bytes.

    >>> from remat_jax.solver.problem import ResidualCosts
    >>> block = Block("layer", (ResidualCosts("x", 8.0), ResidualCosts("up", 32.0, 0.5, parents=("x",))), 1.0, 2.0)
    >>> [cheapest_policy(block, None, Prices(price)).choices[1].value for price in (0.01, 0.1)]
    ['save', 'recompute']
    """
    model = Model()
    variables = _BlockVariables.add(model, block, link, prices)
    solution = model.solve(1e-6)
    assert solution is not None  # a block's residuals can each be had in some way: Residual checks that
    return variables.policy(solution)


@dataclass(frozen=True)
class _BlockVariables:
    """The variables of one block: by residual, the index of each of its choices."""

    block: Block
    choices: tuple[dict[Choice, int], ...]

    @classmethod
    def add(
        cls,
        model: Model,
        block: Block,
        link: HostLink | None,
        prices: Prices | None = None,
        weight: float = 1.0,
    ) -> _BlockVariables:
        choices: list[dict[Choice, int]] = []
        paid = prices or Prices()
        for residual in block.residuals:
            fetched, again = block.fetched_share * residual.bytes, block.recomputed_share * residual.bytes
            have: dict[Choice, int] = {}
            if residual.may_save:
                have[Choice.SAVE] = model.integer(1, weight * residual.kept_seconds + paid.saved * residual.bytes)
            if residual.may_offload and link is not None:
                price = paid.host * residual.bytes + paid.transient * fetched
                have[Choice.OFFLOAD] = model.integer(1, weight * _offload_seconds(residual, link) + price)
            if residual.seconds is not None:
                have[Choice.RECOMPUTE] = model.integer(1, weight * residual.seconds + paid.transient * again)
            if not residual.needed:
                have[Choice.UNUSED] = model.integer(1)
            model.equal(dict.fromkeys(have.values(), 1.0), 1.0)
            choices.append(have)
        variables = cls(block, tuple(choices))
        variables._closed(model)
        if link is not None:
            variables._copies(model, link, weight)
        return variables

    def _closed(self, model: Model) -> None:
        """Recomputing a residual needs its parents in some form; a parent that backward reads is always available."""
        index = {residual.name: number for number, residual in enumerate(self.block.residuals)}
        for residual, have in zip(self.block.residuals, self.choices, strict=True):
            for parent in residual.parents:
                unused = self.choices[index[parent]].get(Choice.UNUSED)
                if unused is not None and Choice.RECOMPUTE in have:
                    model.at_most({have[Choice.RECOMPUTE]: 1.0, unused: 1.0}, 1.0)

    def _copies(self, model: Model, link: HostLink, weight: float) -> None:
        out, back = model.real(cost=weight), model.real(cost=weight)
        sizes = self.sizes(Choice.OFFLOAD)
        hidden = link.hidden_share
        away = {index: size / link.out_bytes_per_s for index, size in sizes.items()}
        home = {index: size / link.in_bytes_per_s for index, size in sizes.items()}
        again: dict[int, float] = {}
        for residual, have in zip(self.block.residuals, self.choices, strict=True):
            work = {Choice.RECOMPUTE: residual.seconds or 0.0, Choice.SAVE: residual.kept_seconds}
            work[Choice.OFFLOAD] = _offload_seconds(residual, link)
            again |= {have[choice]: -hidden * seconds for choice, seconds in work.items() if choice in have}
        model.at_most({**away, out: -1.0}, hidden * self.block.forward_seconds)
        home = {index: seconds + again.get(index, 0.0) for index, seconds in home.items()}
        model.at_most({**again, **home, back: -1.0}, hidden * self.block.backward_seconds)

    def sizes(self, wanted: Choice, share: float = 1.0) -> dict[int, float]:
        pairs = zip(self.block.residuals, self.choices, strict=True)
        return {have[wanted]: share * residual.bytes for residual, have in pairs if wanted in have}

    def policy(self, solution: Solution) -> BlockPolicy:
        chosen = tuple(max(have, key=lambda choice: solution.values[have[choice]]) for have in self.choices)
        return BlockPolicy(self.block, chosen)


def _offload_seconds(residual: ResidualCosts, link: HostLink) -> float:
    """The device cost of an offloaded residual: keeping it, and the copies' share of the device's bandwidth."""
    return residual.kept_seconds + link.seconds_per_byte * residual.bytes


class _StackModel:
    """The whole programme; if ``budget`` is None, its objective is the peak."""

    def __init__(self, stack: Stack, budget: float | None, host_budget: float) -> None:
        self.model = Model()
        weight = 1.0 if budget is not None else 0.0
        sizes = [
            size for block in stack.blocks for size in (block.input_bytes, *(residual.bytes for residual in block.residuals))
        ]
        self.unit = unit_beside(sizes, stack.fixed_bytes)
        peak = self.model.real(cost=1.0, unit=self.unit) if budget is None else None
        self.blocks = [_BlockVariables.add(self.model, block, stack.link, weight=weight) for block in stack.positions()]
        if budget is None or math.isfinite(budget):
            self._memory(stack.fixed_bytes, budget, peak)
        host = {index: size for block in self.blocks for index, size in block.sizes(Choice.OFFLOAD).items()}
        if host and math.isfinite(host_budget):
            self.model.at_most(host, host_budget)

    def _memory(self, fixed: float, budget: float | None, peak: int | None) -> None:
        """A variable for the bytes kept up to each block: the rows stay short, and the matrix sparse."""
        before: int | None = None
        for block in self.blocks:
            kept = self.model.real(unit=self.unit)
            row = {kept: -1.0, **block.sizes(Choice.SAVE)}
            if before is not None:
                row[before] = 1.0
            self.model.equal(row, -block.block.input_bytes)
            need = {kept: 1.0, **block.sizes(Choice.RECOMPUTE, block.block.recomputed_share)}
            need |= block.sizes(Choice.OFFLOAD, block.block.fetched_share)
            if peak is not None:
                need[peak] = -1.0
            self.model.at_most(need, (budget or 0.0) - fixed - block.block.working_bytes)
            before = kept

    @property
    def integers(self) -> int:
        return self.model.integers

    def solve(self, gap: float, time_limit: float) -> Solution | None:
        return self.model.solve(gap, time_limit)

    def policies(self, solution: Solution) -> Sequence[BlockPolicy]:
        return [block.policy(solution) for block in self.blocks]
