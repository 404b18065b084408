"""Predict memory from compiled steps: fit a stack's fixed bytes and shares to them.

A stack predicts peak = F + (bytes kept up to a block) + W + ρ · (recomputed) + φ · (offloaded). The kept bytes are exact.
F, ρ and φ are refitted after every compilation, with the first guess of ρ and φ as a weak prior. The fit is then shifted to
be exact at the compiled step nearest to the budget.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from remat_jax.solver import Block, Stack


@dataclass(frozen=True)
class Load:
    """The bytes that one block saves, recomputes and offloads."""

    saved: int
    again: int
    away: int


Loads = tuple[Load, ...]
"""The load of every single block, in forward order."""

_PRIOR = 0.1
"""The weight of the first guess of the shares, relative to one compiled step."""
_MOST_RECOMPUTED, _MOST_FETCHED = 2.0, 4.0
_STARTS = ((0.5, 2.0), (1.0, 4.0))
"""Starting shares of the fit, beside the first guess."""
_ROUNDS = 8


@dataclass(frozen=True)
class Seen:
    """The loads and the device bytes of a compiled step."""

    loads: Loads
    device_bytes: int


def predicted(stack: Stack, loads: Loads) -> float:
    """The device bytes that a stack predicts for blocks with these loads."""
    return stack.fixed_bytes + max(kept + again + away for kept, again, away, _ in _needs(stack, loads))


def _needs(stack: Stack, loads: Loads) -> Iterator[tuple[float, float, float, Load]]:
    """At each block: the bytes kept up to it with its working set, its recomputed and fetched shares, and its load."""
    kept = 0.0
    for block, load in zip(singles(stack), loads, strict=True):
        kept += block.input_bytes + load.saved
        yield kept + block.working_bytes, block.recomputed_share * load.again, block.fetched_share * load.away, load


def singles(stack: Stack) -> list[Block]:
    """The block of every single layer."""
    return [block for block in stack.blocks for _ in range(block.repeats)]


def fitted(stack: Stack, seen: Sequence[Seen], budget: float) -> Stack:
    """The stack fitted to the compiled steps, exact at the step nearest to `budget`.

    >>> from remat_jax.solver import Block, ResidualCosts
    >>> stack = Stack((Block("layer", (ResidualCosts("x", 8.0, 0.1),), 1.0, 2.0, repeats=3),))
    >>> save, again = (Load(8, 0, 0),) * 3, (Load(0, 8, 0),) * 3
    >>> found = fitted(stack, [Seen(save, 124), Seen(again, 104)], 110.0)
    >>> round(predicted(found, again)), round(predicted(found, save))
    (104, 124)
    """
    if not seen:
        return stack
    # The position of the peak depends on the shares: a share that is too small hides the blocks that would correct it.
    fits = [_settled(stack, _with_shares(stack, *start), seen) for start in ((*_first(stack),), *_STARTS)]
    found = min(fits, key=lambda one: _misfit(stack, one, seen))
    nearest = min(seen, key=lambda one: abs(one.device_bytes - budget))
    return _shifted(found, nearest.device_bytes - predicted(found, nearest.loads))


def _settled(guess: Stack, start: Stack, seen: Sequence[Seen]) -> Stack:
    """Fit the shares to the peaks' positions, then find the positions again, in turns."""
    found, peaks = start, None
    for _ in range(_ROUNDS):
        before, peaks = peaks, [_at_the_peak(found, one.loads) for one in seen]
        if peaks == before:
            break
        found = _shares(guess, peaks, seen)
    return found


def _shares(guess: Stack, peaks: Sequence[tuple[float, int, int]], seen: Sequence[Seen]) -> Stack:
    rows = [(1.0, again, away) for _, again, away in peaks]
    values = [one.device_bytes - kept for one, (kept, _, _) in zip(seen, peaks, strict=True)]
    # Imported here: it took a quarter of the import time of remat_jax.
    from scipy.optimize import lsq_linear

    scale = np.maximum(np.abs(np.asarray(rows)).max(axis=0), 1.0)
    prior = np.diag([0.0, _PRIOR * scale[1], _PRIOR * scale[2]])
    matrix = np.vstack([np.asarray(rows), prior]) / scale
    wanted = np.concatenate([values, prior @ np.array([0.0, *_first(guess)])])
    bounds = np.array([0.0, 0.0, 0.0]), np.array([np.inf, _MOST_RECOMPUTED, _MOST_FETCHED]) * scale
    fixed, again_share, away_share = lsq_linear(matrix, wanted, bounds, method="bvls").x / scale
    return replace(
        _with_shares(guess, max(0.0, float(again_share)), max(0.0, float(away_share))), fixed_bytes=max(0.0, float(fixed))
    )


def _first(stack: Stack) -> tuple[float, float]:
    return stack.blocks[0].recomputed_share, stack.blocks[0].fetched_share


def _with_shares(stack: Stack, recomputed: float, fetched: float) -> Stack:
    blocks = (replace(block, recomputed_share=recomputed, fetched_share=fetched) for block in stack.blocks)
    return replace(stack, blocks=tuple(blocks))


def _misfit(guess: Stack, found: Stack, seen: Sequence[Seen]) -> float:
    """The squared errors at the compiled steps, plus the squared differences of the shares from the first guess."""
    missed = [predicted(found, one.loads) - one.device_bytes for one in seen]
    weights = (max(load.again for one in seen for load in one.loads), max(load.away for one in seen for load in one.loads))
    pairs = zip(weights, _first(found), _first(guess), strict=True)
    missed += [_PRIOR * weight * (share - first) for weight, share, first in pairs]
    return sum(one * one for one in missed)


def _at_the_peak(stack: Stack, loads: Loads) -> tuple[float, int, int]:
    """At the block with the peak: the kept bytes with the working set, the recomputed bytes, and the offloaded bytes."""
    kept, _, _, load = max(_needs(stack, loads), key=lambda one: sum(one[:3]))
    return kept, load.again, load.away


def _shifted(stack: Stack, by: float) -> Stack:
    """The stack with `by` bytes more or fewer: taken from the fixed bytes first, then from the working sets."""
    fixed = stack.fixed_bytes + by
    if fixed >= 0:
        return replace(stack, fixed_bytes=fixed)
    blocks = tuple(replace(block, working_bytes=max(0.0, block.working_bytes + fixed)) for block in stack.blocks)
    return replace(stack, blocks=blocks, fixed_bytes=0.0)
