"""Divides the memory among the kinds of blocks: a multiple-choice knapsack, solved approximately by a dynamic program.

Each kind uses one mix of two policies. A mix fits if the bytes that it needs plus those saved by earlier kinds are within the
budget. The dynamic program goes through the kinds in forward order and keeps the fastest combinations for each amount of saved
memory. Nearly equal amounts share a bin (`_BINS`), so the program is fast for any number of kinds, but not exact.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from remat_jax.solver.mix import COUNTS, ROUNDING, Runs
from remat_jax.solver.table import EXTRA, HOST, NEED, SAVED, Array

_FIRST, _SECOND, _COUNT = 4, 5, 6
"""The columns of a mix after those of `BlockTable.measures`: its two policies, and the number of layers under the first."""
_BINS = 1024
"""The number of bins of saved memory."""
_NEED_BINS, _SAVED_BINS = 16, 256
"""The numbers of bins, for needed memory and for saved memory, into which `mixes_of_two` sorts the mixes of one kind."""


def mixes_of_two(
    measures: Array, ends: Array, layers: int, policies: Sequence[int], most: int, room: float, host_price: float
) -> Array:
    """Mixes of two policies that fit in ``room`` bytes, shape (mixes, 7); only single policies if ``most`` is 1.

    The first four columns are those of `BlockTable.measures` for all layers together. Bytes needed are the peak above the
    memory in use before these layers. Of mixes that save and need nearly the same memory, only the cheapest is returned.

    Args:
        measures: shape (policies, 4), from `BlockTable.measures`.
        ends: whether each policy is legal for the last layer, shape (policies,).
        policies: the indices of the policies to mix.
        host_price: seconds per byte in host memory.
    """
    counts = np.unique(np.linspace(0, layers - 1, min(layers, COUNTS)).round()) if most > 1 else np.zeros(1)
    chosen = np.array(policies, int)
    first, second, count = (axis.ravel() for axis in np.meshgrid(chosen, chosen[ends[chosen]], counts, indexing="ij"))
    keep = (count > 0) | (first == second)
    first, second, count = first[keep], second[keep], count[keep]
    before, after, rest = measures[first], measures[second], layers - count
    mixes = np.zeros((len(first), 7))
    kept = count * before[:, SAVED]
    mixes[:, SAVED] = kept + rest * after[:, SAVED]
    mixes[:, NEED] = np.maximum(
        np.where(count > 0, kept + before[:, NEED] - before[:, SAVED], 0.0),
        mixes[:, SAVED] + after[:, NEED] - after[:, SAVED],
    )
    for column in (HOST, EXTRA):
        mixes[:, column] = count * before[:, column] + rest * after[:, column]
    mixes[:, _FIRST], mixes[:, _SECOND], mixes[:, _COUNT] = first, second, count
    mixes = mixes[mixes[:, NEED] <= room * (1 + ROUNDING)]
    if not len(mixes):
        return mixes
    saved_bin, need_bin = _binned(mixes[:, SAVED], _SAVED_BINS), _binned(mixes[:, NEED], _NEED_BINS)
    order = np.lexsort((mixes[:, SAVED], mixes[:, EXTRA] + host_price * mixes[:, HOST]))
    _, cheapest = np.unique((saved_bin * _NEED_BINS + need_bin)[order], return_index=True)
    return mixes[order[cheapest]]


def runs_of(mix: Array, layers: int) -> Runs:
    """The runs of one row of `mixes_of_two`."""
    first, second, count = map(int, mix[_FIRST:])
    return ((second, layers),) if first == second or not count else ((first, count), (second, layers - count))


def shared(kinds: Sequence[Array], budget: float, host_budget: float, host_price: float) -> list[Array] | None:
    """One mix per kind: the cheapest combination found that fits both budgets; None if no combination was found.

    Args:
        kinds: for each kind in forward order, its mixes, with the columns of `mixes_of_two`.
        budget, host_budget: bytes on the device and in host memory, for all kinds together.
        host_price: seconds per byte in host memory.

    >>> kind = np.array([[2.0, 3.0, 0.0, 1.0], [4.0, 4.0, 0.0, 0.0]])
    >>> [mix[SAVED].item() for mix in shared([kind, kind], 6.0, np.inf, 0.0)], shared([kind, kind], 4.0, np.inf, 0.0)
    ([2.0, 4.0], None)
    """
    # Columns of a state: bytes saved, host bytes, cost. For each kind, the trail has the index of each state's previous state
    # and of its mix.
    states = np.zeros((1, 3))
    trail: list[tuple[Array, Array]] = []
    for mixes in kinds:
        kept = states[:, None, 0] + mixes[None, :, SAVED]
        need = states[:, None, 0] + mixes[None, :, NEED]
        host = states[:, None, 1] + mixes[None, :, HOST]
        cost = states[:, None, 2] + mixes[None, :, EXTRA] + host_price * mixes[None, :, HOST]
        before, chosen = np.nonzero((need <= budget * (1 + ROUNDING)) & (host <= host_budget * (1 + ROUNDING)))
        if not len(before):
            return None
        states = np.stack([column[before, chosen] for column in (kept, host, cost)], axis=1)
        keep = _fronts(states)
        states = states[keep]
        trail.append((before[keep], chosen[keep]))
    at, path = int(states[:, 2].argmin()), []
    for mixes, (before, chosen) in zip(reversed(kinds), reversed(trail), strict=True):
        path.append(mixes[chosen[at]])
        at = int(before[at])
    return path[::-1]


def _fronts(states: Array) -> Array:
    """For each bin, the indices of its cheapest state and of its state with least memory, without dominated states."""
    bins = _binned(states[:, 0], _BINS)
    order = np.lexsort((states[:, 2], bins))
    _, cheapest = np.unique(bins[order], return_index=True)
    lean = np.lexsort((states[:, 0], bins))
    _, leanest = np.unique(bins[lean], return_index=True)
    keep = np.unique(np.concatenate([order[cheapest], lean[leanest]]))
    keep = keep[np.lexsort((states[keep, 2], states[keep, 0]))]
    least = np.minimum.accumulate(states[keep, 2])
    return keep[np.concatenate([[True], states[keep, 2][1:] < least[:-1]])]


def _binned(values: Array, bins: int) -> Array:
    low, high = values.min(), values.max()
    return ((values - low) / ((high - low) or 1.0) * (bins - 1)).astype(int)
