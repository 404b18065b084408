"""What compiled steps say of the memory of others: a stack's fixed bytes and shares, fitted to what was compiled.

A stack says peak = F + (what is kept up to a block) + W + ρ · (recomputed) + φ · (offloaded). The kept bytes are known to the
byte; F, ρ and φ are not, and are refitted to every step that is compiled, with the first guess of ρ and φ as a weak prior.
The fit is then shifted so that it is exact at the compiled step that lies nearest to the budget.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.optimize import lsq_linear

from remat_jax.planner import BlockPolicy, Choice, Stack
from remat_jax.planner.policies import peak_bytes

Choices = tuple[tuple[Choice, ...], ...]
"""Of every single block in forward order, what it does with its residuals."""

_PRIOR = 0.1
"""The weight of the first guess of the shares beside one compiled step."""
_MOST_RECOMPUTED, _MOST_FETCHED = 2.0, 4.0


@dataclass(frozen=True)
class Seen:
    """A step that was compiled: what its blocks do, and its device bytes."""

    choices: Choices
    device_bytes: int


def predicted(stack: Stack, choices: Choices) -> float:
    """The device bytes that a stack expects of such blocks."""
    return peak_bytes(stack, block_policies(stack, choices))


def block_policies(stack: Stack, choices: Choices) -> list[BlockPolicy]:
    """What every single block of a stack does."""
    able = [replace(block, repeats=1) for block in stack.blocks for _ in range(block.repeats)]
    return [BlockPolicy(block, chosen) for block, chosen in zip(able, choices, strict=True)]


def fitted(stack: Stack, seen: Sequence[Seen], budget: float) -> Stack:
    """The stack as the compiled steps show it, exact at the one that is nearest to `budget`.

    >>> from remat_jax.planner import Block, Residual
    >>> stack = Stack((Block("layer", (Residual("x", 8.0, 0.1),), 1.0, 2.0, repeats=3),))
    >>> save, again = (Choice.SAVE,), (Choice.RECOMPUTE,)
    >>> found = fitted(stack, [Seen((save,) * 3, 124), Seen((again,) * 3, 104)], 110.0)
    >>> predicted(found, (again,) * 3), round(predicted(found, (save,) * 3))
    (104.0, 124)
    """
    if not seen:
        return stack
    found = stack
    for _ in range(2):  # where the peak lies depends on the shares
        found = _shares(stack, found, seen)
    nearest = min(seen, key=lambda one: abs(one.device_bytes - budget))
    return _shifted(found, nearest.device_bytes - predicted(found, nearest.choices))


def _shares(stack: Stack, before: Stack, seen: Sequence[Seen]) -> Stack:
    rows, values = [], []
    for one in seen:
        kept, again, away = _at_the_peak(before, one.choices)
        rows.append((1.0, again, away))
        values.append(one.device_bytes - kept)
    scale = np.maximum(np.abs(np.asarray(rows)).max(axis=0), 1.0)
    first = stack.blocks[0].recomputed_share, stack.blocks[0].fetched_share
    prior = np.diag([0.0, _PRIOR * scale[1], _PRIOR * scale[2]])
    matrix = np.vstack([np.asarray(rows), prior]) / scale
    wanted = np.concatenate([values, prior @ np.array([0.0, *first])])
    bounds = np.array([0.0, 0.0, 0.0]), np.array([np.inf, _MOST_RECOMPUTED, _MOST_FETCHED]) * scale
    fixed, again_share, away_share = lsq_linear(matrix, wanted, bounds).x / scale
    blocks = tuple(
        replace(block, recomputed_share=max(0.0, float(again_share)), fetched_share=max(0.0, float(away_share)))
        for block in stack.blocks
    )
    return replace(stack, blocks=blocks, fixed_bytes=max(0.0, float(fixed)))


def _at_the_peak(stack: Stack, choices: Choices) -> tuple[float, float, float]:
    """Where such blocks need most: what is kept with the working set, what is recomputed there, and what was offloaded."""
    kept, most, found = 0.0, -1.0, (0.0, 0.0, 0.0)
    for policy in block_policies(stack, choices):
        kept += policy.saved_bytes
        if kept + policy.transient_bytes > most:
            most = kept + policy.transient_bytes
            pairs = list(zip(policy.block.residuals, policy.choices, strict=True))
            again = sum(one.bytes for one, choice in pairs if choice is Choice.RECOMPUTE)
            found = kept + policy.block.working_bytes, again, policy.host_bytes
    return found


def _shifted(stack: Stack, by: float) -> Stack:
    """The stack with so many bytes more, or fewer; what the fixed bytes cannot give, the working sets do."""
    fixed = stack.fixed_bytes + by
    if fixed >= 0:
        return replace(stack, fixed_bytes=fixed)
    blocks = tuple(replace(block, working_bytes=max(0.0, block.working_bytes + fixed)) for block in stack.blocks)
    return replace(stack, blocks=blocks, fixed_bytes=0.0)
