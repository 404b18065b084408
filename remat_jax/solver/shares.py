"""How kinds of blocks share the memory: a dynamic programme over kinds, each with its mixes of two policies.

What fits depends on what the kinds before keep, and on nothing else of them: the programme goes through the kinds in forward
order and remembers, for each amount of kept memory, the fastest way to come to it. Amounts that are nearly the same are one
(`_BINS`), so that it is fast for any number of kinds, and not quite exact.
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
"""Amounts of kept memory that are told apart."""

_NEED_BINS, _SAVED_BINS = 16, 256
"""Of the mixes of one kind: needs, and amounts kept."""

_COUNTS = 65
"""How many counts of the second policy are looked at, at most."""


@dataclass(frozen=True)
class Mixes:
    """Ways to run the layers of one kind: ``counts[i]`` of them under ``first[i]``, then the rest under ``second[i]``.

    ``measures`` are of all these layers together, in the columns of `BlockTable.measures`: what is needed at most is
    counted from what is there before them.
    """

    first: Array
    second: Array
    counts: Array
    measures: Array

    def runs(self, at: int, layers: int) -> tuple[tuple[int, int], ...]:
        """The mix at an index as (policy, count)."""
        first, second, count = int(self.first[at]), int(self.second[at]), int(self.counts[at])
        return ((second, layers),) if first == second or not count else ((first, count), (second, layers - count))


def mixes_of_two(measures: Array, ends: Array, layers: int, policies: Sequence[int], most: int, room: float) -> Mixes:
    """All mixes of two of these policies that need no more than ``room`` by themselves; one policy alone where most is 1."""
    counts = np.unique(np.linspace(0, layers - 1, min(layers, _COUNTS)).round()) if most > 1 else np.zeros(1)
    chosen = np.array(policies, int)
    first, second, count = (one.ravel() for one in np.meshgrid(chosen, chosen[ends[chosen]], counts, indexing="ij"))
    keep = (count > 0) | (first == second)
    first, second, count = first[keep], second[keep], count[keep]
    one, two, rest = measures[first], measures[second], layers - count
    kept = count * one[:, SAVED]
    saved = kept + rest * two[:, SAVED]
    need = np.maximum(np.where(count > 0, kept + one[:, NEED] - one[:, SAVED], 0.0), saved + two[:, NEED] - two[:, SAVED])
    found = np.zeros((len(first), 4))
    found[:, SAVED], found[:, NEED] = saved, need
    found[:, HOST] = count * one[:, HOST] + rest * two[:, HOST]
    found[:, EXTRA] = count * one[:, EXTRA] + rest * two[:, EXTRA]
    fits = need <= room * (1 + ROUNDING)
    return Mixes(first[fits], second[fits], count[fits], found[fits])


def thinned(mixes: Mixes, cost: Array) -> Mixes:
    """Of mixes that keep and need nearly the same the one of least cost."""
    if not len(cost):
        return mixes
    saved, need = (_binned(mixes.measures[:, one], bins) for one, bins in ((SAVED, _SAVED_BINS), (NEED, _NEED_BINS)))
    order = np.lexsort((mixes.measures[:, SAVED], cost))
    _, first = np.unique((saved * _NEED_BINS + need)[order], return_index=True)
    keep = order[first]
    return Mixes(mixes.first[keep], mixes.second[keep], mixes.counts[keep], mixes.measures[keep])


def shared(kinds: Sequence[Mixes], budget: float, host_budget: float, host_price: float) -> list[int] | None:
    """Which mix each kind takes, so that all of them together are fast and fit; None where nothing was found.

    Args:
        kinds: in forward order.
        budget: bytes on the device for all of them.
        host_budget: bytes in host memory.
        host_price: what a byte of it is worth, in seconds.

    >>> measures = np.array([[2.0, 3.0, 0.0, 1.0], [4.0, 4.0, 0.0, 0.0]])
    >>> kind = Mixes(np.arange(2), np.arange(2), np.zeros(2), measures)
    >>> [shared([kind, kind], budget, np.inf, 0.0) for budget in (4.0, 6.0, 8.0)]
    [None, [0, 1], [1, 1]]
    """
    # Kept so far, host bytes, cost; and for each kind where a state came from.
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
        states = np.stack([one[before, chosen] for one in (kept, host, cost)], axis=1)
        keep = _fronts(states)
        states = states[keep]
        trail.append((before[keep], chosen[keep]))
    at, found = int(states[:, 2].argmin()), []
    for before, chosen in reversed(trail):
        found.append(int(chosen[at]))
        at = int(before[at])
    return found[::-1]


def _fronts(states: Array) -> Array:
    """Of states that keep nearly the same the cheapest and the leanest, as far as no state that keeps less is as cheap."""
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
