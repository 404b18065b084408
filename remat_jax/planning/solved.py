"""The solver's plans for a fitted stack, as candidates."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from remat_jax.errors import InfeasibleBudget
from remat_jax.planning.candidate import Choices, Cuts, StepCandidate, block_policies, choices_together, singles
from remat_jax.planning.fit_memory import Fit, predicted
from remat_jax.planning.problem import KEEP_ALL
from remat_jax.solver import Choice, Prices, Solver, Stack, cheapest_policy
from remat_jax.solver.solve import MOST_POLICIES


class Solved:
    """Solves fitted stacks, each once.

    Args:
      fit: the compiled steps, and the stack fitted to them.
      named: the applicable named policies; the solver starts from those that its choices express.
      make: returns the candidate of the solver's choices, with its estimated time.
      most_policies: the maximum number of policies among layers of one kind.
      recut: returns a candidate with its scans cut at the given layers.
    """

    def __init__(
        self,
        fit: Fit,
        named: Sequence[StepCandidate],
        make: Callable[[Choices], StepCandidate],
        most_policies: int = MOST_POLICIES,
        recut: Callable[[StepCandidate, Cuts], StepCandidate] = lambda candidate, cuts: candidate,
    ) -> None:
        self.fit, self.named, self.make, self.recut = fit, named, make, recut
        self.most_policies = min(most_policies, MOST_POLICIES)
        self._solvers: dict[tuple[Stack, int], Solver] = {}

    def plan(self, stack: Stack, budget: float, most_policies: int | None = None) -> StepCandidate | None:
        """The solver's fastest plan within `budget`, with at most `most_policies` policies per kind; None if nothing fits."""
        plan = self._within(stack, budget, self.fit.host_left, most_policies)
        if plan is None or not plan.host_bytes:
            return plan
        # The solver adds up the costs of single residuals. Priced as a whole (`make`), a plan without copies may be faster.
        uncopied = self.without_copies(stack, budget, most_policies)
        return plan if uncopied is None or plan.seconds <= uncopied.seconds else uncopied

    def without_copies(self, stack: Stack, budget: float, most_policies: int | None = None) -> StepCandidate | None:
        """The solver's fastest plan within `budget` that offloads nothing; None if nothing fits."""
        return self._within(stack, budget, 0.0, most_policies)

    def _within(self, stack: Stack, budget: float, host_budget: float, most_policies: int | None) -> StepCandidate | None:
        if budget <= 0:
            return None
        try:
            plan = self._solver(stack, most_policies or self.most_policies).plan(budget, host_budget)
        except InfeasibleBudget:
            least = self.least(stack)
            return least if predicted(stack, least.loads) <= budget and least.host_bytes <= host_budget else None
        return self.recut(self.make(choices_together(stack, plan)), plan.cuts)

    def _solver(self, stack: Stack, most_policies: int) -> Solver:
        """The solver of a fitted stack; a new solver starts from the previous solver's policies."""
        if (stack, most_policies) not in self._solvers:
            previous = next(reversed(self._solvers.values()), None)
            solver = self._solvers[stack, most_policies] = Solver(stack, most_policies, previous)
            for candidate in self.named if previous is None else ():
                if candidate.choices is not None:
                    solver.add(block_policies(stack, candidate.choices))
        return self._solvers[stack, most_policies]

    def bound(self, budget: float) -> float:
        """A lower bound, by the fitted stack, on `StackPlan.extra_seconds` of any plan within `budget` and the host budget."""
        return self._solver(self.fit.stack, self.most_policies).bound(budget, self.fit.host_left)

    def frontier(self, stack: Stack, points: int, is_over: Callable[[], bool]) -> list[StepCandidate]:
        """The plan of least memory, and the solver's plans at `points` larger budgets; stops when `is_over` returns True."""
        if is_over():
            return []
        least = self.least(stack)
        low = predicted(stack, least.loads)
        high = max([low, *(predicted(stack, step.loads) for step in self.named if step.name in KEEP_ALL)])
        budgets = [low + (high - low) * count / points for count in range(1, points + 1)]
        return [least, *filter(None, (self.plan(stack, budget) for budget in budgets if not is_over()))]

    def least(self, stack: Stack) -> StepCandidate:
        """The plan with the least predicted memory among a few heuristic plans."""
        count = len(singles(stack))
        # A saved byte occupies memory in every later block. The weight of saved bytes that gives the least memory depends on
        # the fitted shares (`recomputed_share`, `fetched_share`): try several weights.
        offloads = (False,) if stack.link is None else (True,) if math.isinf(self.fit.host_budget) else (True, False)
        weights = dict.fromkeys((1.0, math.sqrt(count), float(count)))
        plans = [self._lean(stack, weight, offload=offload) for weight in weights for offload in offloads]
        within = [plan for plan in plans if plan.host_bytes <= self.fit.host_left]
        return min(within or plans, key=lambda plan: (predicted(stack, plan.loads), plan.seconds))

    def _lean(self, stack: Stack, weight: float, *, offload: bool) -> StepCandidate:
        choices: list[tuple[Choice, ...]] = []
        prices = Prices(saved=weight, transient=1.0)
        for block in stack.blocks:
            allowed = block if offload else block.without_offload()
            choices += [cheapest_policy(allowed, stack.link, prices).choices] * block.repeats
        if not stack.offload_last and self.most_policies != 1:
            choices[-1] = cheapest_policy(stack.positions()[-1], stack.link, replace(prices, saved=1.0)).choices
        return self.make(tuple(choices))
