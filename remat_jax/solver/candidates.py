"""Every policy of one block that could be part of a best plan, and no other: built residual by residual, pruned as it grows."""

from __future__ import annotations

from typing import Any

from remat_jax.solver.policies import Choice
from remat_jax.solver.problem import Block, Residual

MOST = 3000
"""How many partial policies are carried along, at most."""

_CHOICES = tuple(Choice)


def unbeaten(points: Any) -> list[int]:
    """The rows of an array that no other row is at or below in every column, in lexicographic order; of equal rows the first.

    >>> import numpy as np
    >>> unbeaten(np.array([[2.0, 1.0], [1.0, 2.0], [2.0, 2.0], [1.0, 2.0]]))
    [1, 0]
    """
    import numpy as np

    left = np.lexsort(tuple(points.T[::-1]))
    found = []
    while left.size:
        # Nothing behind the first in this order is at or below it everywhere, unless it is equal.
        first = left[0]
        found.append(int(first))
        left = left[(points[left] < points[first]).any(axis=1)]
    return found


def grow(block: Block, offloads: bool, most: int = MOST) -> list[tuple[int, ...]] | None:
    """The choices of all unbeaten policies, as indices into `Choice`; None where more than ``most`` are carried along.

    One policy beats another where it is no worse in all of: bytes saved, bytes that the block needs while its own backward
    pass runs, bytes in host memory, extra seconds. All four only grow with the bytes saved, the bytes needed, the bytes
    offloaded and the seconds recomputed, each a sum over the residuals; so a partial policy that is beaten in these sums by
    another that leaves its children the same is beaten for good.

    >>> block = Block("layer", (Residual("x", 8.0), Residual("up", 32.0, 0.5, parents=("x",))), 1.0, 2.0)
    >>> sorted(grow(block, offloads=False))  # of x and up: 0 saved, 2 recomputed
    [(0, 0), (0, 2)]
    """
    import numpy as np

    open_until = _last_uses(block)
    codes = np.zeros((1, len(block.residuals)), np.int8)
    # Bytes saved, bytes needed while backward runs, bytes offloaded, seconds recomputed.
    sums = np.zeros((1, 4))
    for step, index in enumerate(block.order):
        grown = [_choose(block, index, choice, codes, sums) for choice in _open_choices(block.residuals[index], offloads)]
        codes, sums = (np.concatenate(parts) for parts in zip(*grown, strict=True))
        visible = [one for one in block.order[: step + 1] if open_until[one] > step]
        kept = _unbeaten_in_groups(codes[:, visible] == _CHOICES.index(Choice.UNUSED), sums)
        if len(kept) > most:
            return None
        codes, sums = codes[kept], sums[kept]
    return [tuple(int(code) for code in row) for row in codes]


def _open_choices(residual: Residual, offloads: bool) -> list[Choice]:
    allowed = {
        Choice.SAVE: residual.may_save,
        Choice.OFFLOAD: residual.may_offload and offloads,
        Choice.RECOMPUTE: residual.seconds is not None,
        Choice.UNUSED: not residual.needed,
    }
    return [choice for choice in _CHOICES if allowed[choice]]


def _choose(block: Block, index: int, choice: Choice, codes: Any, sums: Any) -> tuple[Any, Any]:
    """All partial policies with one choice more, those left out that recompute from what is not there."""
    import numpy as np

    residual, number = block.residuals[index], {one.name: at for at, one in enumerate(block.residuals)}
    legal = np.ones(len(codes), bool)
    if choice is Choice.RECOMPUTE:
        parents = [number[name] for name in residual.parents]
        legal = (codes[:, parents] != _CHOICES.index(Choice.UNUSED)).all(axis=1)
    codes, sums = codes[legal].copy(), sums[legal].copy()
    codes[:, index] = _CHOICES.index(choice)
    size, fetched, again = residual.bytes, block.fetched_share * residual.bytes, block.recomputed_share * residual.bytes
    sums += {
        Choice.SAVE: (size, size, 0.0, 0.0),
        Choice.OFFLOAD: (0.0, fetched, size, 0.0),
        Choice.RECOMPUTE: (0.0, again, 0.0, residual.seconds or 0.0),
        Choice.UNUSED: (0.0, 0.0, 0.0, 0.0),
    }[choice]
    return codes, sums


def _last_uses(block: Block) -> list[int]:
    """For each residual, the step at which its last child is decided; -1 where none is, or where it is there anyway."""
    number = {one.name: at for at, one in enumerate(block.residuals)}
    found = [-1] * len(block.residuals)
    for step, index in enumerate(block.order):
        for parent in block.residuals[index].parents:
            if not block.residuals[number[parent]].needed:
                found[number[parent]] = step
    return found


def _unbeaten_in_groups(flags: Any, sums: Any) -> list[int]:
    """The unbeaten rows among those that leave the same residuals unused."""
    import numpy as np

    _, groups = np.unique(flags, axis=0, return_inverse=True)
    found: list[int] = []
    for group in range(int(groups.max()) + 1):
        rows = np.flatnonzero(groups.ravel() == group)
        found += [int(rows[index]) for index in unbeaten(sums[rows])]
    return found
