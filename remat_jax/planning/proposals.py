"""Candidates for a search to compile: the solver's plans, the leanest plan, and variants of compiled steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from remat_jax.errors import InfeasibleBudget
from remat_jax.planning.candidate import FAILED, Own, Recut, StepCandidate, Tried
from remat_jax.planning.choices import Cuts, block_policies, borders, one_residual_more, together
from remat_jax.planning.fit import Fit
from remat_jax.planning.fitting import predicted, singles
from remat_jax.planning.problem import KEEP_ALL
from remat_jax.solver import Choice, Prices, Solver, Stack, cheapest_policy
from remat_jax.solver.solve import MOST_POLICIES

WORTH_COMPILING = 3e-3
"""The least gain of a plan that is worth a compilation, as a share of the step's time."""


class Proposals:
    """Candidates derived from a fit.

    Args:
      fit: the compiled steps.
      named: the applicable named policies, including `off`.
      own: makes a priced candidate from choices.
      recut: moves the cuts of a candidate's scans; None if nothing is scanned.
      most_runs: the most different policies among the layers of one kind; None for the solver's own limit.
    """

    def __init__(
        self, fit: Fit, named: Sequence[StepCandidate], own: Own, recut: Recut | None = None, most_runs: int | None = None
    ) -> None:
        self.fit, self.named, self.own = fit, tuple(named), own
        self._recut = recut if most_runs != 1 else None
        self._most_runs = min(most_runs or MOST_POLICIES, MOST_POLICIES)
        self.worth = WORTH_COMPILING * fit.guess.base_seconds
        self._solvers: dict[tuple[Stack, int], Solver] = {}

    def solve(self, stack: Stack, budget: float, *, most_runs: int | None = None) -> StepCandidate | None:
        """The solver's fastest plan within `budget`, with at most `most_runs` runs; None if nothing fits.

        If the plan offloads, the fastest plan without offload is solved for too. The solver sums the costs of single residuals;
        priced as a whole, by kernels, the plan without copies may be faster.
        """
        found = self._solved_within(stack, budget, self.fit.host_left, most_runs)
        if found is None or not found.host_bytes:
            return found
        here = self.without_copies(stack, budget, most_runs)
        return found if here is None or found.seconds <= here.seconds else here

    def without_copies(self, stack: Stack, budget: float, most_runs: int | None = None) -> StepCandidate | None:
        """The solver's fastest plan within `budget` that offloads nothing; None if nothing fits."""
        return self._solved_within(stack, budget, 0.0, most_runs)

    def _solved_within(self, stack: Stack, budget: float, host_budget: float, most_runs: int | None) -> StepCandidate | None:
        try:
            plan = self._solver(stack, most_runs or self._most_runs).plan(budget, host_budget)
        except InfeasibleBudget:
            least = self.least(stack)
            return least if predicted(stack, least.loads) <= budget and least.host_bytes <= host_budget else None
        return self.own(together(stack, plan))

    def _solver(self, stack: Stack, most_runs: int) -> Solver:
        """A solver for each fitted stack; a new solver starts from the previous solver's policies."""
        if (stack, most_runs) not in self._solvers:
            known = next(reversed(self._solvers.values()), None)
            solver = self._solvers[stack, most_runs] = Solver(stack, most_runs, known)
            for one in self.named:
                if one.like is not None and known is None:
                    solver.add(block_policies(stack, one.like))
        return self._solvers[stack, most_runs]

    def bound(self) -> float:
        """A lower bound on the extra seconds of any plan within both budgets, by the stack as fitted now."""
        return self._solver(self.fit.stack, self._most_runs).bound(self.fit.budget, self.fit.host_left)

    def frontier(self, stack: Stack, points: int, is_over: Callable[[], bool]) -> list[StepCandidate]:
        """The solver's plans at `points` budgets, from the least memory to keeping everything; fewer once `is_over`."""
        if is_over():
            return []
        least = self.least(stack)
        low = predicted(stack, least.loads)
        high = max([low, *(predicted(stack, one.loads) for one in self.named if one.name in ("off", "everything"))])
        budgets = [low + (high - low) * step / points for step in range(1, points + 1)]
        return [least, *filter(None, (self.solve(stack, budget) for budget in budgets if not is_over()))]

    def least(self, stack: Stack) -> StepCandidate:
        """The plan with the least predicted memory among a few heuristic plans."""
        count = len(singles(stack))
        # A kept byte adds to the peak of every later block, a transient byte only to its own block. The weight of kept bytes
        # depends on the fitted shares, so try several.
        offloads = (False,) if stack.link is None else (True,) if math.isinf(self.fit.host_budget) else (True, False)
        weights = dict.fromkeys((1.0, math.sqrt(count), float(count)))
        plans = [self._lean(stack, weight, offload=offload) for weight in weights for offload in offloads]
        able = [one for one in plans if one.host_bytes <= self.fit.host_left] or plans
        return min(able, key=lambda one: (predicted(stack, one.loads), one.seconds))

    def _lean(self, stack: Stack, weight: float, *, offload: bool) -> StepCandidate:
        choices: list[tuple[Choice, ...]] = []
        for block in stack.blocks:
            able = block if offload else block.without_offload()
            prices = Prices(saved=weight, transient=1.0)
            choices += [cheapest_policy(able, stack.link, prices).choices] * block.repeats
        if not stack.offload_last and self._most_runs != 1:
            last = stack.positions()[-1]
            choices[-1] = cheapest_policy(last, stack.link, Prices(saved=1.0, transient=1.0)).choices
        return self.own(tuple(choices))

    # --- variants of compiled steps -------------------------------------------------------------------------------------

    def unknown(self, best: Tried) -> list[StepCandidate]:
        """Named policies that were not compiled, would be faster than `best`, and might fit.

        Policies whose kept bytes alone exceed the budget are excluded.
        """
        stack = self.fit.stack
        able = [
            one
            for one in self.named
            if one.seconds < best.candidate.seconds and not math.isclose(one.seconds, best.candidate.seconds)
            if self.fit.known(one) is None and one.host_bytes <= self.fit.host_left
            if self.fit.may_fit(one)
        ]
        return sorted(able, key=lambda one: predicted(stack, one.loads))

    def is_maximal(self, best: Tried) -> bool:
        """Whether no further residual that is worth saving can be saved in a run of its layers.

        This holds if both variants of `least_more` were compiled and do not fit, or are predicted over the budget by far more
        than the prediction error.
        """
        if best.candidate.seconds <= 0 or best.candidate.name in KEEP_ALL:
            return True
        if best.candidate.done is None:
            return False
        known = [self.fit.known(one) for one in self.least_more(best)]
        return all(one is not None and one.compiled.device_bytes < FAILED and not self.fit.fits(one) for one in known)

    def least_more(self, best: Tried) -> list[StepCandidate]:
        """Variants of `best` with one worthwhile residual more: the one with fewest kept bytes, and the smallest predicted.

        Variants that are surely over the budget are left out.
        """
        stack, worth = self.fit.around(best.compiled.device_bytes), best.candidate.seconds - self.worth
        faster = [one for one in self.one_more(best.candidate) if one.seconds <= worth]
        found: list[StepCandidate] = []
        for key in (lambda one: sum(load.saved for load in one.loads), lambda one: predicted(stack, one.loads)):
            least = min(faster, key=key, default=None)
            if least is not None and not any(least.is_same(one) for one in found):
                found.append(least)
        return [one for one in found if self.fit.known(one) is not None or not self.fit.is_surely_over(one, stack)]

    def one_more(self, found: StepCandidate) -> list[StepCandidate]:
        """The faster variants with one residual more in one run; the cuts stay the same."""
        assert found.done is not None, "choices say what it does"
        kept = borders(self.fit.guess, found.done, found.cuts)
        options = [self.cut(self.own(one), kept) for one in one_residual_more(self.fit.guess, found.done, found.cuts)]
        return [one for one in options if one.seconds < found.seconds]

    def without_host(self, found: StepCandidate) -> StepCandidate | None:
        """The candidate with offloaded residuals saved; None if it offloads none, or a residual that may not be saved."""
        if not found.host_bytes or found.done is None:
            return None
        moved = zip(singles(self.fit.guess), found.done, strict=True)
        if not all(
            one.may_save
            for block, done in moved
            for one, choice in zip(block.residuals, done, strict=True)
            if choice is Choice.OFFLOAD
        ):
            return None
        saved = tuple(tuple(Choice.SAVE if one is Choice.OFFLOAD else one for one in done) for done in found.done)
        return self.cut(self.own(saved), found.cuts)

    def cut(self, candidate: StepCandidate, cuts: Cuts) -> StepCandidate:
        """The candidate with its scans, if any, cut at `cuts`."""
        return candidate if self._recut is None else self._recut(candidate, cuts)
