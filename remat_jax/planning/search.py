"""The search: solve, compile, refit, until a plan fits and none better is left, within so many compilations.

It knows candidates by what their blocks do and by their estimated seconds; what compiles them is given to it, so that it can be
tested without a compiler.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from remat_jax.errors import InfeasibleBudget
from remat_jax.planning.candidate import FAILED, Candidate, Compile, Own, Recut, Tried
from remat_jax.planning.fitting import predicted
from remat_jax.planning.solving import Solver
from remat_jax.solver import Stack

MOST_COMPILED = 6
MORE_COMPILED = 4
"""So many more, one after another, until it is shown that no residual more fits into the plan."""
UNMOVED_COMPILED = 2
"""So many more, where plans offload, to see whether they have to."""
SIDE_BY_SIDE = 2
MOST_RUNS = 3
"""Runs of layers of one kind: layers that are scanned become as many scans, each compiled by itself."""

_HOPE = 1.1
"""How much over the budget a prediction may be for the step to be compiled all the same."""
_MUCH = 0.01
"""The share of the budget that is much, where it is left."""
_FAR = 0.05
"""The share of the budget by which a plan is made smaller where the last one could not be compiled."""
_WORTH = 1e-3
"""The share of a step by which a plan must be faster for its compilation to be worth while."""


class Search(Solver):
    """One search.

    Args:
      stack, named, budget, host_budget, own, arguments, recut: as for `Known`.
      compile_them: compiles candidates side by side; an empty list ends the search.
      most_compiled: how many steps may be compiled, but for `MORE_COMPILED` and `UNMOVED_COMPILED`.
      most_runs: see `MOST_RUNS`.
      scanned: whether different policies in a kind cut a scan, which costs what no prediction knows.
    """

    def __init__(
        self,
        stack: Stack,
        named: Sequence[Candidate],
        budget: float,
        host_budget: float,
        own: Own,
        compile_them: Compile,
        *,
        arguments: float = 0.0,
        most_compiled: int = MOST_COMPILED,
        most_runs: int | None = MOST_RUNS,
        scanned: bool = False,
        recut: Recut | None = None,
    ) -> None:
        may_cut = recut if most_runs != 1 else None
        super().__init__(stack, named, budget, host_budget, own, arguments, may_cut, most_runs=most_runs)
        self._compile_them, self._most = compile_them, most_compiled
        self._most_in_all = most_compiled + UNMOVED_COMPILED
        self._scanned = scanned and most_runs != 1
        self.ended = False
        self._worth = _WORTH * stack.base_seconds

    def run(self) -> Tried:
        """The fastest candidate that was compiled and fits.

        Raises:
          InfeasibleBudget: none did; the message says the least that was reached.
        """
        while not self.ended and (left := self._limit - len(self.tried)) > 0 and (wanted := self._wanted()):
            self._compile(wanted[:left])
        found = self.best
        if found is None:
            least = self.smallest.compiled.device_bytes
            raise InfeasibleBudget(f"nothing fits in {self.budget!r} bytes; the least reached is {least}", least)
        return found

    @property
    def _limit(self) -> int:
        """How many steps may be compiled, as far as is known now."""
        best = self.best
        if best is None or len(self.tried) < self._most or not self._is_open(best):
            return self._most
        return min(len(self.tried) + 1, self._most + MORE_COMPILED)

    def _is_open(self, best: Tried) -> bool:
        """Whether it is still to be shown that no residual more fits; where no choices say what it does, if much is left.

        And whether what it offloads has to be.
        """
        if self.unmoved(best):
            return True
        return not self.is_maximal(best) and (best.candidate.done is not None or self._much_is_left(best))

    def _much_is_left(self, best: Tried) -> bool:
        return self.budget - best.compiled.device_bytes > _MUCH * self.budget

    def unmoved(self, best: Tried | None) -> list[Candidate]:
        """The best with what it offloads left on the device, where that may fit and was not compiled.

        What the compiler needs for copies can be more than they spare, and no step that makes them all shows it.
        """
        found = None if best is None else self.without_host(best.candidate)
        if found is None or self.known(found) is not None or self.expected(found) > _HOPE * self.budget:
            return []
        return [found]

    def probe(self) -> bool:
        """Whether anything fits, by the leanest named policy, and by the planner's leanest where that does not."""
        full = [one for one in self.named if one.name == "full"]
        for candidates in (full, [self._least(self.stack)]):
            new = [one for one in candidates if self.known(one) is None]
            if self.best is None and new:
                self._compile(new)
        return self.best is not None

    def _compile(self, candidates: Sequence[Candidate]) -> None:
        stack = self.stack
        expected = [self.expected(one, stack) for one in candidates]
        answers = self._compile_them(candidates)
        if not answers:
            self.ended = True
            return
        for one, found, before in zip(candidates, answers, expected, strict=True):
            self.tried.append(Tried(one, found, before))

    def _wanted(self) -> list[Candidate]:
        """What to compile next, side by side; empty where no better plan is to be expected."""
        stack, best = self.stack, self.best
        if best is not None and best.candidate.seconds <= 0:
            return []
        if unmoved := self.unmoved(best):
            self._most = min(self._most + 1, self._most_in_all)
        found = [*unmoved, *self._better(stack, best)] if self.tried else self._first(stack)
        if best is None and self.tried:
            found = self._with_leanest(stack, found)
        elif best is not None and not found:
            found = self._last(best)
        new: list[Candidate] = []
        for one in found:
            if self.known(one) is None and not any(one.is_same(other) for other in new):
                new.append(one)
        return new[:SIDE_BY_SIDE]

    def _better(self, stack: Stack, best: Tried | None) -> list[Candidate]:
        """What would be faster than the best and is expected to fit."""
        found = self._hopeful(stack, best)
        count = len(self.tried)
        # The last compilation is kept for one residual more, of a plan that has one.
        kept = best is not None and best.candidate.done is not None
        much = best is not None and self._much_is_left(best) and self._most <= count < self._most + MORE_COMPILED - 1
        return found + (self._own(stack, best) if not kept or count < self._most - 1 or much else [])

    def _last(self, best: Tried) -> list[Candidate]:
        """What is left to be shown of the best.

        No plan for all layers alike is faster and fits, no residual more fits, no named policy is faster and fits.
        """
        found = self._uniform(best) or self._one_more(best)
        return [*found, *self.unknown(best)] if not found or len(self.tried) < self._most - 1 else found

    def _first(self, stack: Stack) -> list[Candidate]:
        """Keeping everything where that may fit; else the leanest named policy, to fit by, and a first plan."""
        off = [one for one in self.named if one.name == "off"]
        needs = predicted(stack, off[0].loads) if off else math.inf
        if needs <= _HOPE**2 * self.budget:
            return [*off, *(self._own(stack, None) if _HOPE * needs > self.budget else [])]
        full = [one for one in self.named if one.name == "full"]
        return [*full, *self._own(stack, None)] or [self._least(stack)]

    def _with_leanest(self, stack: Stack, found: list[Candidate]) -> list[Candidate]:
        """The leanest too, while nothing fits: behind the others, and before them where no more can be compiled after these."""
        full = [one for one in self.named if one.name == "full"]
        lean = [one for one in (self._least(stack), *full) if self.known(one) is None]
        return [*lean, *found] if len(self.tried) >= self._most - SIDE_BY_SIDE else [*found, *lean]

    def _hopeful(self, stack: Stack, best: Tried | None) -> list[Candidate]:
        """Named policies that would be faster than the best, and may fit: the fastest of them."""
        bound = best.candidate.seconds if best else math.inf
        able = [
            one
            for one in self.named
            if one.seconds < bound and not math.isclose(one.seconds, bound) and one.host_bytes <= self.host_left
            if self.known(one) is None
            # No prediction knows what XLA makes again of itself where there are no checkpoints.
            if self.expected(one, stack) <= _HOPE * self.budget or (one.name == "off" and self.may_fit(one))
        ]
        return sorted(able, key=lambda one: one.seconds)[:1]

    def _uniform(self, best: Tried) -> list[Candidate]:
        """The fastest plan under which all layers of a kind do the same, where it is faster and may fit."""
        if not self._scanned:
            return []
        found = self._solved(self._fitted(self.budget, uncut=True), self.budget, best, most_runs=1, worth=0.0)
        return [found] if found else []

    def _own(self, stack: Stack, best: Tried | None) -> list[Candidate]:
        """The planner's plan at the budget, and beside it one between it and the best, or one without a cut."""
        bold = self._solved(stack, self._within(self._share) if self.tried else self.budget, best)
        if not self.tried:
            found = [bold]
        elif self._scanned and not any(self._is_whole(one.candidate) for one in self.tried):
            # What cutting a scan costs is not predicted: a plan that cuts none is what is surest to fit.
            found = [bold, self._solved(self._fitted(self.budget, uncut=True), self.budget, best, most_runs=1)]
        else:
            found = [bold, self._solved(stack, self._within(0.5 * self._share), best)]
        return [one for one in found if one is not None]

    @property
    def _share(self) -> float:
        """How much of the room that is left to dare: half as much each time that the compiler needed more than predicted."""
        over = sum(one.compiled.device_bytes > max(self.budget, 1.02 * one.predicted_bytes) for one in self.tried)
        return 0.5 ** max(0, over - 1)

    def _within(self, share: float) -> float:
        """The budget, or less: so much of the way to it from what is known to fit."""
        low = min(self.best.compiled.device_bytes if self.best else self.smallest.compiled.device_bytes, self.budget)
        return low + share * (self.budget - low)

    def _solved(
        self, stack: Stack, budget: float, best: Tried | None, *, most_runs: int | None = None, worth: float | None = None
    ) -> Candidate | None:
        """The fastest within `budget` that was not compiled yet, and would be faster than the best by what that is worth."""
        least = math.inf if best is None else best.candidate.seconds - (self._worth if worth is None else worth)
        for _ in range(4):
            if budget <= 0:
                return None
            found = self.solve(stack, budget, most_runs=most_runs)
            if found is None or found.seconds > least or math.isclose(found.seconds, least):
                return None
            known = self.known(found)
            if known is None:
                return found
            if self._fits(known):
                return None
            failed = known.compiled.device_bytes == FAILED
            budget -= _FAR * self.budget if failed else max(known.compiled.device_bytes - self.budget, 1e-3 * self.budget)
        return None

    def _one_more(self, best: Tried) -> list[Candidate]:
        """The best with what still seems to fit saved as well; at least with one residual more.

        That one keeps fewest bytes of those that save time, or is taken to need least.
        """
        if best.candidate.done is None:
            return []
        last = len(self.tried) >= (self._most + MORE_COMPILED if self._much_is_left(best) else self._most) - 1
        # Beside a compiled step with the same runs a prediction is exact, or nearly: nothing is left to dare at first. What
        # that step needed less than was predicted of it, more of the same may need less again; until that was once in vain.
        dares = self._much_is_left(best) and best is self.tried[-1]
        spared = max(0, best.predicted_bytes - best.compiled.device_bytes) if dares else 0
        for room in () if last else dict.fromkeys((self.budget + spared, self.budget, self._within(self._share))):
            found = self._filled(best, room)
            if found.seconds < best.candidate.seconds and self.known(found) is None:
                return [found]
        return [one for one in self._least_more(best) if self.known(one) is None][:1]

    def _filled(self, best: Tried, room: float) -> Candidate:
        """The best with one residual more after another, the best bargain first."""
        stack, found = self._fitted(best.compiled.device_bytes), best.candidate
        while True:
            able = [one for one in self._one_residual_more(found) if predicted(stack, one.loads) <= room]
            if not able:
                return found
            found = min(able, key=lambda one: one.seconds)
