"""The search: asks the solver, compiles and refits until no better plan is left, or until the compilations are used up.

`docs/how/planner.md` ("From a workload to a plan") lists what each round compiles.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from remat_jax.planning.candidate import FAILED, Compiled, StepCandidate, Tried
from remat_jax.planning.fit_memory import Fit, predicted
from remat_jax.planning.propose_candidates import Proposals
from remat_jax.solver import Stack

Compile = Callable[[Sequence[StepCandidate], Tried | None], list[Compiled]]
"""Compiles candidates in parallel, given the best step so far; an empty result ends the search."""

MOST_COMPILED = 6
MORE_COMPILED = 4
"""Additional compilations to show that no further residual fits."""
UNMOVED_COMPILED = 2
"""Additional compilations, if plans offload, to show whether offload is necessary."""
SIDE_BY_SIDE = 2
MOST_RUNS = 3
"""The maximum number of runs of layers of one kind. Each run of scanned layers becomes a scan of its own."""

PREDICTION_SLACK = 1.1
"""A step may be compiled if its predicted memory is at most this multiple of the budget."""
_MUCH_LEFT = 0.01
"""Much memory is left if more than this share of the budget is unused."""
_FAR_OFF = 0.02
"""While predictions miss by more than this share of the budget, a safer plan is compiled together with each plan."""
_AFTER_FAILURE = 0.05
"""If a plan could not be compiled, the solver plans again for a budget smaller by this share."""
_WORTH_DARING = 5.0
"""After predictions that were too low, plans may use only a share of the unused budget (`_share`). If no plan is proposed
within this share, a plan for the whole budget is compiled if it gains more than this multiple of `WORTH_COMPILING`."""


class Search:
    """One search.

    `most_compiled` is the maximum number of steps to compile, not counting `MORE_COMPILED`, `UNMOVED_COMPILED` and the steps
    that `fit` already has. `scanned` says whether a mix of policies cuts a scan.
    """

    def __init__(self, fit: Fit, proposals: Proposals, *, most_compiled: int = MOST_COMPILED, scanned: bool = False) -> None:
        self.fit, self.proposals = fit, proposals
        self._most = len(fit.tried) + most_compiled
        self._most_in_all = self._most + UNMOVED_COMPILED
        self._scanned = scanned

    def run(self, compile_them: Compile) -> Tried | None:
        """The fastest compiled candidate that fits; None if none fits."""
        while (left := self._limit - len(self.fit.tried)) > 0 and (wanted := self._wanted()[:left]):
            answers = compile_them(wanted, self.fit.best)
            if not answers:
                break
            self.fit.learn(wanted, answers)
        return self.fit.best

    def probe(self, compile_them: Compile) -> bool:
        """Whether anything fits: compiles `full` and, if that does not fit, the plan with the least predicted memory."""
        for candidate in (self.proposals.named_policy("full"), self.proposals.least(self.fit.stack)):
            if candidate is not None and self.fit.best is None and self.fit.known(candidate) is None:
                self.fit.learn([candidate], compile_them([candidate], None))
        return self.fit.best is not None

    @property
    def _limit(self) -> int:
        """The maximum number of compiled steps, given the current state of the search."""
        best, count = self.fit.best, len(self.fit.tried)
        if best is None or count < self._most:
            return self._most
        if self._faster_named(best):
            return count + 1
        # One more compilation may show that the best step needs its offload, or that no further residual fits.
        fillable = best.candidate.effective_choices is not None or self._much_is_left(best)
        if self.unmoved(best) or (fillable and not self.proposals.is_maximal(best)):
            return min(count + 1, self._most + MORE_COMPILED)
        return self._most

    def _much_is_left(self, best: Tried) -> bool:
        return self.fit.budget - best.compiled.device_bytes > _MUCH_LEFT * self.fit.budget

    def unmoved(self, best: Tried) -> list[StepCandidate]:
        """The best step without offload, if that may fit: the buffers for copies may need more memory than offload frees."""
        candidate = self.proposals.without_host(best.candidate)
        if candidate is None or self.fit.known(candidate) is not None:
            return []
        return [candidate] if self.fit.expected(candidate) <= PREDICTION_SLACK * self.fit.budget else []

    def _wanted(self) -> list[StepCandidate]:
        """The next candidates to compile in parallel; empty if no better plan is expected."""
        best = self.fit.best
        if not self.fit.tried:
            candidates = self._first()
        elif best is None:
            candidates = self._with_leanest(self._better(None))
        elif best.candidate.seconds <= 0:
            candidates = []
        else:
            unmoved = self.unmoved(best)
            if unmoved:
                self._most = min(self._most + 1, self._most_in_all)
            candidates = [*unmoved, *self._better(best)] or self._last(best)
        new: list[StepCandidate] = []
        for candidate in candidates:
            if self.fit.known(candidate) is None and not any(candidate.is_same(other) for other in new):
                new.append(candidate)
        return new[:SIDE_BY_SIDE]

    def _first(self) -> list[StepCandidate]:
        """The first candidates: `off`, or else the fastest named policy that is predicted to fit; and the solver's plan.

        `off` is taken if it may fit. If it surely fits, the solver's plan is left out.
        """
        stack, budget = self.fit.stack, self.fit.budget
        off = self.proposals.named_policy("off")
        if off is not None and (needs := predicted(stack, off.loads)) <= PREDICTION_SLACK**2 * budget:
            return [off, *(self._solved_at_budget(None) if PREDICTION_SLACK * needs > budget else [])]
        named = [
            step for step in self.proposals.faster_named(None) if step.name != "off" and predicted(stack, step.loads) <= budget
        ]
        fastest = min(named, key=lambda step: step.seconds, default=self.proposals.named_policy("full"))
        return [*([fastest] if fastest else []), *self._solved_at_budget(None)] or [self.proposals.least(stack)]

    def _better(self, best: Tried | None) -> list[StepCandidate]:
        """Candidates that are expected to fit and to be faster than the best step."""
        named = self._faster_named(best)
        if best is None:
            fits = [step for step in named if self.fit.expected(step) <= self.fit.budget]
            return (fits or named)[:1] + self._solved_at_budget(None)
        # If the best step has choices (`effective_choices`), compilations beyond `_most` are for variants with one more
        # residual and for faster named policies. While much memory is left, the solver's plans are compiled too, except in the
        # last compilation.
        over = len(self.fit.tried) - self._most if best.candidate.effective_choices is not None else -1
        if over >= 0 and not (self._much_is_left(best) and over < MORE_COMPILED - 1):
            return named[:1]
        return named[:1] + self._solved_at_budget(best)

    def _with_leanest(self, candidates: list[StepCandidate]) -> list[StepCandidate]:
        """Add candidates with the least memory, because nothing fits: at the end, or in front if few compilations are left."""
        least = self.proposals.least
        lean = list(filter(None, (least(self.fit.stack), self.proposals.named_policy("full"), least(self.fit.guess))))
        return [*lean, *candidates] if len(self.fit.tried) >= self._most - SIDE_BY_SIDE else [*candidates, *lean]

    def _last(self, best: Tried) -> list[StepCandidate]:
        """The last candidates: an uncut plan, or else the best step with more residuals saved; then faster named policies."""
        candidates = (self._uniform(best, worth=0.0) if self._scanned else []) or self._one_more(best)
        if candidates and len(self.fit.tried) >= self._most - 1:
            return candidates
        return [*candidates, *self.proposals.unknown(best)]

    def _faster_named(self, best: Tried | None) -> list[StepCandidate]:
        """The named policies that may fit and would be faster than the best step, the fastest first."""
        most = PREDICTION_SLACK * self.fit.budget
        named = [step for step in self.proposals.faster_named(best) if self.fit.least_expected(step) <= most]
        return sorted(named, key=lambda step: step.seconds)

    def _solved_at_budget(self, best: Tried | None) -> list[StepCandidate]:
        """The solver's plan at the budget, and a safer plan: uncut, or smaller while predictions are inaccurate."""
        stack, budget = self.fit.stack, self.fit.budget
        if not self.fit.tried:
            return self._solved(stack, budget, best)
        bold = self._solved(stack, self._within(self._share), best)
        if not bold and self._share < 1:
            bold = self._solved(stack, budget, best, worth=_WORTH_DARING * self.proposals.worth)
        plans = [step.candidate for step in self.fit.tried if not step.candidate.name]
        if self._scanned and all(map(self.fit.is_cut, plans)):
            # The memory that cutting a scan costs is not predicted, so an uncut plan is most likely to fit.
            return [*bold, *self._uniform(best)]
        if self.fit.missed > _FAR_OFF * budget:
            return [*bold, *self._solved(stack, self._within(0.5 * self._share), best)]
        return bold

    def _uniform(self, best: Tried | None, worth: float | None = None) -> list[StepCandidate]:
        """The fastest plan with one policy per kind, if it may fit and is faster than the best step."""
        stack = self.fit.around(self.fit.budget, uncut=True)
        return self._solved(stack, self.fit.budget, best, most_runs=1, worth=worth)

    @property
    def _share(self) -> float:
        """The share of the unused budget that plans may use, at first 1.

        It is halved for each step whose compiled bytes exceed both the budget and 1.02 times the prediction, except the first.
        """
        over = sum(step.compiled.device_bytes > max(self.fit.budget, 1.02 * step.predicted_bytes) for step in self.fit.tried)
        return 0.5 ** max(0, over - 1)

    def _within(self, share: float) -> float:
        """The bytes of the best step (if none fits, of the smallest) plus `share` of the budget that it leaves unused."""
        low = min((self.fit.best or self.fit.smallest).compiled.device_bytes, self.fit.budget)
        return low + share * (self.fit.budget - low)

    def _solved(
        self, stack: Stack, budget: float, best: Tried | None, *, most_runs: int | None = None, worth: float | None = None
    ) -> list[StepCandidate]:
        """The fastest uncompiled plan within `budget`, if it seems more than `worth` seconds faster than the best step."""
        most = math.inf if best is None else best.candidate.seconds - (self.proposals.worth if worth is None else worth)
        for _ in range(4):
            plan = self.proposals.solve(stack, budget, most_runs=most_runs) if budget > 0 else None
            if plan is None or plan.seconds > most or math.isclose(plan.seconds, most):
                return []
            tried = self.fit.known(plan)
            if tried is None:
                return [plan]
            if self.fit.fits(tried):
                return []
            if tried.compiled.device_bytes == FAILED:
                budget -= _AFTER_FAILURE * self.fit.budget
            else:
                budget -= max(tried.compiled.device_bytes - self.fit.budget, 1e-3 * self.fit.budget)
        return []

    def _one_more(self, best: Tried) -> list[StepCandidate]:
        """A variant of the best step that saves all further residuals predicted to fit or, if that gains little, only one."""
        if best.candidate.effective_choices is None:
            return []
        much = self._much_is_left(best)
        if len(self.fit.tried) < (self._most + MORE_COMPILED if much else self._most) - 1:
            # If the best step was compiled last and needed less than predicted, a variant's prediction may exceed the budget by
            # the difference.
            dares = much and best is self.fit.tried[-1]
            spared = max(0, best.predicted_bytes - best.compiled.device_bytes) if dares else 0
            for room in dict.fromkeys((self.fit.budget + spared, self.fit.budget, self._within(self._share))):
                filled = self._filled(best, room)
                if filled.seconds < best.candidate.seconds - self.proposals.worth and self.fit.known(filled) is None:
                    return [filled]
        return [step for step in self.proposals.least_more(best) if self.fit.known(step) is None][:1]

    def _filled(self, best: Tried, room: float) -> StepCandidate:
        """The best step with further residuals saved one by one: each time the fastest variant predicted within `room`."""
        stack, candidate = self.fit.around(best.compiled.device_bytes), best.candidate
        while True:
            within = [step for step in self.proposals.one_more(candidate) if predicted(stack, step.loads) <= room]
            if not within:
                return candidate
            candidate = min(within, key=lambda step: step.seconds)
