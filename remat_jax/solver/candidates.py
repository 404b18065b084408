"""All Pareto-optimal policies of one block, enumerated residual by residual; dominated partial policies are pruned."""

from __future__ import annotations

import numpy as np

from remat_jax.solver.problem import Block, Choice
from remat_jax.solver.table import CHOICES, OFFLOAD, RECOMPUTE, SAVE, UNUSED, Array


def unbeaten(points: Array) -> list[int]:
    """The indices of the Pareto-optimal rows of ``points``, in lexicographic order; of equal rows, only the first.

    >>> unbeaten(np.array([[2.0, 1.0], [1.0, 2.0], [2.0, 2.0], [1.0, 2.0]]))
    [1, 0]
    """
    remaining = np.lexsort(tuple(points.T[::-1]))
    optimal = []
    while remaining.size:
        # In lexicographic order, no later row dominates the first row, unless it is equal.
        first = remaining[0]
        optimal.append(int(first))
        remaining = remaining[(points[remaining] < points[first]).any(axis=1)]
    return optimal


def grow(block: Block, offloads: bool, most: int) -> Array | None:
    """The codes of all Pareto-optimal policies, shape (policies, residuals); None if there are over ``most`` partial policies.

    The objectives are: bytes saved, bytes that the block needs during its own backward pass, bytes in host memory, and extra
    seconds. Each objective is monotone in four sums over the residuals: bytes saved, needed and offloaded, and seconds of
    keeping and recomputing. So a partial policy is pruned if another partial policy is no larger in any sum, and if both
    leave the same parents of undecided residuals unused.

    >>> from remat_jax.solver.problem import ResidualCosts
    >>> block = Block("layer", (ResidualCosts("x", 8.0), ResidualCosts("up", 32.0, 0.5, parents=("x",))), 1.0, 2.0)
    >>> sorted(grow(block, offloads=False, most=100).tolist())  # of x and up: 0 saved, 2 recomputed
    [[0, 0], [0, 2]]
    """
    open_until = _last_uses(block)
    codes = np.zeros((1, len(block.residuals)), np.int8)
    # Columns: bytes saved, bytes needed during the backward pass, bytes offloaded, seconds of keeping and recomputing.
    sums = np.zeros((1, 4))
    for step, index in enumerate(block.order):
        choices = [choice for choice in block.residuals[index].choices if offloads or choice is not Choice.OFFLOAD]
        grown = [_choose(block, index, CHOICES.index(choice), codes, sums) for choice in choices]
        codes, sums = (np.concatenate(parts) for parts in zip(*grown, strict=True))
        visible = [residual for residual in block.order[: step + 1] if open_until[residual] > step]
        kept = _unbeaten_in_groups(codes[:, visible] == UNUSED, sums)
        if len(kept) > most:
            return None
        codes, sums = codes[kept], sums[kept]
    return codes


def _choose(block: Block, index: int, code: int, codes: Array, sums: Array) -> tuple[Array, Array]:
    """The partial policies and sums after one more choice; a policy that would recompute from an unused parent is dropped."""
    if code == RECOMPUTE:
        legal = (codes[:, list(block.parents[index])] != UNUSED).all(axis=1)
        codes, sums = codes[legal], sums[legal]
    codes = codes.copy()
    codes[:, index] = code
    residual = block.residuals[index]
    fetched, recomputed = block.fetched_share * residual.bytes, block.recomputed_share * residual.bytes
    added = {
        SAVE: (residual.bytes, residual.bytes, 0.0, residual.kept_seconds),
        OFFLOAD: (0.0, fetched, residual.bytes, residual.kept_seconds),
        RECOMPUTE: (0.0, recomputed, 0.0, residual.seconds or 0.0),
        UNUSED: (0.0, 0.0, 0.0, 0.0),
    }
    return codes, sums + added[code]


def _last_uses(block: Block) -> list[int]:
    """For each residual, the place in `Block.order` of its last child; -1 if it has no child or the backward pass reads it."""
    last_use = [-1] * len(block.residuals)
    for step, index in enumerate(block.order):
        for parent in block.parents[index]:
            if not block.residuals[parent].needed:
                last_use[parent] = step
    return last_use


def _unbeaten_in_groups(flags: Array, sums: Array) -> list[int]:
    """The indices of the rows of ``sums`` that are Pareto-optimal among the rows with equal ``flags``."""
    _, groups = np.unique(flags, axis=0, return_inverse=True)
    optimal: list[int] = []
    for group in range(int(groups.max()) + 1):
        rows = np.flatnonzero(groups.ravel() == group)
        optimal += [int(rows[index]) for index in unbeaten(sums[rows])]
    return optimal
