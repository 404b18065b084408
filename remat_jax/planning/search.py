"""The search: solve, compile, refit, until a plan fits and no better plan is left, within a limit of compilations.

The search sees only the choices of a candidate's blocks and its estimated seconds; `run` takes the function that compiles. The
first compilation is `off` if it may fit, with a plan beside it unless `off` fits by a tenth. Else the first two are the fastest
named policy that is predicted to fit, and a plan. After that the answer only improves.
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
"""Compiles candidates in parallel, given the best so far; an empty list ends the search."""

MOST_COMPILED = 6
MORE_COMPILED = 4
"""Additional compilations, one after another, to show that no further residual fits into the plan."""
UNMOVED_COMPILED = 2
"""Additional compilations, if plans offload, to see whether offload is necessary."""
SIDE_BY_SIDE = 2
MOST_RUNS = 3
"""The most runs of layers of one kind: each run of scanned layers becomes a scan of its own and is compiled separately."""

PREDICTION_SLACK = 1.1
"""The largest prediction, relative to the budget, at which a step is still compiled."""
_MUCH_LEFT = 0.01
"""Much memory is left if more than this share of the budget is unused."""
_FAR_OFF = 0.02
"""The prediction error, as a share of the budget, above which a second, safer plan is compiled beside each plan."""
_AFTER_FAILURE = 0.05
"""The share of the budget by which the next plan is smaller if the last could not be compiled."""

_WORTH_DARING = 5.0
"""The factor on the least gain if earlier predictions were too low."""


class Search:
    """One search.

    Args:
      fit: the compiled steps; empty at first.
      proposals: makes the candidates.
      most_compiled: the most compilations, without `MORE_COMPILED`, `UNMOVED_COMPILED`, and named policies that may be faster.
      scanned: whether layers are in a scan, which different policies cut. The memory cost of a cut is not predicted.
    """

    def __init__(self, fit: Fit, proposals: Proposals, *, most_compiled: int = MOST_COMPILED, scanned: bool = False) -> None:
        self.fit, self.proposals = fit, proposals
        self._most, self._most_in_all = most_compiled, most_compiled + UNMOVED_COMPILED
        self._scanned = scanned
        self._worth = proposals.worth

    def run(self, compile_them: Compile) -> Tried:
        """The fastest compiled candidate that fits.

        Raises:
          InfeasibleBudget: no candidate fits; the message states the least memory reached.
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
        """Whether anything fits: compiles the leanest named policy, then the solver's leanest plan if that does not fit."""
        for candidates in (self._named("full"), [self.proposals.least(self.fit.stack)]):
            new = [one for one in candidates if self.fit.known(one) is None]
            if self.fit.best is None and new:
                self.fit.learn(new, compile_them(new, None))
        return self.fit.best is not None

    def _named(self, name: str) -> list[StepCandidate]:
        return [one for one in self.proposals.named if one.name == name]

    @property
    def _limit(self) -> int:
        """The most steps that may be compiled, by the present state of the search."""
        best, count = self.fit.best, len(self.fit.tried)
        if best is None or count < self._most:
            return self._most
        if self._faster_named(best):
            return count + 1
        return min(count + 1, self._most + MORE_COMPILED) if self._is_open(best) else self._most

    def _is_open(self, best: Tried) -> bool:
        """Whether it is still to be shown that the best step needs its offload, or that no further residual fits.

        For a step without choices, the question is open if much memory is left.
        """
        if self.unmoved(best):
            return True
        return not self.proposals.is_maximal(best) and (best.candidate.done is not None or self._much_is_left(best))

    def _much_is_left(self, best: Tried) -> bool:
        return self.fit.budget - best.compiled.device_bytes > _MUCH_LEFT * self.fit.budget

    def unmoved(self, best: Tried | None) -> list[StepCandidate]:
        """The best step without its offload, if that may fit and was not compiled.

        The compiler's buffers for copies can exceed the memory that offload saves; only a step without copies shows this.
        """
        found = None if best is None else self.proposals.without_host(best.candidate)
        if found is None or self.fit.known(found) is not None or self.fit.expected(found) > PREDICTION_SLACK * self.fit.budget:
            return []
        return [found]

    def _wanted(self) -> list[StepCandidate]:
        """The next candidates to compile in parallel; empty if no better plan is expected."""
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
        """Candidates that would be faster than the best and are expected to fit."""
        named = self._faster_named(best)
        fits = [one for one in named if self.fit.expected(one, stack) <= self.fit.budget]
        found = (named if best is not None else fits or named)[:1]
        count = len(self.fit.tried)
        # If the best step has choices, compilations beyond this limit are reserved for one residual more (`_one_more`).
        kept = best is not None and best.candidate.done is not None
        much = best is not None and self._much_is_left(best) and self._most <= count < self._most + MORE_COMPILED - 1
        return found + (self._own(stack, best) if not kept or count < self._most or much else [])

    def _last(self, best: Tried) -> list[StepCandidate]:
        """Candidates to show that the best cannot be improved.

        To be shown: no plan with equal layers is faster and fits, no further residual fits, no named policy is faster and fits.
        """
        found = self._uniform(best) or self._one_more(best)
        return [*found, *self.proposals.unknown(best)] if not found or len(self.fit.tried) < self._most - 1 else found

    def _first(self, stack: Stack) -> list[StepCandidate]:
        """`off` if it may fit, with a plan unless it surely fits; else a plan and the fastest named policy predicted to fit."""
        off = self._named("off")
        needs = predicted(stack, off[0].loads) if off else math.inf
        if needs <= PREDICTION_SLACK**2 * self.fit.budget:
            return [*off, *(self._own(stack, None) if PREDICTION_SLACK * needs > self.fit.budget else [])]
        able = [one for one in self.proposals.named if one.name != "off" and one.host_bytes <= self.fit.host_left]
        fits = [one for one in able if predicted(stack, one.loads) <= self.fit.budget]
        named = sorted(fits, key=lambda one: one.seconds)[:1] or self._named("full")
        return [*named, *self._own(stack, None)] or [self.proposals.least(stack)]

    def _with_leanest(self, stack: Stack, found: list[StepCandidate]) -> list[StepCandidate]:
        """Add the leanest candidates while nothing fits: after `found`, or first if at most two compilations are left."""
        asked = (self.proposals.least(stack), *self._named("full"), self.proposals.least(self.fit.guess))
        lean = [one for one in asked if self.fit.known(one) is None]
        return [*lean, *found] if len(self.fit.tried) >= self._most - SIDE_BY_SIDE else [*found, *lean]

    def _faster_named(self, best: Tried | None) -> list[StepCandidate]:
        """The named policies that would be faster than the best and may fit, the fastest first."""
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
        """The fastest plan with equal layers in each kind, if it is faster and may fit."""
        if not self._scanned:
            return []
        found = self._solved(self.fit.around(self.fit.budget, uncut=True), self.fit.budget, best, most_runs=1, worth=0.0)
        return [found] if found else []

    def _own(self, stack: Stack, best: Tried | None) -> list[StepCandidate]:
        """The solver's plan at the budget, and a safer plan: without cuts, or smaller while predictions are far off."""
        bold = self._solved(stack, self._within(self._share) if self.fit.tried else self.fit.budget, best)
        if bold is None and self._share < 1:
            bold = self._solved(stack, self.fit.budget, best, worth=_WORTH_DARING * self._worth)
        if not self.fit.tried:
            found = [bold]
        elif self._scanned and not any(self._is_uncut_plan(one.candidate) for one in self.fit.tried):
            # The memory cost of cutting a scan is not predicted: a plan without cuts is the surest to fit.
            found = [bold, self._solved(self.fit.around(self.fit.budget, uncut=True), self.fit.budget, best, most_runs=1)]
        elif self.fit.missed > _FAR_OFF * self.fit.budget:
            found = [bold, self._solved(stack, self._within(0.5 * self._share), best)]
        else:
            found = [bold]
        return [one for one in found if one is not None]

    @property
    def _share(self) -> float:
        """The share of the remaining room to use: halved for each step after the first that exceeded its prediction."""
        over = sum(one.compiled.device_bytes > max(self.fit.budget, 1.02 * one.predicted_bytes) for one in self.fit.tried)
        return 0.5 ** max(0, over - 1)

    def _within(self, share: float) -> float:
        """The memory at `share` of the way from the best step (the smallest, if none fits) to the budget."""
        low = min(
            self.fit.best.compiled.device_bytes if self.fit.best else self.fit.smallest.compiled.device_bytes, self.fit.budget
        )
        return low + share * (self.fit.budget - low)

    def _solved(
        self, stack: Stack, budget: float, best: Tried | None, *, most_runs: int | None = None, worth: float | None = None
    ) -> StepCandidate | None:
        """The fastest uncompiled plan within `budget` that would be faster than the best by at least `worth`."""
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
        """The best step with every residual saved that is predicted to fit, or with only one, from `least_more`."""
        if best.candidate.done is None:
            return []
        last = len(self.fit.tried) >= (self._most + MORE_COMPILED if self._much_is_left(best) else self._most) - 1
        # Near a compiled step with the same runs, the prediction error hardly changes. If the best step, compiled last, needed
        # less than predicted, allow its variant the difference.
        dares = self._much_is_left(best) and best is self.fit.tried[-1]
        spared = max(0, best.predicted_bytes - best.compiled.device_bytes) if dares else 0
        for room in () if last else dict.fromkeys((self.fit.budget + spared, self.fit.budget, self._within(self._share))):
            found = self._filled(best, room)
            if found.seconds < best.candidate.seconds - self._worth and self.fit.known(found) is None:
                return [found]
        return [one for one in self.proposals.least_more(best) if self.fit.known(one) is None][:1]

    def _filled(self, best: Tried, room: float) -> StepCandidate:
        """The best with further residuals saved one by one, the fastest result first, within `room`."""
        stack, found = self.fit.around(best.compiled.device_bytes), best.candidate
        while True:
            able = [one for one in self.proposals.one_more(found) if predicted(stack, one.loads) <= room]
            if not able:
                return found
            found = min(able, key=lambda one: one.seconds)

    def _is_uncut_plan(self, candidate: StepCandidate) -> bool:
        return not candidate.name and not self.fit.is_cut(candidate)
