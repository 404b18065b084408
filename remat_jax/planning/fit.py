"""What the compiled steps of one search say: which fit, which is best, and what other candidates would need."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import islice

from remat_jax.planning.candidate import FAILED, Compiled, StepCandidate, Tried
from remat_jax.planning.fitting import Seen, fitted, predicted
from remat_jax.solver import Stack

_FITTED = 2
"""So many compiled steps make predictions of others more than a guess."""
_OVER = 0.01
"""The share of the budget by which a prediction must be over it to count as shown, at least."""

_OFF_SHARE = 0.5
"""The share of what `off` keeps that it may really need, as XLA recomputes by itself: 0.55 was seen."""


class Fit:
    """The steps that were compiled, and the stack fitted to them.

    Args:
      guess: the stack as it was described before anything was compiled.
      budget, host_budget: in bytes; the host's may be infinite.
      arguments: the bytes that the step is given, which are on the device whatever the policy.
    """

    def __init__(self, guess: Stack, budget: float, host_budget: float = math.inf, arguments: float = 0.0) -> None:
        self.guess, self.budget, self.host_budget, self.arguments = guess, budget, host_budget, arguments
        self.tried: list[Tried] = []
        self._fitted: dict[tuple[int, float, bool], Stack] = {}

    def learn(self, candidates: Sequence[StepCandidate], compiled: Sequence[Compiled]) -> None:
        """Enter what the compiler said of candidates."""
        expected = [self.expected(one) for one in candidates]
        self.tried += map(Tried, candidates, compiled, expected)

    # --- what was compiled ----------------------------------------------------------------------------------------------

    @property
    def best(self) -> Tried | None:
        """The fastest that was compiled and fits; of equal ones the one that moves nothing, then the one with less memory."""

        # Of equal estimates, the step without any checkpoint is surely no slower.
        def rank(one: Tried) -> tuple[float, bool, bool, int]:
            return one.candidate.seconds, one.candidate.name != "off", one.candidate.host_bytes > 0, one.compiled.device_bytes

        return min(filter(self.fits, self.tried), key=rank, default=None)

    @property
    def smallest(self) -> Tried:
        """The step that needs least, of those that may be run."""
        sound = [one for one in self.tried if one.compiled.sound]
        within = [one for one in sound if one.compiled.host_bytes <= self.host_budget]
        return min(within or sound or self.tried, key=lambda one: one.compiled.device_bytes)

    def fits(self, tried: Tried) -> bool:
        """Whether a compiled step may be run and is within both budgets."""
        found = tried.compiled
        return found.sound and found.device_bytes <= self.budget and found.host_bytes <= self.host_budget

    def known(self, candidate: StepCandidate) -> Tried | None:
        """What the compiler said of a candidate, if it was asked."""
        return next((one for one in self.tried if one.candidate.is_same(candidate)), None)

    @property
    def host_left(self) -> float:
        """What of the host budget is left for activations: the state of an offloaded optimizer counts against it."""
        seen = [one.compiled.host_bytes - one.candidate.host_bytes for one in self.tried if one.compiled.device_bytes < FAILED]
        return max(0.0, self.host_budget - max(0, min(seen, default=0)))

    # --- what that says of others ---------------------------------------------------------------------------------------

    @property
    def stack(self) -> Stack:
        """The stack as all compiled steps show it; `off` is another program and says nothing of it."""
        return self.around(self.budget)

    def around(self, size: float, *, uncut: bool = False) -> Stack:
        """The stack, exact at the compiled step that is nearest to a size. If `uncut`, fit only to one policy per kind."""
        key = len(self.tried), size, uncut
        if key not in self._fitted:
            seen = [
                Seen(one.candidate.loads, one.compiled.device_bytes)
                for one in self.tried
                if one.candidate.name != "off" and not one.candidate.inside and one.compiled.device_bytes < FAILED
                if not (uncut and self.is_cut(one.candidate))
            ]
            self._fitted[key] = fitted(self.guess, seen, size)
        return self._fitted[key]

    def is_cut(self, candidate: StepCandidate) -> bool:
        """Whether layers of one kind follow different policies, or a scan is cut between them."""
        loads = iter(candidate.loads)
        return bool(candidate.cuts) or any(len(set(islice(loads, block.repeats))) > 1 for block in self.guess.blocks)

    def expected(self, candidate: StepCandidate, stack: Stack | None = None) -> int:
        """The device bytes of a candidate: compiled where it was, else predicted."""
        known = self.known(candidate)
        if known is not None:
            return known.compiled.device_bytes
        if candidate.expected_bytes is not None:
            return candidate.expected_bytes
        return round(predicted(stack or self.stack, candidate.loads))

    def least_expected(self, candidate: StepCandidate, stack: Stack | None = None) -> float:
        """The same, less what XLA may recompute by itself under `off`, where there are no checkpoints."""
        expected = float(self.expected(candidate, stack))
        if candidate.name == "off" and self.known(candidate) is None:
            expected -= (1 - _OFF_SHARE) * sum(load.saved for load in candidate.loads)
        return expected

    @property
    def missed(self) -> float:
        """The bytes by which the compiler missed the last plan predicted from compiled steps; infinite where there was none."""
        seen = [one for one in self.tried[_FITTED:] if not one.candidate.name and one.compiled.device_bytes < FAILED]
        return abs(seen[-1].predicted_bytes - seen[-1].compiled.device_bytes) if seen else math.inf

    def is_surely_over(self, candidate: StepCandidate, stack: Stack) -> bool:
        """Whether a candidate that was not compiled needs more than the budget, by twice what predictions have missed."""
        return self.expected(candidate, stack) - self.budget > max(2 * self.missed, _OVER * self.budget)

    def shown(self, candidate: StepCandidate, stack: Stack | None = None) -> int:
        """The same, predicted as exactly as the compiled step of the nearest size allows; `stack` is `self.stack`."""
        known = self.known(candidate)
        if known is not None:
            return known.compiled.device_bytes
        return round(predicted(self.around(predicted(stack or self.stack, candidate.loads)), candidate.loads))

    def may_fit(self, one: StepCandidate) -> bool:
        """Whether its arguments and what it keeps do not exceed the budget; of `off` half, much of which XLA recomputes."""
        share = _OFF_SHARE if one.name == "off" else 1
        return self.arguments + sum(load.saved for load in one.loads) * share <= self.budget
