"""The compiled steps of one search: which fit, which is best, and the memory that they predict for other candidates."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import islice

from remat_jax.planning.candidate import FAILED, Compiled, StepCandidate, Tried
from remat_jax.planning.fitting import Seen, fitted, predicted
from remat_jax.solver import Stack

_FITTED = 2
"""The number of compiled steps from which predictions are more than a guess."""
_OVER = 0.01
"""The least excess of a prediction over the budget, as a share of the budget, that proves a candidate too large."""

_OFF_SHARE = 0.5
"""The least share of the kept bytes that `off` may need, since XLA rematerialises by itself: 0.55 was observed."""


class Fit:
    """The compiled steps, and the stack fitted to them.

    Args:
      guess: the stack as described before any compilation.
      budget, host_budget: in bytes; the host budget may be infinite.
      arguments: the bytes of the step's arguments, which are on the device under every policy.
    """

    def __init__(self, guess: Stack, budget: float, host_budget: float = math.inf, arguments: float = 0.0) -> None:
        self.guess, self.budget, self.host_budget, self.arguments = guess, budget, host_budget, arguments
        self.tried: list[Tried] = []
        self._fitted: dict[tuple[int, float, bool], Stack] = {}

    def learn(self, candidates: Sequence[StepCandidate], compiled: Sequence[Compiled]) -> None:
        """Add compiled candidates."""
        expected = [self.expected(one) for one in candidates]
        self.tried += map(Tried, candidates, compiled, expected)

    # --- what was compiled ----------------------------------------------------------------------------------------------

    @property
    def best(self) -> Tried | None:
        """The fastest compiled step that fits; on ties a step without offload, then the step with less memory."""

        # At equal estimates, the step without any checkpoint is surely no slower.
        def rank(one: Tried) -> tuple[float, bool, bool, int]:
            return one.candidate.seconds, one.candidate.name != "off", one.candidate.host_bytes > 0, one.compiled.device_bytes

        return min(filter(self.fits, self.tried), key=rank, default=None)

    @property
    def smallest(self) -> Tried:
        """The sound step with the least device memory."""
        sound = [one for one in self.tried if one.compiled.sound]
        within = [one for one in sound if one.compiled.host_bytes <= self.host_budget]
        return min(within or sound or self.tried, key=lambda one: one.compiled.device_bytes)

    def fits(self, tried: Tried) -> bool:
        """Whether a compiled step may be run and is within both budgets."""
        found = tried.compiled
        return found.sound and found.device_bytes <= self.budget and found.host_bytes <= self.host_budget

    def known(self, candidate: StepCandidate) -> Tried | None:
        """The compiled step of a candidate; None if it was not compiled."""
        return next((one for one in self.tried if one.candidate.is_same(candidate)), None)

    @property
    def host_left(self) -> float:
        """The host budget left for activations, less the state of an offloaded optimizer."""
        seen = [one.compiled.host_bytes - one.candidate.host_bytes for one in self.tried if one.compiled.device_bytes < FAILED]
        return max(0.0, self.host_budget - max(0, min(seen, default=0)))

    # --- predictions for other candidates -------------------------------------------------------------------------------

    @property
    def stack(self) -> Stack:
        """The stack fitted to all compiled steps except `off`, which is a different program."""
        return self.around(self.budget)

    def around(self, size: float, *, uncut: bool = False) -> Stack:
        """The stack, exact at the compiled step nearest to `size`. If `uncut`, fit only to steps with one policy per kind."""
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
        """The device bytes of a candidate, compiled if known, else predicted."""
        known = self.known(candidate)
        if known is not None:
            return known.compiled.device_bytes
        if candidate.expected_bytes is not None:
            return candidate.expected_bytes
        return round(predicted(stack or self.stack, candidate.loads))

    def least_expected(self, candidate: StepCandidate, stack: Stack | None = None) -> float:
        """The expected bytes, less the residuals that XLA may rematerialise by itself under `off`."""
        expected = float(self.expected(candidate, stack))
        if candidate.name == "off" and self.known(candidate) is None:
            expected -= (1 - _OFF_SHARE) * sum(load.saved for load in candidate.loads)
        return expected

    @property
    def missed(self) -> float:
        """The error in bytes of the last prediction from compiled steps; infinite if there was none."""
        seen = [one for one in self.tried[_FITTED:] if not one.candidate.name and one.compiled.device_bytes < FAILED]
        return abs(seen[-1].predicted_bytes - seen[-1].compiled.device_bytes) if seen else math.inf

    def is_surely_over(self, candidate: StepCandidate, stack: Stack) -> bool:
        """Whether an uncompiled candidate is predicted over the budget by more than twice the prediction error."""
        return self.expected(candidate, stack) - self.budget > max(2 * self.missed, _OVER * self.budget)

    def shown(self, candidate: StepCandidate, stack: Stack | None = None) -> int:
        """The expected bytes, predicted from the compiled step of the nearest size; `stack` is `self.stack`."""
        known = self.known(candidate)
        if known is not None:
            return known.compiled.device_bytes
        return round(predicted(self.around(predicted(stack or self.stack, candidate.loads)), candidate.loads))

    def may_fit(self, one: StepCandidate) -> bool:
        """Whether the arguments and the kept bytes are within the budget; half of `off`'s, since XLA rematerialises much."""
        share = _OFF_SHARE if one.name == "off" else 1
        return self.arguments + sum(load.saved for load in one.loads) * share <= self.budget
