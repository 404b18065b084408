"""What a search knows: the candidates that were compiled, what they say of others, and what they show of the best."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import islice

from remat_jax.planning.candidate import FAILED, Candidate, Own, Recut, Tried
from remat_jax.planning.choices import Cuts, borders, one_residual_more
from remat_jax.planning.fitting import Seen, fitted, predicted, singles
from remat_jax.solver import Choice, Stack

_OFF = 0.5
"""The share of what `off` keeps that it may really need: 0.55 were seen."""


class Known:
    """What was compiled, and what that tells.

    Args:
      stack: the first guess of the model's blocks.
      named: the named policies that are legal, `off` among them.
      budget, host_budget: in bytes; the host's may be infinite.
      own: makes a candidate of choices, with its price.
      arguments: the bytes that the step is given, and that are on the device whatever the policy.
      recut: cuts the scans of a candidate elsewhere; None where nothing is scanned.
    """

    def __init__(
        self,
        stack: Stack,
        named: Sequence[Candidate],
        budget: float,
        host_budget: float,
        own: Own,
        arguments: float,
        recut: Recut | None,
    ) -> None:
        self.guess, self.named, self.budget, self.host_budget = stack, tuple(named), budget, host_budget
        self.own, self.arguments, self._recut = own, arguments, recut
        self.tried: list[Tried] = []

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
        return bool(candidate.cuts) or any(len(set(islice(loads, block.repeats))) > 1 for block in self.guess.blocks)

    @property
    def best(self) -> Tried | None:
        """The fastest that was compiled and fits; of equal ones that which moves nothing, and then that with less memory."""
        fits = [one for one in self.tried if self._fits(one)]

        # Of equal estimates, the step without any checkpoint is surely no slower.
        def rank(one: Tried) -> tuple[float, bool, bool, int]:
            return one.candidate.seconds, one.candidate.name != "off", one.candidate.host_bytes > 0, one.compiled.device_bytes

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

        What keeps too much by itself is not among them.
        """
        stack = self.stack
        able = [
            one
            for one in self.named
            if one.seconds < best.candidate.seconds and not math.isclose(one.seconds, best.candidate.seconds)
            if self.known(one) is None and one.host_bytes <= self.host_left
            if self.may_fit(one)
        ]
        return sorted(able, key=lambda one: predicted(stack, one.loads))

    def may_fit(self, one: Candidate) -> bool:
        """Whether its arguments and what it keeps do not exceed the budget; of `off` half, much of which XLA makes again."""
        return self.arguments + sum(load.saved for load in one.loads) * (_OFF if one.name == "off" else 1) <= self.budget

    def is_maximal(self, best: Tried) -> bool:
        """Whether it was shown that no single residual more can be saved in a run of its layers that would save time.

        The one that takes least memory, as the compiled steps tell, and the one that keeps fewest bytes were compiled as well
        and do not fit.
        """
        if best.candidate.seconds <= 0:
            return True
        if best.candidate.done is None:
            return False
        known = [self.known(one) for one in self._least_more(best)]
        return all(one is not None and one.compiled.device_bytes < FAILED and not self._fits(one) for one in known)

    def _least_more(self, best: Tried) -> list[Candidate]:
        """With one residual more that saves time: that which keeps fewest bytes, and that which is predicted to need least."""
        faster = self._one_residual_more(best.candidate)
        stack = self._fitted(best.compiled.device_bytes)
        found: list[Candidate] = []
        for key in (lambda one: sum(load.saved for load in one.loads), lambda one: predicted(stack, one.loads)):
            least = min(faster, key=key, default=None)
            if least is not None and not any(least.is_same(one) for one in found):
                found.append(least)
        return found

    def _one_residual_more(self, found: Candidate) -> list[Candidate]:
        """With one residual more in one of its runs, which stay cut as they are."""
        assert found.done is not None, "choices say what it does"
        kept = borders(self.guess, found.done, found.cuts)
        options = [self.cut(self.own(one), kept) for one in one_residual_more(self.guess, found.done, found.cuts)]
        return [one for one in options if one.seconds < found.seconds]

    def without_host(self, found: Candidate) -> Candidate | None:
        """The candidate with what it offloads saved on the device; None where it offloads nothing, or what may not be saved."""
        if not found.host_bytes or found.done is None:
            return None
        moved = zip(singles(self.guess), found.done, strict=True)
        if not all(
            one.may_save
            for block, done in moved
            for one, choice in zip(block.residuals, done, strict=True)
            if choice is Choice.OFFLOAD
        ):
            return None
        saved = tuple(tuple(Choice.SAVE if one is Choice.OFFLOAD else one for one in done) for done in found.done)
        return self.cut(self.own(saved), found.cuts)

    def cut(self, candidate: Candidate, cuts: Cuts) -> Candidate:
        """The candidate with its scans cut at `cuts`, where there are any."""
        return candidate if self._recut is None else self._recut(candidate, cuts)

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

    def shown(self, candidate: Candidate) -> int:
        """The same to be shown beside others: predicted as exactly as the compiled step of the nearest size allows."""
        known = self.known(candidate)
        if known is not None:
            return known.compiled.device_bytes
        return round(predicted(self._fitted(predicted(self.stack, candidate.loads)), candidate.loads))

    def known(self, candidate: Candidate) -> Tried | None:
        """What the compiler said of a candidate, if it was asked."""
        return next((one for one in self.tried if one.candidate.is_same(candidate)), None)
