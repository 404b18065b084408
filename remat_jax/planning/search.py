"""The search: solve, compile, refit, until a plan fits and none better is left, within so many compilations.

It knows candidates by what their blocks do and by their estimated seconds; what compiles them is given to it, so that it can be
tested without a compiler.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

from remat_jax.errors import InfeasibleBudget, SolverError
from remat_jax.planner import Choice, Stack, cheapest_policy, solve_counts
from remat_jax.planner.block import Prices
from remat_jax.planner.milp import is_out_of_time
from remat_jax.planning.candidate import FAILED, Candidate, Compile, Own, Tried
from remat_jax.planning.choices import one_residual_more, together
from remat_jax.planning.fitting import Seen, fitted, predicted, singles

MOST_COMPILED = 6
MORE_COMPILED = 4
"""So many more, one after another, while much of the budget is left and it was not shown that no residual fits into it."""
SIDE_BY_SIDE = 2
MOST_RUNS = 3
"""Different policies among the layers of one kind: layers that are scanned become as many scans, each compiled by itself."""

_EXACTLY = {"gap": 1e-3, "node_limit": 2000, "most_rounds": 60}
_ROUGHLY = {"gap": 1e-2, "node_limit": 200, "most_rounds": 8}
"""A point of the frontier, which is drawn and not compiled."""
_TIME_LIMIT = 60.0
"""Far beyond what so many nodes take: a plan must not depend on what else the machine does. That it was met is noted."""
_HOPE = 1.1
"""How much over the budget a prediction may be for the step to be compiled all the same."""
_MUCH = 0.01
"""The share of the budget that is much, where it is left."""
_FAR = 0.05
"""The share of the budget by which a plan is made smaller where the last one could not be compiled."""
_WORTH = 1e-3
"""The share of a step by which a plan must be faster for its compilation to be worth while."""


class Search:
    """One search.

    Args:
      stack: the first guess of the model's blocks.
      named: the named policies that are legal, `off` among them.
      budget, host_budget: in bytes; the host's may be infinite.
      own: makes a candidate of choices, with its price.
      compile_them: compiles candidates side by side; an empty list ends the search.
      arguments: the bytes that the step is given, and that are on the device whatever the policy.
      most_compiled: how many steps may be compiled in all.
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
    ) -> None:
        self.guess, self.named, self.budget, self.host_budget = stack, tuple(named), budget, host_budget
        self.own, self._compile_them, self._most, self._most_runs = own, compile_them, most_compiled, most_runs
        self.arguments, self._scanned = arguments, scanned and most_runs != 1
        self.timed_out = self.ended = False
        self.tried: list[Tried] = []
        self._worth = _WORTH * stack.base_seconds

    # --- what is known ------------------------------------------------------------------------------------------------

    @property
    def stack(self) -> Stack:
        """The stack as all that was compiled shows it; `off` is another program and says nothing of it."""
        return self._fitted(self.budget)

    def _fitted(self, near: float, *, uncut: bool = False) -> Stack:
        """With `uncut` as those show it in which all layers of a kind do the same."""
        told = [one for one in self.tried if one.candidate.name != "off" and one.compiled.device_bytes < FAILED]
        told = [one for one in told if not (uncut and self._is_cut(one.candidate))]
        seen = [Seen(one.candidate.loads, one.compiled.device_bytes) for one in told]
        return fitted(self.guess, seen, near)

    def _is_whole(self, candidate: Candidate) -> bool:
        return not candidate.name and not self._is_cut(candidate)

    def _is_cut(self, candidate: Candidate) -> bool:
        loads = iter(candidate.loads)
        return any(len(set(islice(loads, block.repeats))) > 1 for block in self.guess.blocks)

    @property
    def best(self) -> Tried | None:
        """The fastest that was compiled and fits; of equal ones that with less memory."""
        fits = [one for one in self.tried if self._fits(one)]

        # Of equal estimates, the step without any checkpoint is surely no slower.
        def rank(one: Tried) -> tuple[float, bool, int]:
            return one.candidate.seconds, one.candidate.name != "off", one.compiled.device_bytes

        return min(fits, key=rank, default=None)

    @property
    def smallest(self) -> Tried:
        """That which needs least, of those that may be run."""
        sound = [one for one in self.tried if one.compiled.sound]
        within = [one for one in sound if one.compiled.host_bytes <= self.host_budget]
        return min(within or sound or self.tried, key=lambda one: one.compiled.device_bytes)

    def _fits(self, tried: Tried) -> bool:
        found = tried.compiled
        return found.sound and found.device_bytes <= self.budget and found.host_bytes <= self.host_budget

    def unknown(self, best: Tried) -> list[Candidate]:
        """Named policies that were not compiled, would be faster than `best`, and might fit.

        A step is given its arguments and keeps what its policy says; what that alone puts over the budget is not among them.
        """
        stack = self.stack
        able = [
            one
            for one in self.named
            if one.seconds < best.candidate.seconds and not math.isclose(one.seconds, best.candidate.seconds)
            if self.known(one) is None and one.host_bytes <= self.host_left
            if self.arguments + sum(load.saved for load in one.loads) <= self.budget
        ]
        return sorted(able, key=lambda one: predicted(stack, one.loads))

    def is_maximal(self, best: Tried) -> bool:
        """Whether it was shown that no single residual more can be saved in a run of its layers that would save time.

        The one that takes least memory, as the compiled steps tell, and the one that keeps fewest bytes were compiled as well
        and do not fit.
        """
        if best.candidate.seconds <= 0:
            return True
        if best.candidate.choices is None:
            return False
        known = [self.known(one) for one in self._least_more(best)]
        return all(one is not None and one.compiled.device_bytes < FAILED and not self._fits(one) for one in known)

    def _least_more(self, best: Tried) -> list[Candidate]:
        """With one residual more that saves time: that which is predicted to need least, and that which keeps fewest bytes."""
        faster = self._one_residual_more(best.candidate)
        stack = self._fitted(best.compiled.device_bytes)
        found: list[Candidate] = []
        for key in (lambda one: predicted(stack, one.loads), lambda one: sum(load.saved for load in one.loads)):
            least = min(faster, key=key, default=None)
            if least is not None and not any(least.is_same(one) for one in found):
                found.append(least)
        return found

    def _one_residual_more(self, found: Candidate) -> list[Candidate]:
        assert found.choices is not None, "it was made of choices"
        options = [self.own(one) for one in one_residual_more(self.guess, found.choices)]
        return [one for one in options if one.seconds < found.seconds]

    @property
    def host_left(self) -> float:
        """What of the host budget is left for activations: an optimizer's state that is there as well counts against it."""
        seen = [one.compiled.host_bytes - one.candidate.host_bytes for one in self.tried if one.compiled.device_bytes < FAILED]
        return max(0.0, self.host_budget - max(0, min(seen, default=0)))

    def expected(self, candidate: Candidate, stack: Stack | None = None) -> int:
        """The device bytes of a candidate: compiled where it was, else predicted."""
        for one in self.tried:
            if one.candidate.is_same(candidate):
                return one.compiled.device_bytes
        return round(predicted(stack or self.stack, candidate.loads))

    def known(self, candidate: Candidate) -> Tried | None:
        """What the compiler said of a candidate, if it was asked."""
        return next((one for one in self.tried if one.candidate.is_same(candidate)), None)

    # --- what is done -------------------------------------------------------------------------------------------------

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
        if best is None or len(self.tried) < self._most or not self._much_is_left(best):
            return self._most
        return self._most if self.is_maximal(best) else min(len(self.tried) + 1, self._most + MORE_COMPILED)

    def _much_is_left(self, best: Tried) -> bool:
        return self.budget - best.compiled.device_bytes > _MUCH * self.budget

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
        found = self._first(stack) if not self.tried else []
        if best is not None and best.candidate.seconds <= 0:
            return []
        if self.tried:
            found += self._hopeful(stack, best)
            count = len(self.tried)
            # The last compilation is kept for one residual more, of a plan that has one.
            kept = best is not None and best.candidate.choices is not None
            if not kept or count < self._most - 1 or self._most <= count < self._most + MORE_COMPILED - 1:
                found += self._own(stack, best)
            if best is None:
                found = self._with_leanest(stack, found)
            elif not found:
                found = self._one_more(best)
                found = [*found, *self.unknown(best)] if not found or len(self.tried) < self._most - 1 else found
        new: list[Candidate] = []
        for one in found:
            if self.known(one) is None and not any(one.is_same(other) for other in new):
                new.append(one)
        return new[:SIDE_BY_SIDE]

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
            if self.known(one) is None and self.expected(one, stack) <= _HOPE * self.budget
        ]
        return sorted(able, key=lambda one: one.seconds)[:1]

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

    def _solved(self, stack: Stack, budget: float, best: Tried | None, *, most_runs: int | None = None) -> Candidate | None:
        """The fastest within `budget` that was not compiled yet, and would be faster than the best."""
        for _ in range(4):
            found = self.solve(stack, budget, most_runs=most_runs)
            if found is None or (best is not None and found.seconds > best.candidate.seconds - self._worth):
                return None
            known = self.known(found)
            if known is None:
                return found
            if self._fits(known):
                return None
            failed = known.compiled.device_bytes == FAILED
            budget -= _FAR * self.budget if failed else max(known.compiled.device_bytes - self.budget, 1e-3 * self.budget)
            if budget <= 0:
                return None
        return None

    def solve(self, stack: Stack, budget: float, *, most_runs: int | None = None) -> Candidate | None:
        """The planner's fastest within `budget`, of as many runs as the search may have or fewer; None where nothing fits."""
        found, timed_out = self._solve(stack, budget, most_runs or self._most_runs, _EXACTLY)
        self.timed_out |= timed_out
        return found

    def _solve(
        self, stack: Stack, budget: float, most_runs: int | None, limits: Mapping[str, Any]
    ) -> tuple[Candidate | None, bool]:
        """And whether the solver ended by a limit."""
        least = self._least(stack)
        fits = predicted(stack, least.loads) <= budget
        # With a limit on the host, the leanest may be one that offloads a part of what it could: the solver knows.
        if not fits and (stack.link is None or math.isinf(self.host_budget)):
            return None, False
        try:
            plan = solve_counts(
                stack,
                budget,
                self.host_left,
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

    def _one_more(self, best: Tried) -> list[Candidate]:
        """The best with what still seems to fit saved as well, the best bargain first; at least with one residual more.

        That one is taken to need least of those that save time, or keeps fewest bytes.
        """
        if best.candidate.choices is None:
            return []
        stack, room = self._fitted(best.compiled.device_bytes), self._within(self._share)
        found = best.candidate
        while True:
            faster = self._one_residual_more(found)
            able = [one for one in faster if predicted(stack, one.loads) <= room]
            if not able:
                break
            found = min(able, key=lambda one: one.seconds)
        last = len(self.tried) >= (self._most + MORE_COMPILED if self._much_is_left(best) else self._most) - 1
        if found is best.candidate or self.known(found) is not None or last:
            return [one for one in self._least_more(best) if self.known(one) is None][:1]
        return [found]
