"""The best mix of policies for equal layers: at most three runs of consecutive layers, with one policy each.

At each layer, the bytes saved by earlier layers plus the bytes that the layer needs must fit the budget. A run needs most
memory at its last layer, so each run gives one constraint. Fix three policies in order and the number of layers under the
third. Then the time and the constraints are linear in the number of layers under the second, so an end of the feasible interval
is optimal. All triples of policies are evaluated at once as arrays.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from remat_jax.solver.table import EXTRA, HOST, NEED, SAVED, Array

ROUNDING = 1e-12
"""The relative rounding error that a sum may have when its terms are added in a different order."""
COUNTS = 65
"""If there are more equal layers than this, only this many evenly spaced layer counts are tried for one run of a mix.

`best_mix` does so for the last run, and then also tries the counts near the best.
"""
Runs = tuple[tuple[int, int], ...]
"""A mix: for each run, the index of its policy and its number of layers."""


@dataclass(frozen=True)
class Room:
    """The memory that the other blocks leave to the layers of one kind.

    Attributes:
        budget: bytes of device memory in total.
        before: bytes in use before the first of these layers.
        behind: bytes that later blocks need in addition to the bytes saved by these and earlier layers.
        host: bytes of host memory left to these layers.
    """

    budget: float
    before: float = 0.0
    behind: float = 0.0
    host: float = float("inf")


def best_mix(measures: Array, ends: Array, layers: int, room: Room, triples: Array) -> tuple[float, Runs] | None:
    """The extra seconds and the runs of the fastest mix that fits; None if none fits.

    Args:
        measures: bytes saved, bytes needed, bytes on the host, extra seconds; shape (policies, 4), from `BlockTable.measures`.
        ends: whether each policy is legal for the last layer, shape (policies,).
        layers: the number of layers.
        triples: the policies of three runs in forward order, shape (triples, 3); equal adjacent policies are one run.
    """
    triples = triples[ends[triples[:, 2]]]
    if not len(triples):
        return None
    last_counts = np.unique(np.linspace(1, layers, min(layers, COUNTS)).round())
    fastest = _fastest(measures, triples, layers, room, last_counts)
    if fastest is not None and layers > COUNTS:
        _, near = fastest[1][2]
        beside = np.arange(max(1, near - layers // COUNTS), min(layers, near + layers // COUNTS) + 1)
        finer = _fastest(measures, triples, layers, room, beside)
        fastest = min(fastest, finer or fastest, key=lambda mix: mix[0])
    if fastest is None:
        return None
    seconds, runs = fastest
    equal_runs = itertools.groupby((run for run in runs if run[1]), key=lambda run: run[0])
    return seconds, tuple((policy, sum(count for _, count in equal)) for policy, equal in equal_runs)


def orders(policies: Sequence[int], most: int) -> Array:
    """All triples of ``policies`` with at most ``most`` runs, shape (triples, 3)."""
    return _with_at_most(most, itertools.product(policies, repeat=3))


def orders_beside(used: Sequence[int], new: Sequence[int], most: int) -> Array:
    """Triples of one new and two used policies in any order, and each new policy alone, with at most ``most`` runs."""
    places = itertools.product(used, used, new)
    turned = (order for a, b, added in places for order in ((a, b, added), (a, added, b), (added, a, b)))
    return _with_at_most(most, itertools.chain(turned, ((added, added, added) for added in new)))


def _with_at_most(most: int, listed: Iterable[tuple[int, ...]]) -> Array:
    triples = np.array(list(listed), int).reshape(-1, 3)
    return triples[(np.diff(triples, axis=1) != 0).sum(axis=1) < most]


def _fastest(measures: Array, triples: Array, layers: int, room: Room, last: Array) -> tuple[float, Runs] | None:
    """Extra seconds and the three runs of the fastest mix; ``last`` has the layer counts to try for the third policy."""
    budget, host = room.budget * (1 + ROUNDING), room.host * (1 + ROUNDING)
    first, second, third = (measures[triples[:, place]][:, :, None] for place in range(3))
    in_first_two = layers - last[None, :]
    # With n layers under the second policy and in_first_two − n under the first, each constraint is constant + n · slope ≤ 0.
    slope = second[:, SAVED] - first[:, SAVED]
    kept = room.before + in_first_two * first[:, SAVED]
    saved = kept + last * third[:, SAVED]
    constraints = [
        (kept + first[:, NEED] - first[:, SAVED] - budget, -first[:, SAVED]),
        (kept + second[:, NEED] - second[:, SAVED] - budget, slope),
        (saved + third[:, NEED] - third[:, SAVED] - budget, slope),
        (saved + room.behind - budget, slope),
    ]
    if np.isfinite(room.host):
        constraints.append((in_first_two * first[:, HOST] + last * third[:, HOST] - host, second[:, HOST] - first[:, HOST]))
    least, most = np.zeros(saved.shape), np.broadcast_to(in_first_two, saved.shape).astype(float)
    for constant, slopes in constraints:
        slopes = np.broadcast_to(slopes, constant.shape)
        with np.errstate(divide="ignore", invalid="ignore"):
            limit = -constant / slopes
        # A limit that misses a whole number only by rounding counts as that number.
        most = np.where(slopes > 0, np.minimum(most, np.floor(limit * (1 + ROUNDING) + 1e-9)), most)
        least = np.where(slopes < 0, np.maximum(least, np.ceil(limit * (1 - ROUNDING) - 1e-9)), least)
        most = np.where((slopes == 0) & (constant > 0), -1.0, most)
    gain = second[:, EXTRA] - first[:, EXTRA]
    count = np.where(gain < 0, most, least)
    seconds = (in_first_two - count) * first[:, EXTRA] + count * second[:, EXTRA] + last * third[:, EXTRA]
    seconds = np.where((least <= most) & (in_first_two >= 0), seconds, np.inf)
    row, place = np.unravel_index(int(seconds.argmin()), seconds.shape)
    if not np.isfinite(seconds[row, place]):
        return None
    third_count, second_count = int(last[place]), int(count[row, place])
    counts = layers - third_count - second_count, second_count, third_count
    return float(seconds[row, place]), tuple(zip(map(int, triples[row]), counts, strict=True))
