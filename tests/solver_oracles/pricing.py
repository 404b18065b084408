"""Missing policies of a block, found by the prices of memory: column generation.

In the relaxed programme every byte has a price. A missing policy enters exactly if it is cheaper at these prices than the
present policies. Finding the cheapest policy of a block at given prices is a small programme. If no policy is cheaper, the
relaxed programme over all policies is solved, and its value bounds every plan. The method is due to Gilmore and Gomory
(Operations Research 9, 1961).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from remat_jax.solver.policies import BlockPolicy
from remat_jax.solver.problem import Stack
from remat_jax.solver.table import Prices
from tests.solver_oracles.candidates import measures
from tests.solver_oracles.columns import Programme, Run
from tests.solver_oracles.exact import cheapest_policy
from tests.solver_oracles.milp import ROUNDING, Relaxation

ROUNDS = 40
"""The most rounds of prices."""

_SAME = 1e-6
"""The relative distance between the relaxed programme's value and its bound at which the rounds end."""


def with_priced(stack: Stack, runs: Sequence[Run], budget: float, host_budget: float) -> tuple[list[Run], float]:
    """The runs with the missing policies added, and the least extra time of any plan; minus infinity if unknown.

    >>> from remat_jax.solver.problem import Block, ResidualCosts
    >>> residuals = ResidualCosts("x", 8.0), ResidualCosts("up", 32.0, 0.5, parents=("x",))
    >>> stack = Stack((Block("layer", residuals, 1.0, 2.0, repeats=8),))
    >>> little = [Run.with_policies(block, None, [BlockPolicy(block, ("save", "recompute"))], False) for block in stack.runs()]
    >>> runs, bound = with_priced(stack, little, 200.0, math.inf)
    >>> [len(run.policies) for run in runs], round(bound, 3)
    ([2, 2], 1.875)
    """
    priced, bound = list(runs), -math.inf
    for _ in range(ROUNDS):
        columns = [(at, number) for at, run in enumerate(priced) for number in range(len(run.policies))]
        programme = Programme(stack, priced, columns, budget * (1 + ROUNDING / 2), host_budget)
        relaxed = programme.model.relaxed()
        if relaxed is None:
            return priced, bound
        better, missing = [], 0.0
        for at, run in enumerate(priced):
            policy, gain = _cheaper(stack, run, at, programme, relaxed)
            missing += run.block.repeats * gain
            better.append(policy)
        bound = max(bound, relaxed.objective + missing)
        if relaxed.objective - bound <= _SAME * abs(relaxed.objective):
            break
        priced = [_with(stack, run, policy) for run, policy in zip(priced, better, strict=True)]
    return priced, bound


def _cheaper(stack: Stack, run: Run, at: int, programme: Programme, relaxed: Relaxation) -> tuple[BlockPolicy, float]:
    """The cheapest policy of a run, and its price relative to the cheapest present policy, as a negative number."""
    worth = {row: max(0.0, -relaxed.prices[index]) for row, index in programme.memory_rows.items()}
    own_price = worth.get(at, 0.0)
    saved = own_price + sum(price for row, price in worth.items() if row > at)
    host = max(0.0, -relaxed.prices[programme.host_row]) if programme.host_row is not None else 0.0
    policy = cheapest_policy(run.block, stack.link, Prices(saved, host, own_price))
    kept, need, away, extra = measures(policy, stack.link)
    cost = extra + (saved - own_price) * kept + own_price * need + host * away
    return policy, min(0.0, cost - relaxed.prices[programme.count_rows[at]])


def _with(stack: Stack, run: Run, policy: BlockPolicy) -> Run:
    if any(existing.choices == policy.choices for existing in run.policies):
        return run
    return Run.with_policies(run.block, stack.link, [*run.policies, policy], run.complete)
