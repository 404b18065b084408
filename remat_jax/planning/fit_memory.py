"""The memory that compiled steps predict for other candidates: a stack's fixed bytes and shares are fitted to them.

A stack predicts peak = F + (bytes kept up to a block) + W + ρ · (recomputed) + φ · (offloaded). The kept bytes are exact.
F, ρ and φ are refitted after every compilation, with the first guess of ρ and φ as a weak prior. The fit is then shifted to
be exact at the compiled step nearest to the budget.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice

import numpy as np

from remat_jax.planning.candidate import FAILED, Compiled, Load, Loads, StepCandidate, Tried, singles
from remat_jax.solver import Stack

_PRIOR = 0.1
"""The weight of the first guess of the shares, relative to one compiled step."""
_MOST_RECOMPUTED, _MOST_FETCHED = 2.0, 4.0
_STARTS = ((0.5, 2.0), (1.0, 4.0))
"""Starting shares of the fit, beside the first guess."""
_ROUNDS = 8

_FITTED = 2
"""The number of compiled steps from which predictions are more than a guess."""
_OVER = 0.01
"""The least excess of a prediction over the budget, as a share of the budget, that proves a candidate too large."""
_OFF_SHARE = 0.5
"""The least share of the kept bytes that `off` may need, since XLA rematerialises by itself: 0.55 was observed."""

Measured = tuple[Loads, int]
"""The loads and the device bytes of a compiled step."""


class Fit:
    """The compiled steps of one search, and the stack fitted to them.

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
        expected = [self.expected(candidate) for candidate in candidates]
        self.tried += map(Tried, candidates, compiled, expected)

    @property
    def best(self) -> Tried | None:
        """The fastest compiled step that fits; on ties a step without offload, then the step with less memory."""

        # At equal estimates, the step without any checkpoint is surely no slower.
        def rank(one: Tried) -> tuple[float, bool, bool, int]:
            return one.candidate.seconds, one.candidate.name != "off", one.candidate.host_bytes > 0, one.compiled.device_bytes

        return min(filter(self.fits, self.tried), key=rank, default=None)

    @property
    def smallest(self) -> Tried:
        """The sound step with the least device memory, within the host budget if any is."""
        sound = [one for one in self.tried if one.compiled.sound]
        within = [one for one in sound if one.compiled.host_bytes <= self.host_budget]
        return min(within or sound or self.tried, key=lambda one: one.compiled.device_bytes)

    def fits(self, tried: Tried) -> bool:
        """Whether a compiled step may be run and is within both budgets."""
        compiled = tried.compiled
        return compiled.sound and compiled.device_bytes <= self.budget and compiled.host_bytes <= self.host_budget

    def known(self, candidate: StepCandidate) -> Tried | None:
        """The compiled step of a candidate; None if it was not compiled."""
        return next((one for one in self.tried if one.candidate.is_same(candidate)), None)

    @property
    def host_left(self) -> float:
        """The host budget left for activations, less the state of an offloaded optimizer."""
        others = [one.compiled.host_bytes - one.candidate.host_bytes for one in self._compiled]
        return max(0.0, self.host_budget - max(0, min(others, default=0)))

    @property
    def _compiled(self) -> list[Tried]:
        return [one for one in self.tried if one.compiled.device_bytes < FAILED]

    @property
    def stack(self) -> Stack:
        """The stack fitted to all compiled steps except `off`, which is a different program."""
        return self.around(self.budget)

    def around(self, size: float, *, uncut: bool = False) -> Stack:
        """The stack, exact at the compiled step nearest to `size`. If `uncut`, fit only to steps with one policy per kind."""
        key = len(self.tried), size, uncut
        if key not in self._fitted:
            steps = [
                (one.candidate.loads, one.compiled.device_bytes)
                for one in self._compiled
                if one.candidate.name != "off" and not one.candidate.inside and not (uncut and self.is_cut(one.candidate))
            ]
            self._fitted[key] = fitted(self.guess, steps, size)
        return self._fitted[key]

    def is_cut(self, candidate: StepCandidate) -> bool:
        """Whether layers of one kind follow different policies, or a scan is cut between them."""
        loads = iter(candidate.loads)
        return bool(candidate.cuts) or any(len(set(islice(loads, block.repeats))) > 1 for block in self.guess.blocks)

    def expected(self, candidate: StepCandidate) -> int:
        """The device bytes of a candidate, compiled if known, else predicted."""
        if (tried := self.known(candidate)) is not None:
            return tried.compiled.device_bytes
        if candidate.expected_bytes is not None:
            return candidate.expected_bytes
        return round(predicted(self.stack, candidate.loads))

    def least_expected(self, candidate: StepCandidate) -> float:
        """The expected bytes, less the residuals that XLA may rematerialise by itself under `off`."""
        expected = float(self.expected(candidate))
        if candidate.name == "off" and self.known(candidate) is None:
            expected -= (1 - _OFF_SHARE) * sum(load.saved for load in candidate.loads)
        return expected

    def shown(self, candidate: StepCandidate) -> int:
        """The expected bytes, predicted from the compiled step of the nearest size."""
        if (tried := self.known(candidate)) is not None:
            return tried.compiled.device_bytes
        return round(predicted(self.around(predicted(self.stack, candidate.loads)), candidate.loads))

    @property
    def missed(self) -> float:
        """The error in bytes of the last prediction from compiled steps; infinite if there was none."""
        plans = [one for one in self.tried[_FITTED:] if not one.candidate.name and one.compiled.device_bytes < FAILED]
        return abs(plans[-1].predicted_bytes - plans[-1].compiled.device_bytes) if plans else math.inf

    def is_surely_over(self, candidate: StepCandidate, stack: Stack) -> bool:
        """Whether `stack` predicts a candidate over the budget by more than twice the prediction error."""
        return round(predicted(stack, candidate.loads)) - self.budget > max(2 * self.missed, _OVER * self.budget)

    def may_fit(self, candidate: StepCandidate) -> bool:
        """Whether the arguments and the kept bytes are within the budget; half of `off`'s, since XLA rematerialises much."""
        share = _OFF_SHARE if candidate.name == "off" else 1
        return self.arguments + sum(load.saved for load in candidate.loads) * share <= self.budget


def predicted(stack: Stack, loads: Loads) -> float:
    """The device bytes that a stack predicts for blocks with these loads."""
    return stack.fixed_bytes + max(kept + recomputed + fetched for kept, recomputed, fetched, _ in _needs(stack, loads))


def _needs(stack: Stack, loads: Loads) -> Iterator[tuple[float, float, float, Load]]:
    """At each block: the bytes kept up to it with its working set, its recomputed and fetched shares, and its load."""
    kept = 0.0
    for block, load in zip(singles(stack), loads, strict=True):
        kept += block.input_bytes + load.saved
        yield kept + block.working_bytes, block.recomputed_share * load.recomputed, block.fetched_share * load.offloaded, load


def fitted(stack: Stack, steps: Sequence[Measured], budget: float) -> Stack:
    """The stack fitted to the compiled steps, exact at the step nearest to `budget`.

    >>> from remat_jax.solver import Block, ResidualCosts
    >>> stack = Stack((Block("layer", (ResidualCosts("x", 8.0, 0.1),), 1.0, 2.0, repeats=3),))
    >>> save, recompute = (Load(8, 0, 0),) * 3, (Load(0, 8, 0),) * 3
    >>> exact = fitted(stack, [(save, 124), (recompute, 104)], 110.0)
    >>> round(predicted(exact, recompute)), round(predicted(exact, save))
    (104, 124)
    """
    if not steps:
        return stack
    # The position of the peak depends on the shares: a share that is too small hides the blocks that would correct it.
    fits = [_settled(stack, _with_shares(stack, *start), steps) for start in (_shares(stack), *_STARTS)]
    fit = min(fits, key=lambda one: _misfit(stack, one, steps))
    loads, device_bytes = min(steps, key=lambda step: abs(step[1] - budget))
    return _shifted(fit, device_bytes - predicted(fit, loads))


def _settled(guess: Stack, start: Stack, steps: Sequence[Measured]) -> Stack:
    """Fit the shares to the peaks' positions, then find the positions again, in turns."""
    stack, peaks = start, None
    for _ in range(_ROUNDS):
        before, peaks = peaks, [_at_the_peak(stack, loads) for loads, _ in steps]
        if peaks == before:
            break
        stack = _fit_to_peaks(guess, peaks, steps)
    return stack


def _fit_to_peaks(guess: Stack, peaks: Sequence[tuple[float, int, int]], steps: Sequence[Measured]) -> Stack:
    rows = np.asarray([(1.0, recomputed, offloaded) for _, recomputed, offloaded in peaks])
    values = [device_bytes - kept for (_, device_bytes), (kept, _, _) in zip(steps, peaks, strict=True)]
    # Imported here: it took a quarter of the import time of remat_jax.
    from scipy.optimize import lsq_linear

    scale = np.maximum(np.abs(rows).max(axis=0), 1.0)
    prior = np.diag([0.0, _PRIOR * scale[1], _PRIOR * scale[2]])
    matrix = np.vstack([rows, prior]) / scale
    wanted = np.concatenate([values, prior @ np.array([0.0, *_shares(guess)])])
    bounds = np.array([0.0, 0.0, 0.0]), np.array([np.inf, _MOST_RECOMPUTED, _MOST_FETCHED]) * scale
    solution = lsq_linear(matrix, wanted, bounds, method="bvls").x / scale
    fixed, recomputed, fetched = (max(0.0, float(value)) for value in solution)
    return replace(_with_shares(guess, recomputed, fetched), fixed_bytes=fixed)


def _shares(stack: Stack) -> tuple[float, float]:
    return stack.blocks[0].recomputed_share, stack.blocks[0].fetched_share


def _with_shares(stack: Stack, recomputed: float, fetched: float) -> Stack:
    blocks = (replace(block, recomputed_share=recomputed, fetched_share=fetched) for block in stack.blocks)
    return replace(stack, blocks=tuple(blocks))


def _misfit(guess: Stack, fit: Stack, steps: Sequence[Measured]) -> float:
    """The squared errors at the compiled steps, plus the squared differences of the shares from the first guess."""
    errors = [predicted(fit, loads) - device_bytes for loads, device_bytes in steps]
    each = [load for loads, _ in steps for load in loads]
    weights = max(load.recomputed for load in each), max(load.offloaded for load in each)
    shares = zip(weights, _shares(fit), _shares(guess), strict=True)
    errors += [_PRIOR * weight * (share - first) for weight, share, first in shares]
    return sum(error * error for error in errors)


def _at_the_peak(stack: Stack, loads: Loads) -> tuple[float, int, int]:
    """At the block with the peak: the kept bytes with the working set, the recomputed bytes, and the offloaded bytes."""
    kept, _, _, load = max(_needs(stack, loads), key=lambda needs: sum(needs[:3]))
    return kept, load.recomputed, load.offloaded


def _shifted(stack: Stack, by: float) -> Stack:
    """The stack with `by` bytes more or fewer: taken from the fixed bytes first, then from the working sets."""
    fixed = stack.fixed_bytes + by
    if fixed >= 0:
        return replace(stack, fixed_bytes=fixed)
    blocks = tuple(replace(block, working_bytes=max(0.0, block.working_bytes + fixed)) for block in stack.blocks)
    return replace(stack, blocks=blocks, fixed_bytes=0.0)
