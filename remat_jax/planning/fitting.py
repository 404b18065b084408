"""What compiled steps say of the memory of others: a stack's fixed bytes and shares, fitted to what was compiled.

A stack says peak = F + (what is kept up to a block) + W + ρ · (recomputed) + φ · (offloaded). The kept bytes are known to the
byte; F, ρ and φ are not, and are refitted to every step that is compiled, with the first guess of ρ and φ as a weak prior.
The fit is then shifted so that it is exact at the compiled step that lies nearest to the budget.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from remat_jax.solver import Block, Stack


@dataclass(frozen=True)
class Load:
    """What one block does to memory: bytes that it saves, computes again, and offloads."""

    saved: int
    again: int
    away: int


Loads = tuple[Load, ...]
"""Of every single block, in forward order."""

_PRIOR = 0.1
"""The weight of the first guess of the shares beside one compiled step."""
_MOST_RECOMPUTED, _MOST_FETCHED = 2.0, 4.0
_STARTS = ((0.5, 2.0), (1.0, 4.0))
"""Shares that a fit is begun with, beside the first guess."""
_ROUNDS = 8


@dataclass(frozen=True)
class Seen:
    """A step that was compiled: what its blocks do, and its device bytes."""

    loads: Loads
    device_bytes: int


def predicted(stack: Stack, loads: Loads) -> float:
    """The device bytes that a stack expects of such blocks."""
    return stack.fixed_bytes + max(kept + again + away for kept, again, away, _ in _needs(stack, loads))


def _needs(stack: Stack, loads: Loads) -> Iterator[tuple[float, float, float, Load]]:
    """At each block: what is kept up to it with its working set, its shares of what it recomputes and fetches, its load."""
    kept = 0.0
    for block, load in zip(singles(stack), loads, strict=True):
        kept += block.input_bytes + load.saved
        yield kept + block.working_bytes, block.recomputed_share * load.again, block.fetched_share * load.away, load


def singles(stack: Stack) -> list[Block]:
    """The block of every single layer."""
    return [block for block in stack.blocks for _ in range(block.repeats)]


def fitted(stack: Stack, seen: Sequence[Seen], budget: float) -> Stack:
    """The stack as the compiled steps show it, exact at the one that is nearest to `budget`.

    >>> from remat_jax.solver import Block, ResidualCosts
    >>> stack = Stack((Block("layer", (ResidualCosts("x", 8.0, 0.1),), 1.0, 2.0, repeats=3),))
    >>> save, again = (Load(8, 0, 0),) * 3, (Load(0, 8, 0),) * 3
    >>> found = fitted(stack, [Seen(save, 124), Seen(again, 104)], 110.0)
    >>> round(predicted(found, again)), round(predicted(found, save))
    (104, 124)
    """
    if not seen:
        return stack
    # Where the peak lies depends on the shares: one that is too small hides the blocks that would show it.
    fits = [_settled(stack, _with_shares(stack, *start), seen) for start in ((*_first(stack),), *_STARTS)]
    found = min(fits, key=lambda one: _misfit(stack, one, seen))
    nearest = min(seen, key=lambda one: abs(one.device_bytes - budget))
    return _shifted(found, nearest.device_bytes - predicted(found, nearest.loads))


def _settled(guess: Stack, start: Stack, seen: Sequence[Seen]) -> Stack:
    """The shares fitted to where the peaks lie, and these found again by the shares."""
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
    # A quarter of the time that importing remat_jax took.
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
    """The squares of what a fit misses the compiled steps by, and of what its shares differ from the first guess."""
    missed = [predicted(found, one.loads) - one.device_bytes for one in seen]
    weights = (max(load.again for one in seen for load in one.loads), max(load.away for one in seen for load in one.loads))
    pairs = zip(weights, _first(found), _first(guess), strict=True)
    missed += [_PRIOR * weight * (share - first) for weight, share, first in pairs]
    return sum(one * one for one in missed)


def _at_the_peak(stack: Stack, loads: Loads) -> tuple[float, int, int]:
    """Where such blocks need most: what is kept with the working set, what is recomputed there, and what was offloaded."""
    kept, _, _, load = max(_needs(stack, loads), key=lambda one: sum(one[:3]))
    return kept, load.again, load.away


def _shifted(stack: Stack, by: float) -> Stack:
    """The stack with so many bytes more, or fewer; what the fixed bytes cannot give, the working sets do."""
    fixed = stack.fixed_bytes + by
    if fixed >= 0:
        return replace(stack, fixed_bytes=fixed)
    blocks = tuple(replace(block, working_bytes=max(0.0, block.working_bytes + fixed)) for block in stack.blocks)
    return replace(stack, blocks=blocks, fixed_bytes=0.0)
