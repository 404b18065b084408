"""The search: solve, compile, refit, until a plan fits and none better is left, within so many compilations.

It knows candidates by what their blocks do and by their estimated seconds; what compiles them is given to `run`. The first two
compilations are the fastest named policy that is predicted to fit and a plan; from then on the answer only gets better.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from remat_jax.errors import InfeasibleBudget
from remat_jax.planning.candidate import FAILED, Compiled, StepCandidate, Tried
from remat_jax.planning.fit import Fit
from remat_jax.planning.fitting import predicted
from remat_jax.planning.proposals import Proposals
from remat_jax.solver import Stack

Compile = Callable[[Sequence[StepCandidate], Tried | None], list[Compiled]]
"""Compiles candidates side by side, told the best so far; an empty list ends the search."""

MOST_COMPILED = 6
MORE_COMPILED = 4
"""So many more, one after another, until it is shown that no residual more fits into the plan."""
UNMOVED_COMPILED = 2
"""So many more, where plans offload, to see whether they have to."""
SIDE_BY_SIDE = 2
MOST_RUNS = 3
"""Runs of layers of one kind: layers that are scanned become as many scans, each compiled by itself."""

PREDICTION_SLACK = 1.1
"""How much over the budget a prediction may be for the step to be compiled all the same."""
_MUCH_LEFT = 0.01
"""The share of the budget that is much, where it is left."""
_FAR_OFF = 0.02
"""The share of the budget by which predictions miss for a second plan, half way to the best, to be compiled beside each."""
_AFTER_FAILURE = 0.05
"""The share of the budget by which a plan is made smaller where the last one could not be compiled."""

_WORTH_DARING = 5.0
"""How many times that must be gained where predictions have been too low before."""


class Search:
    """One search.

    Args:
      fit: what is known; nothing yet.
      proposals: makes the candidates.
      most_compiled: how many steps may be compiled, but for `MORE_COMPILED`, `UNMOVED_COMPILED`, and named policies that may
        be faster.
      scanned: whether different policies in a kind cut a scan, which costs what no prediction knows.
    """

    def __init__(self, fit: Fit, proposals: Proposals, *, most_compiled: int = MOST_COMPILED, scanned: bool = False) -> None:
        self.fit, self.proposals = fit, proposals
        self._most, self._most_in_all = most_compiled, most_compiled + UNMOVED_COMPILED
        self._scanned = scanned
        self._worth = proposals.worth

    def run(self, compile_them: Compile) -> Tried:
        """The fastest candidate that was compiled and fits.

        Raises:
          InfeasibleBudget: none did; the message says the least that was reached.
        """
        while (left := self._limit - len(self.fit.tried)) > 0 and (wanted := self._wanted()[:left]):
            answers = compile_them(wanted, self.fit.best)
            if not answers:
                break
            self.fit.learn(wanted, answers)
        found = self.fit.best
        if found is None:
            least = self.fit.smallest.compiled.device_bytes
            raise InfeasibleBudget(f"nothing fits in {self.fit.budget!r} bytes; the least reached is {least}", least)
        return found

    def probe(self, compile_them: Compile) -> bool:
        """Whether anything fits, by the leanest named policy, and by the planner's leanest where that does not."""
        for candidates in (self._named("full"), [self.proposals.least(self.fit.stack)]):
            new = [one for one in candidates if self.fit.known(one) is None]
            if self.fit.best is None and new:
                self.fit.learn(new, compile_them(new, None))
        return self.fit.best is not None

    def _named(self, name: str) -> list[StepCandidate]:
        return [one for one in self.proposals.named if one.name == name]

    @property
    def _limit(self) -> int:
        """How many steps may be compiled, as far as is known now."""
        best, count = self.fit.best, len(self.fit.tried)
        if best is None or count < self._most:
            return self._most
        if self._faster_named(best):
            return count + 1
        return min(count + 1, self._most + MORE_COMPILED) if self._is_open(best) else self._most

    def _is_open(self, best: Tried) -> bool:
        """Whether it is still to be shown that no residual more fits; where no choices say what it does, if much is left.

        And whether what it offloads has to be.
        """
        if self.unmoved(best):
            return True
        return not self.proposals.is_maximal(best) and (best.candidate.done is not None or self._much_is_left(best))

    def _much_is_left(self, best: Tried) -> bool:
        return self.fit.budget - best.compiled.device_bytes > _MUCH_LEFT * self.fit.budget

    def unmoved(self, best: Tried | None) -> list[StepCandidate]:
        """The best with what it offloads left on the device, where that may fit and was not compiled.

        What the compiler needs for copies can be more than they spare, and no step that makes them all shows it.
        """
        found = None if best is None else self.proposals.without_host(best.candidate)
        if found is None or self.fit.known(found) is not None or self.fit.expected(found) > PREDICTION_SLACK * self.fit.budget:
            return []
        return [found]

    def _wanted(self) -> list[StepCandidate]:
        """What to compile next, side by side; empty where no better plan is to be expected."""
        stack, best = self.fit.stack, self.fit.best
        if best is not None and best.candidate.seconds <= 0:
            return []
        if unmoved := self.unmoved(best):
            self._most = min(self._most + 1, self._most_in_all)
        found = [*unmoved, *self._better(stack, best)] if self.fit.tried else self._first(stack)
        if best is None and self.fit.tried:
            found = self._with_leanest(stack, found)
        elif best is not None and not found:
            found = self._last(best)
        new: list[StepCandidate] = []
        for one in found:
            if self.fit.known(one) is None and not any(one.is_same(other) for other in new):
                new.append(one)
        return new[:SIDE_BY_SIDE]

    def _better(self, stack: Stack, best: Tried | None) -> list[StepCandidate]:
        """What would be faster than the best and is expected to fit."""
        named = self._faster_named(best)
        fits = [one for one in named if self.fit.expected(one, stack) <= self.fit.budget]
        found = (named if best is not None else fits or named)[:1]
        count = len(self.fit.tried)
        # What lies beyond is kept for one residual more, of a plan that has one.
        kept = best is not None and best.candidate.done is not None
        much = best is not None and self._much_is_left(best) and self._most <= count < self._most + MORE_COMPILED - 1
        return found + (self._own(stack, best) if not kept or count < self._most or much else [])

    def _last(self, best: Tried) -> list[StepCandidate]:
        """What is left to be shown of the best.

        No plan for all layers alike is faster and fits, no residual more fits, no named policy is faster and fits.
        """
        found = self._uniform(best) or self._one_more(best)
        return [*found, *self.proposals.unknown(best)] if not found or len(self.fit.tried) < self._most - 1 else found

    def _first(self, stack: Stack) -> list[StepCandidate]:
        """`off` where it may fit; else the fastest named policy that is predicted to fit, or the leanest, and a plan."""
        off = self._named("off")
        needs = predicted(stack, off[0].loads) if off else math.inf
        if needs <= PREDICTION_SLACK**2 * self.fit.budget:
            return [*off, *(self._own(stack, None) if PREDICTION_SLACK * needs > self.fit.budget else [])]
        able = [one for one in self.proposals.named if one.name != "off" and one.host_bytes <= self.fit.host_left]
        fits = [one for one in able if predicted(stack, one.loads) <= self.fit.budget]
        named = sorted(fits, key=lambda one: one.seconds)[:1] or self._named("full")
        return [*named, *self._own(stack, None)] or [self.proposals.least(stack)]

    def _with_leanest(self, stack: Stack, found: list[StepCandidate]) -> list[StepCandidate]:
        """The leanest too, while nothing fits: behind the others, and before them where no more can be compiled after these."""
        lean = [one for one in (self.proposals.least(stack), *self._named("full")) if self.fit.known(one) is None]
        return [*lean, *found] if len(self.fit.tried) >= self._most - SIDE_BY_SIDE else [*found, *lean]

    def _faster_named(self, best: Tried | None) -> list[StepCandidate]:
        """Named policies that would be faster than the best and may fit, the fastest first."""
        stack, bound = self.fit.stack, best.candidate.seconds if best else math.inf
        able = [
            one
            for one in self.proposals.named
            if one.seconds < bound and not math.isclose(one.seconds, bound) and one.host_bytes <= self.fit.host_left
            if self.fit.known(one) is None
            if self.fit.least_expected(one, stack) <= PREDICTION_SLACK * self.fit.budget
        ]
        return sorted(able, key=lambda one: one.seconds)

    def _uniform(self, best: Tried) -> list[StepCandidate]:
        """The fastest plan under which all layers of a kind do the same, where it is faster and may fit."""
        if not self._scanned:
            return []
        found = self._solved(self.fit.around(self.fit.budget, uncut=True), self.fit.budget, best, most_runs=1, worth=0.0)
        return [found] if found else []

    def _own(self, stack: Stack, best: Tried | None) -> list[StepCandidate]:
        """The planner's plan at the budget; beside it one without a cut, or while predictions miss one half way to the best."""
        bold = self._solved(stack, self._within(self._share) if self.fit.tried else self.fit.budget, best)
        if bold is None and self._share < 1:
            bold = self._solved(stack, self.fit.budget, best, worth=_WORTH_DARING * self._worth)
        if not self.fit.tried:
            found = [bold]
        elif self._scanned and not any(self._is_uncut_plan(one.candidate) for one in self.fit.tried):
            # What cutting a scan costs is not predicted: a plan that cuts none is what is surest to fit.
            found = [bold, self._solved(self.fit.around(self.fit.budget, uncut=True), self.fit.budget, best, most_runs=1)]
        elif self.fit.missed > _FAR_OFF * self.fit.budget:
            found = [bold, self._solved(stack, self._within(0.5 * self._share), best)]
        else:
            found = [bold]
        return [one for one in found if one is not None]

    @property
    def _share(self) -> float:
        """How much of the room that is left to dare: half as much each time that the compiler needed more than predicted."""
        over = sum(one.compiled.device_bytes > max(self.fit.budget, 1.02 * one.predicted_bytes) for one in self.fit.tried)
        return 0.5 ** max(0, over - 1)

    def _within(self, share: float) -> float:
        """The budget, or less: so much of the way to it from what is known to fit."""
        low = min(
            self.fit.best.compiled.device_bytes if self.fit.best else self.fit.smallest.compiled.device_bytes, self.fit.budget
        )
        return low + share * (self.fit.budget - low)

    def _solved(
        self, stack: Stack, budget: float, best: Tried | None, *, most_runs: int | None = None, worth: float | None = None
    ) -> StepCandidate | None:
        """The fastest within `budget` that was not compiled yet, and would be faster than the best by what that is worth."""
        least = math.inf if best is None else best.candidate.seconds - (self._worth if worth is None else worth)
        for _ in range(4):
            if budget <= 0:
                return None
            found = self.proposals.solve(stack, budget, most_runs=most_runs)
            if found is None or found.seconds > least or math.isclose(found.seconds, least):
                return None
            known = self.fit.known(found)
            if known is None:
                return found
            if self.fit.fits(known):
                return None
            failed = known.compiled.device_bytes == FAILED
            budget -= (
                _AFTER_FAILURE * self.fit.budget
                if failed
                else max(known.compiled.device_bytes - self.fit.budget, 1e-3 * self.fit.budget)
            )
        return None

    def _one_more(self, best: Tried) -> list[StepCandidate]:
        """The best with what still seems to fit saved as well; at least with one residual more.

        That one keeps fewest bytes of those that save time, or is taken to need least.
        """
        if best.candidate.done is None:
            return []
        last = len(self.fit.tried) >= (self._most + MORE_COMPILED if self._much_is_left(best) else self._most) - 1
        # Beside a compiled step with the same runs a prediction is exact, or nearly: nothing is left to dare at first. What
        # that step needed less than was predicted of it, more of the same may need less again; until that was once in vain.
        dares = self._much_is_left(best) and best is self.fit.tried[-1]
        spared = max(0, best.predicted_bytes - best.compiled.device_bytes) if dares else 0
        for room in () if last else dict.fromkeys((self.fit.budget + spared, self.fit.budget, self._within(self._share))):
            found = self._filled(best, room)
            if found.seconds < best.candidate.seconds - self._worth and self.fit.known(found) is None:
                return [found]
        return [one for one in self.proposals.least_more(best) if self.fit.known(one) is None][:1]

    def _filled(self, best: Tried, room: float) -> StepCandidate:
        """The best with one residual more after another, the best bargain first."""
        stack, found = self.fit.around(best.compiled.device_bytes), best.candidate
        while True:
            able = [one for one in self.proposals.one_more(found) if predicted(stack, one.loads) <= room]
            if not able:
                return found
            found = min(able, key=lambda one: one.seconds)

    def _is_uncut_plan(self, candidate: StepCandidate) -> bool:
        return not candidate.name and not self.fit.is_cut(candidate)
