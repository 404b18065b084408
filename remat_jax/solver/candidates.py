"""All policies of one block that could be part of an optimal plan, enumerated residual by residual with pruning."""

from __future__ import annotations

from typing import Any

from remat_jax.solver.policies import Choice
from remat_jax.solver.problem import Block, ResidualCosts

MOST = 3000
"""The most partial policies that the enumeration keeps."""

_CHOICES = tuple(Choice)


def unbeaten(points: Any) -> list[int]:
    """The Pareto-optimal rows (no other row is at most equal in every column), lexicographically; the first of equal rows.

    >>> import numpy as np
    >>> unbeaten(np.array([[2.0, 1.0], [1.0, 2.0], [2.0, 2.0], [1.0, 2.0]]))
    [1, 0]
    """
    import numpy as np

    remaining = np.lexsort(tuple(points.T[::-1]))
    optimal = []
    while remaining.size:
        # In this order no later row dominates the first, unless it is equal.
        first = remaining[0]
        optimal.append(int(first))
        remaining = remaining[(points[remaining] < points[first]).any(axis=1)]
    return optimal


def grow(block: Block, offloads: bool, most: int = MOST) -> list[tuple[int, ...]] | None:
    """The choices of all Pareto-optimal policies, as indices into `Choice`; None above ``most`` partial policies.

    The objectives are: bytes saved, bytes that the block needs during its own backward pass, bytes in host memory, and extra
    seconds. Each objective is monotone in four sums over the residuals: bytes saved, needed and offloaded, and seconds of
    keeping and recomputing. A partial policy can therefore be pruned if another one dominates its sums and leaves the
    undecided children the same parents.

    >>> block = Block("layer", (ResidualCosts("x", 8.0), ResidualCosts("up", 32.0, 0.5, parents=("x",))), 1.0, 2.0)
    >>> sorted(grow(block, offloads=False))  # of x and up: 0 saved, 2 recomputed
    [(0, 0), (0, 2)]
    """
    import numpy as np

    open_until = _last_uses(block)
    codes = np.zeros((1, len(block.residuals)), np.int8)
    # Columns: bytes saved, bytes needed during the backward pass, bytes offloaded, seconds of keeping and recomputing.
    sums = np.zeros((1, 4))
    for step, index in enumerate(block.order):
        grown = [_choose(block, index, choice, codes, sums) for choice in _open_choices(block.residuals[index], offloads)]
        codes, sums = (np.concatenate(parts) for parts in zip(*grown, strict=True))
        visible = [residual for residual in block.order[: step + 1] if open_until[residual] > step]
        kept = _unbeaten_in_groups(codes[:, visible] == _CHOICES.index(Choice.UNUSED), sums)
        if len(kept) > most:
            return None
        codes, sums = codes[kept], sums[kept]
    return [tuple(int(code) for code in row) for row in codes]


def _open_choices(residual: ResidualCosts, offloads: bool) -> list[Choice]:
    allowed = {
        Choice.SAVE: residual.may_save,
        Choice.OFFLOAD: residual.may_offload and offloads,
        Choice.RECOMPUTE: residual.seconds is not None,
        Choice.UNUSED: not residual.needed,
    }
    return [choice for choice in _CHOICES if allowed[choice]]


def _choose(block: Block, index: int, choice: Choice, codes: Any, sums: Any) -> tuple[Any, Any]:
    """The partial policies with one more choice, without those that recompute from an absent parent."""
    import numpy as np

    residual, number = block.residuals[index], {parent.name: at for at, parent in enumerate(block.residuals)}
    legal = np.ones(len(codes), bool)
    if choice is Choice.RECOMPUTE:
        parents = [number[name] for name in residual.parents]
        legal = (codes[:, parents] != _CHOICES.index(Choice.UNUSED)).all(axis=1)
    codes, sums = codes[legal].copy(), sums[legal].copy()
    codes[:, index] = _CHOICES.index(choice)
    size, fetched, recomputed = residual.bytes, block.fetched_share * residual.bytes, block.recomputed_share * residual.bytes
    sums += {
        Choice.SAVE: (size, size, 0.0, residual.kept_seconds),
        Choice.OFFLOAD: (0.0, fetched, size, residual.kept_seconds),
        Choice.RECOMPUTE: (0.0, recomputed, 0.0, residual.seconds or 0.0),
        Choice.UNUSED: (0.0, 0.0, 0.0, 0.0),
    }[choice]
    return codes, sums


def _last_uses(block: Block) -> list[int]:
    """For each residual, the step that decides its last child; -1 without children, or if backward reads the residual."""
    number = {residual.name: at for at, residual in enumerate(block.residuals)}
    last_use = [-1] * len(block.residuals)
    for step, index in enumerate(block.order):
        for parent in block.residuals[index].parents:
            if not block.residuals[number[parent]].needed:
                last_use[number[parent]] = step
    return last_use


def _unbeaten_in_groups(flags: Any, sums: Any) -> list[int]:
    """The Pareto-optimal rows among those that leave the same residuals unused."""
    import numpy as np

    _, groups = np.unique(flags, axis=0, return_inverse=True)
    optimal: list[int] = []
    for group in range(int(groups.max()) + 1):
        rows = np.flatnonzero(groups.ravel() == group)
        optimal += [int(rows[index]) for index in unbeaten(sums[rows])]
    return optimal
