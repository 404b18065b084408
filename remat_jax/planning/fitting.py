"""What compiled steps say of the memory of others: a stack's fixed bytes and shares, fitted to what was compiled.

A stack says peak = F + (what is kept up to a block) + W + ρ · (recomputed) + φ · (offloaded). The kept bytes are known to the
byte; F, ρ and φ are not, and are refitted to every step that is compiled, with the first guess of ρ and φ as a weak prior.

Of what a layer saves that is a scan by itself, XLA, which takes the loop away, keeps only what it does not make again in
passing. That is a share α of it, which is fitted as well (`docs/notes/cutting_a_scan.md`).

The fit is then shifted so that it is exact at the compiled step that lies nearest to the budget.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from remat_jax.planner import Block, Stack


@dataclass(frozen=True)
class Load:
    """What one block does to memory: bytes that it saves, computes again, and offloads; whether it is a scan by itself."""

    saved: int
    again: int
    away: int
    alone: bool = False


Loads = tuple[Load, ...]
"""Of every single block, in forward order."""

_PRIOR = 0.1
"""The weight of the first guess of the shares beside one compiled step."""
_MOST_RECOMPUTED, _MOST_FETCHED, _MOST_ALONE = 2.0, 4.0, 1.5
_ALONE = 0.7
"""The first guess of the share of layers that are scans by themselves: 0.4 in a deep MLP, 0.9 in GPT-2."""


@dataclass(frozen=True)
class Seen:
    """A step that was compiled: what its blocks do, and its device bytes."""

    loads: Loads
    device_bytes: int


@dataclass(frozen=True)
class Shown(Stack):
    """A stack as compiled steps show it.

    Attributes:
      alone_share: how much of what it saves a layer really keeps that is a scan by itself.
    """

    alone_share: float = _ALONE


@dataclass(frozen=True)
class _Need:
    """What is needed at one block.

    Attributes:
      kept: what is kept up to it, with its working set.
      again, away: what it recomputes and fetches.
      alone: what layers up to it save that are scans by themselves.
      total: all of it, as far as it is taken to be there.
    """

    kept: float
    again: int
    away: int
    alone: int
    total: float


def predicted(stack: Stack, loads: Loads) -> float:
    """The device bytes that a stack expects of such blocks."""
    return stack.fixed_bytes + _at_the_peak(stack, loads).total


def _at_the_peak(stack: Stack, loads: Loads) -> _Need:
    """Where such blocks need most."""
    share = stack.alone_share if isinstance(stack, Shown) else _ALONE
    return max(_needs(stack, loads, share), key=lambda need: need.total)


def _needs(stack: Stack, loads: Loads, share: float) -> Iterator[_Need]:
    kept, alone = 0.0, 0
    for block, load in zip(singles(stack), loads, strict=True):
        kept += block.input_bytes
        if load.alone:
            alone += load.saved
        else:
            kept += load.saved
        here = kept + block.working_bytes
        total = here + block.recomputed_share * load.again + block.fetched_share * load.away + share * alone
        yield _Need(here, load.again, load.away, alone, total)


def singles(stack: Stack) -> list[Block]:
    """Every single block of a stack."""
    return [replace(block, repeats=1) for block in stack.blocks for _ in range(block.repeats)]


def fitted(stack: Stack, seen: Sequence[Seen], budget: float) -> Stack:
    """The stack as the compiled steps show it, exact at the one that is nearest to `budget`.

    >>> from remat_jax.planner import Block, Residual
    >>> stack = Stack((Block("layer", (Residual("x", 8.0, 0.1),), 1.0, 2.0, repeats=3),))
    >>> save, again = (Load(8, 0, 0),) * 3, (Load(0, 8, 0),) * 3
    >>> found = fitted(stack, [Seen(save, 124), Seen(again, 104)], 110.0)
    >>> round(predicted(found, again)), round(predicted(found, save))
    (104, 124)
    """
    if not seen:
        return stack
    found = stack
    for _ in range(2):  # where the peak lies depends on the shares
        found = _shares(stack, found, seen)
    nearest = min(seen, key=lambda one: abs(one.device_bytes - budget))
    return _shifted(found, nearest.device_bytes - predicted(found, nearest.loads))


def _shares(stack: Stack, before: Stack, seen: Sequence[Seen]) -> Stack:
    needs = [_at_the_peak(before, one.loads) for one in seen]
    rows = np.asarray([(1.0, need.again, need.away, need.alone) for need in needs])
    values = [one.device_bytes - need.kept for one, need in zip(seen, needs, strict=True)]
    # A quarter of the time that importing remat_jax took.
    from scipy.optimize import lsq_linear

    scale = np.maximum(np.abs(rows).max(axis=0), 1.0)
    first = stack.blocks[0].recomputed_share, stack.blocks[0].fetched_share, _ALONE
    prior = np.diag([0.0, *(_PRIOR * scale[1:])])
    matrix = np.vstack([rows, prior]) / scale
    wanted = np.concatenate([values, prior @ np.array([0.0, *first])])
    bounds = np.zeros(4), np.array([np.inf, _MOST_RECOMPUTED, _MOST_FETCHED, _MOST_ALONE]) * scale
    fixed, again_share, away_share, alone_share = np.maximum(0.0, lsq_linear(matrix, wanted, bounds).x / scale).tolist()
    blocks = tuple(replace(block, recomputed_share=again_share, fetched_share=away_share) for block in stack.blocks)
    return Shown(blocks, stack.link, fixed, stack.offload_last, alone_share)


def _shifted(stack: Stack, by: float) -> Stack:
    """The stack with so many bytes more, or fewer; what the fixed bytes cannot give, the working sets do."""
    fixed = stack.fixed_bytes + by
    if fixed >= 0:
        return replace(stack, fixed_bytes=fixed)
    blocks = tuple(replace(block, working_bytes=max(0.0, block.working_bytes + fixed)) for block in stack.blocks)
    return replace(stack, blocks=blocks, fixed_bytes=0.0)
