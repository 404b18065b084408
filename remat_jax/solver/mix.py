"""The best mix of a few policies for equal layers, by counts: at most three runs, each of one policy.

What is kept up to a layer and what that layer needs besides must fit wherever the layer is, so that of each run its last layer
decides. For three policies in a given order, and so many layers under the last one, these demands are linear in how many layers
are under the second: its best number is an end of an interval. All triples are looked at side by side, as arrays.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from remat_jax.solver.table import EXTRA, HOST, NEED, SAVED

Array = Any
"""A NumPy array."""

ROUNDING = 1e-12
"""How far over a budget sums may be, relatively, that are added up in another order."""

_COUNTS = 65
"""How many counts of the last run are looked at, at most."""


@dataclass(frozen=True)
class Room:
    """What the other blocks leave to the layers of one kind.

    Attributes:
        budget: bytes on the device.
        before: bytes that are there in front of the first of these layers.
        behind: bytes that the blocks behind need besides all that is kept here and before.
        host: bytes in host memory.
    """

    budget: float
    before: float = 0.0
    behind: float = 0.0
    host: float = float("inf")


@dataclass(frozen=True)
class Mix:
    """Layers of one kind: which policies follow each other, as indices, and how many layers are under each."""

    extra_seconds: float
    runs: tuple[tuple[int, int], ...]


def best_mix(
    measures: Array, ends: Array, layers: int, room: Room, triples: Sequence[tuple[int, int, int]] | Array
) -> Mix | None:
    """The fastest of the mixes of `triples` that fits; None where none does.

    Args:
        measures: policies × (bytes saved, bytes needed, bytes on the host, extra seconds), as `BlockTable.measures` gives them.
        ends: which of the policies the last layer may follow.
        layers: how many there are.
        triples: which policies may follow each other, in the order of the forward pass; equal ones are one run.

    >>> lean, rich = (8.0, 40.0, 0.0, 0.5), (40.0, 40.0, 0.0, 0.0)
    >>> best_mix(np.array([lean, rich]), np.array([True, True]), 30, Room(700.0), orders([0, 1]))
    Mix(extra_seconds=8.0, runs=((0, 16), (1, 14)))
    """
    chosen = np.asarray(triples).reshape(-1, 3)
    chosen = chosen[ends[chosen[:, 2]]]
    if not len(chosen):
        return None
    last = np.unique(np.linspace(1, layers, min(layers, _COUNTS)).round())
    found = _fastest(measures, chosen, layers, room, last)
    if found is not None and layers > _COUNTS:
        near = found[2][2]
        beside = np.arange(max(1, near - layers // _COUNTS), min(layers, near + layers // _COUNTS) + 1)
        finer = _fastest(measures, chosen, layers, room, beside)
        found = finer if finer is not None and finer[0] < found[0] else found
    if found is None:
        return None
    seconds, triple, counts = found
    runs: list[tuple[int, int]] = []
    for policy, count in zip(triple, counts, strict=True):
        if count and runs and runs[-1][0] == policy:
            runs[-1] = policy, runs[-1][1] + count
        elif count:
            runs.append((policy, count))
    return Mix(seconds, tuple(runs))


def orders(policies: Sequence[int], most: int = 3) -> Array:
    """All triples of policies in which at most so many different ones are."""
    return _with_at_most(most, itertools.product(policies, repeat=3))


def orders_beside(used: Sequence[int], new: Sequence[int], most: int = 3) -> Array:
    """All triples in which one policy is new and the others are used, or all of them are that one."""
    places = itertools.product(used, used, new)
    turned = (order for one, other, more in places for order in ((one, other, more), (one, more, other), (more, one, other)))
    return _with_at_most(most, itertools.chain(turned, ((one, one, one) for one in new)))


def _with_at_most(most: int, listed: Iterable[tuple[int, ...]]) -> Array:
    triples = np.array(list(listed), int).reshape(-1, 3)
    if most >= 3:
        return triples
    first, second, third = triples.T
    same = (first == second) & (second == third)
    return triples[same if most == 1 else (first == second) | (second == third)]


def _fastest(
    measures: Array, triples: Array, layers: int, room: Room, last: Array
) -> tuple[float, tuple[int, int, int], tuple[int, int, int]] | None:
    """Extra seconds, triple and counts of the best; `last` are the counts of the third policy that are looked at."""
    budget, host = room.budget * (1 + ROUNDING), room.host * (1 + ROUNDING)
    first, second, third = (measures[triples[:, place]][:, :, None] for place in range(3))
    rest = layers - last[None, :]
    # Of the second policy there are n, of the first rest − n: each demand reads constant + n · slope ≤ 0.
    slope = second[:, SAVED] - first[:, SAVED]
    kept = room.before + rest * first[:, SAVED]
    through = kept + last * third[:, SAVED]
    demands = [
        (kept + first[:, NEED] - first[:, SAVED] - budget, -first[:, SAVED]),
        (kept + second[:, NEED] - second[:, SAVED] - budget, slope),
        (through + third[:, NEED] - third[:, SAVED] - budget, slope),
        (through + room.behind - budget, slope),
    ]
    if np.isfinite(room.host):
        demands.append((rest * first[:, HOST] + last * third[:, HOST] - host, second[:, HOST] - first[:, HOST]))
    least, most = np.zeros(through.shape), np.broadcast_to(rest, through.shape).astype(float)
    for constant, each in demands:
        each = np.broadcast_to(each, constant.shape)
        with np.errstate(divide="ignore", invalid="ignore"):
            limit = -constant / each
        # What rounding takes away of a whole number is given back.
        most = np.where(each > 0, np.minimum(most, np.floor(limit * (1 + ROUNDING) + 1e-9)), most)
        least = np.where(each < 0, np.maximum(least, np.ceil(limit * (1 - ROUNDING) - 1e-9)), least)
        most = np.where((each == 0) & (constant > 0), -1.0, most)
    gain = second[:, EXTRA] - first[:, EXTRA]
    count = np.where(gain < 0, most, least)
    seconds = (rest - count) * first[:, EXTRA] + count * second[:, EXTRA] + last * third[:, EXTRA]
    seconds = np.where((least <= most) & (rest >= 0), seconds, np.inf)
    at, place = np.unravel_index(int(seconds.argmin()), seconds.shape)
    if not np.isfinite(seconds[at, place]):
        return None
    third_count, second_count = int(last[place]), int(count[at, place])
    counts = layers - third_count - second_count, second_count, third_count
    one, two, three = map(int, triples[at])
    return float(seconds[at, place]), (one, two, three), counts
