"""How kinds of blocks share the memory: a dynamic programme over kinds, each with its mixes of two policies.

A mix fits if its need and the memory kept by earlier kinds are within the budget. The programme goes through the kinds in
forward order and remembers the fastest mixes for each amount of kept memory. Nearly equal amounts share a bin (`_BINS`): the
programme is fast for any number of kinds, but not exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from remat_jax.solver.mix import ROUNDING
from remat_jax.solver.table import EXTRA, HOST, NEED, SAVED

Array = Any
"""A NumPy array."""

_BINS = 1024
"""The number of bins of kept memory."""

_NEED_BINS, _SAVED_BINS = 16, 256
"""The numbers of bins for the mixes of one kind: of needed memory and of saved memory."""

_COUNTS = 65
"""The most counts of the first policy that are tried."""


@dataclass(frozen=True)
class Mixes:
    """Mixes for the layers of one kind: ``counts[i]`` layers under ``first[i]``, the remaining layers under ``second[i]``.

    ``measures`` has the columns of `BlockTable.measures` for all layers together. The need is the peak above the memory in use
    before these layers.
    """

    first: Array
    second: Array
    counts: Array
    measures: Array

    def runs(self, at: int, layers: int) -> tuple[tuple[int, int], ...]:
        """The mix at an index as pairs (policy, count)."""
        first, second, count = int(self.first[at]), int(self.second[at]), int(self.counts[at])
        return ((second, layers),) if first == second or not count else ((first, count), (second, layers - count))


def mixes_of_two(measures: Array, ends: Array, layers: int, policies: Sequence[int], most: int, room: float) -> Mixes:
    """All mixes of two of these policies that fit in ``room`` by themselves; single policies if ``most`` is 1."""
    counts = np.unique(np.linspace(0, layers - 1, min(layers, _COUNTS)).round()) if most > 1 else np.zeros(1)
    chosen = np.array(policies, int)
    first, second, count = (axis.ravel() for axis in np.meshgrid(chosen, chosen[ends[chosen]], counts, indexing="ij"))
    keep = (count > 0) | (first == second)
    first, second, count = first[keep], second[keep], count[keep]
    before, after, rest = measures[first], measures[second], layers - count
    kept = count * before[:, SAVED]
    saved = kept + rest * after[:, SAVED]
    need = np.maximum(
        np.where(count > 0, kept + before[:, NEED] - before[:, SAVED], 0.0), saved + after[:, NEED] - after[:, SAVED]
    )
    totals = np.zeros((len(first), 4))
    totals[:, SAVED], totals[:, NEED] = saved, need
    totals[:, HOST] = count * before[:, HOST] + rest * after[:, HOST]
    totals[:, EXTRA] = count * before[:, EXTRA] + rest * after[:, EXTRA]
    fits = need <= room * (1 + ROUNDING)
    return Mixes(first[fits], second[fits], count[fits], totals[fits])


def thinned(mixes: Mixes, cost: Array) -> Mixes:
    """The cheapest mix among those that save and need nearly the same memory."""
    if not len(cost):
        return mixes
    saved, need = (_binned(mixes.measures[:, column], bins) for column, bins in ((SAVED, _SAVED_BINS), (NEED, _NEED_BINS)))
    order = np.lexsort((mixes.measures[:, SAVED], cost))
    _, first = np.unique((saved * _NEED_BINS + need)[order], return_index=True)
    keep = order[first]
    return Mixes(mixes.first[keep], mixes.second[keep], mixes.counts[keep], mixes.measures[keep])


def shared(kinds: Sequence[Mixes], budget: float, host_budget: float, host_price: float) -> list[int] | None:
    """The index of a mix for each kind, so that all kinds together fit and are fast; None if no combination fits.

    Args:
        kinds: the mixes of each kind, in forward order.
        budget: bytes on the device for all kinds.
        host_budget: bytes in host memory.
        host_price: the price of a byte in host memory, in seconds.

    >>> measures = np.array([[2.0, 3.0, 0.0, 1.0], [4.0, 4.0, 0.0, 0.0]])
    >>> kind = Mixes(np.arange(2), np.arange(2), np.zeros(2), measures)
    >>> [shared([kind, kind], budget, np.inf, 0.0) for budget in (4.0, 6.0, 8.0)]
    [None, [0, 1], [1, 1]]
    """
    # Columns of a state: bytes kept, host bytes, cost. The trail has each kind's previous states and chosen mixes.
    states = np.zeros((1, 3))
    trail: list[tuple[Array, Array]] = []
    for mixes in kinds:
        kept = states[:, None, 0] + mixes.measures[None, :, SAVED]
        need = states[:, None, 0] + mixes.measures[None, :, NEED]
        host = states[:, None, 1] + mixes.measures[None, :, HOST]
        cost = states[:, None, 2] + mixes.measures[None, :, EXTRA] + host_price * mixes.measures[None, :, HOST]
        before, chosen = np.nonzero((need <= budget * (1 + ROUNDING)) & (host <= host_budget * (1 + ROUNDING)))
        if not len(before):
            return None
        states = np.stack([column[before, chosen] for column in (kept, host, cost)], axis=1)
        keep = _fronts(states)
        states = states[keep]
        trail.append((before[keep], chosen[keep]))
    at, path = int(states[:, 2].argmin()), []
    for before, chosen in reversed(trail):
        path.append(int(chosen[at]))
        at = int(before[at])
    return path[::-1]


def _fronts(states: Array) -> Array:
    """The cheapest and the leanest state of each bin of kept memory, without those dominated by a leaner state."""
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
