"""What a search asks of the planner: the fastest plan within a budget, as far as the compiled steps tell, and the leanest."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from remat_jax.errors import InfeasibleBudget, SolverError
from remat_jax.planning.candidate import Candidate
from remat_jax.planning.choices import together
from remat_jax.planning.fitting import predicted, singles
from remat_jax.planning.known import Known
from remat_jax.solver import Choice, Stack, cheapest_policy, solve_counts
from remat_jax.solver.block import Prices
from remat_jax.solver.milp import is_out_of_time

_EXACTLY = {"gap": 1e-3, "node_limit": 2000, "most_rounds": 60}
_ROUGHLY = {"gap": 1e-2, "node_limit": 200, "most_rounds": 8}
"""A point of the frontier, which is drawn and not compiled."""
_TIME_LIMIT = 60.0
"""Far beyond what so many nodes take: a plan must not depend on what else the machine does. That it was met is noted."""


class Solver(Known):
    """The planner, asked with what is known.

    Args:
      most_runs: different policies among the layers of one kind; None for any number.
    """

    def __init__(self, *known: Any, most_runs: int | None) -> None:
        super().__init__(*known)
        self._most_runs, self.timed_out = most_runs, False

    def solve(self, stack: Stack, budget: float, *, most_runs: int | None = None) -> Candidate | None:
        """The planner's fastest within `budget`, of as many runs as the search may have or fewer; None where nothing fits."""
        found, timed_out = self._solve(stack, budget, most_runs or self._most_runs, _EXACTLY)
        self.timed_out |= timed_out
        return found

    def _solve(
        self, stack: Stack, budget: float, most_runs: int | None, limits: Mapping[str, Any]
    ) -> tuple[Candidate | None, bool]:
        """And whether the solver ended by a limit.

        Where it offloads, the fastest without the host is asked for too: the solver adds up what residuals cost one by one,
        and priced as a whole, by its kernels, a plan without copies may turn out the faster one.
        """
        found, timed_out = self._solved_within(stack, budget, self.host_left, most_runs, limits)
        if found is None or not found.host_bytes:
            return found, timed_out
        here, also = self._solved_within(stack, budget, 0.0, most_runs, limits)
        return found if here is None or found.seconds <= here.seconds else here, timed_out or also

    def _solved_within(
        self, stack: Stack, budget: float, host_budget: float, most_runs: int | None, limits: Mapping[str, Any]
    ) -> tuple[Candidate | None, bool]:
        least = self._least(stack)
        fits = predicted(stack, least.loads) <= budget and least.host_bytes <= host_budget
        # With a limit on the host, the leanest may be one that offloads a part of what it could: the solver knows.
        if not fits and (stack.link is None or math.isinf(host_budget)):
            return None, False
        try:
            plan = solve_counts(
                stack,
                budget,
                host_budget,
                most_policies=most_runs,
                time_limit=_TIME_LIMIT,
                say_least=False,
                **limits,
            )
        except InfeasibleBudget:
            return least if fits else None, False
        except SolverError as error:
            return least if fits else None, is_out_of_time(error)
        return self.own(together(stack, plan)), plan.timed_out

    def frontier(self, stack: Stack, points: int) -> list[Candidate]:
        """The planner's plans at so many budgets, from the least to that of keeping everything, roughly."""
        least = self._least(stack)
        low = predicted(stack, least.loads)
        high = max([low, *(predicted(stack, one.loads) for one in self.named if one.name in ("off", "everything"))])
        budgets = [low + (high - low) * step / points for step in range(1, points + 1)]
        found = (self._solve(stack, budget, self._most_runs, _ROUGHLY)[0] for budget in budgets)
        return [least, *filter(None, found)]

    def _least(self, stack: Stack) -> Candidate:
        """A plan that needs as little as can be told: what is kept counts in every block behind, the rest where it runs."""
        count = len(singles(stack))
        # A byte that is kept is there with the working sets of all blocks behind; how much that weighs depends on the shares.
        offloads = (False,) if stack.link is None else (True,) if math.isinf(self.host_budget) else (True, False)
        weights = dict.fromkeys((1.0, math.sqrt(count), float(count)))
        plans = [self._lean(stack, weight, offload=offload) for weight in weights for offload in offloads]
        able = [one for one in plans if one.host_bytes <= self.host_left] or plans
        return min(able, key=lambda one: (predicted(stack, one.loads), one.seconds))

    def _lean(self, stack: Stack, weight: float, *, offload: bool) -> Candidate:
        choices: list[tuple[Choice, ...]] = []
        for block in stack.blocks:
            able = block if offload else block.without_offload()
            prices = Prices(saved=weight, transient=1.0)
            choices += [cheapest_policy(replace(able, repeats=1), stack.link, prices).choices] * block.repeats
        if not stack.offload_last and self._most_runs != 1:
            last = stack.positions()[-1]
            choices[-1] = cheapest_policy(last, stack.link, Prices(saved=1.0, transient=1.0)).choices
        return self.own(tuple(choices))
