"""Mixes of policies: the best mix for equal layers, and one mix for each of several kinds of blocks.

A mix has at most three runs of consecutive layers, with one policy each. At each layer, the bytes saved by earlier layers,
without their late bytes (`Block.late_bytes`), plus the bytes that the layer needs must fit the budget. A run needs most memory
at its last layer: what its layers save is kept until all of them have run backward. So each run gives one constraint.
`best_mix` fixes three policies in order and the number of layers under the third. Then the time and the constraints are linear
in the number of layers under the second, so an end of the feasible interval is optimal, except where two scans of equal length
need more (`_measured`). All triples of policies are evaluated at once as arrays.

`shared` divides the memory among several kinds: a multiple-choice knapsack, solved approximately by a dynamic program. Each
kind uses one of its `first_mixes`. A mix fits if the bytes that it needs plus those saved by earlier kinds are within the
budget. The dynamic program goes through the kinds in forward order and keeps the fastest combinations for each amount of saved
memory. Nearly equal amounts share a bin (`_BINS`), so the program is fast for any number of kinds, but not exact.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from remat_jax.solver.problem import Block
from remat_jax.solver.table import EXTRA, HOST, NEED, SAVED, Array

ROUNDING = 1e-12
"""The relative rounding error that a sum may have when its terms are added in a different order."""
COUNTS = 65
"""If there are more equal layers than this, only this many evenly spaced layer counts are tried for one run of a mix.

`best_mix` limits the counts of the last run in this way, and then also tries the counts near the best count.
"""
Runs = tuple[tuple[int, int], ...]
"""A mix: for each run, the index of its policy and its number of layers. A scan is cut between runs of equal policies."""
_PLACES = 12
"""The maximum number of places where a scan of lean layers may be cut in the first plan."""
_BINS = 1024
"""The number of bins of saved memory."""
_NEED_BINS, _SAVED_BINS, _HOST_BINS = 16, 256, 16
"""The numbers of bins, for needed, saved and host memory, into which `first_mixes` sorts the mixes of one kind. Host memory
has bins only if it is limited."""


@dataclass(frozen=True)
class Room:
    """The memory that the other blocks leave to the layers of one kind.

    Attributes:
        budget: bytes of device memory in total.
        before: bytes in use before the first of these layers, without the late bytes of earlier layers.
        behind: bytes that later blocks need in addition to the bytes saved by these and earlier layers, without the late bytes
            of these and earlier layers.
        host: bytes of host memory left to these layers.
    """

    budget: float
    before: float = 0.0
    behind: float = 0.0
    host: float = float("inf")


def cuts_help(block: Block, most: int) -> bool:
    """Whether a mix of at most ``most`` runs may have neighbouring runs of one policy: a scan that is cut needs less memory."""
    return block.late_bytes > 0 and most > 2


def best_mix(
    block: Block, measures: Array, ends: Array, room: Room, triples: Array, *, cuts: bool = False
) -> tuple[float, Runs] | None:
    """The extra seconds and the runs of the fastest mix that fits; None if none fits.

    Args:
        block: the kind of block, with the number of layers (`Block.repeats`).
        measures: bytes saved, bytes needed, bytes on the host, extra seconds; shape (policies, 4), from `BlockTable.measures`.
        ends: whether each policy is legal for the last layer, shape (policies,).
        triples: the policies of three runs in forward order, shape (triples, 3); equal adjacent policies are one run, unless
            ``cuts`` allows to cut a scan between them.
    """
    layers, triples = block.repeats, triples[ends[triples[:, 2]]]
    if not len(triples):
        return None
    last_counts = np.unique(np.linspace(1, layers, min(layers, COUNTS)).round())
    fastest = _fastest(block, measures, triples, room, last_counts, cuts)
    if fastest is not None and layers > COUNTS:
        _, near = fastest[1][2]
        beside = np.arange(max(1, near - layers // COUNTS), min(layers, near + layers // COUNTS) + 1)
        finer = _fastest(block, measures, triples, room, beside, cuts)
        fastest = min(fastest, finer or fastest, key=lambda mix: mix[0])
    if fastest is None:
        return None
    seconds, runs = fastest
    return seconds, tuple(run for run in runs if run[1])


def joined(block: Block, measures: Array, room: Room, runs: Runs) -> Runs:
    """The runs, with neighbours of equal policies joined if they then fit as well."""
    for at in range(len(runs) - 1, 0, -1):
        if runs[at - 1][0] == runs[at][0]:
            fewer = (*runs[: at - 1], (runs[at][0], runs[at - 1][1] + runs[at][1]), *runs[at + 1 :])
            if totals(block, measures, fewer)[1] <= (room.budget - room.before) * (1 + ROUNDING):
                runs = fewer
    return runs


def totals(block: Block, measures: Array, runs: Runs) -> tuple[float, float, float]:
    """Of a mix: the bytes saved without the late bytes, the peak above the memory in use before, and the bytes on the host."""
    counts, saved, peak, host = [count for _, count in runs], 0.0, 0.0, 0.0
    for at, (policy, count) in enumerate(runs):
        each = measures[policy]
        allocated = block.late_bytes * sum(own for own in counts[:at] if own > 1 and own in counts[at:])
        peak = max(peak, saved + allocated + (count - 1) * each[SAVED] + each[NEED])
        saved, host = saved + count * (each[SAVED] - block.late_bytes), host + count * each[HOST]
    return float(saved), float(peak), float(host)


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


def _fastest(block: Block, measures: Array, triples: Array, room: Room, last: Array, cuts: bool) -> tuple[float, Runs] | None:
    """Extra seconds and the three runs of the fastest mix; ``last`` has the layer counts to try for the third policy."""
    layers, late = block.repeats, block.late_bytes
    budget, host = room.budget * (1 + ROUNDING), room.host * (1 + ROUNDING)
    first, second, third = (measures.T[:, triples[:, place], None] for place in range(3))
    in_first_two = layers - last[None, :]
    # With n layers under the second policy and in_first_two − n under the first, each constraint is constant + n · slope ≤ 0.
    slope = second[SAVED] - first[SAVED]
    kept = room.before + in_first_two * (first[SAVED] - late)
    saved = kept + last * (third[SAVED] - late)
    constraints = [
        (room.before + (in_first_two - 1) * first[SAVED] + first[NEED] - budget, -first[SAVED]),
        (kept + second[NEED] - second[SAVED] - budget, slope + late),
        (kept + (last - 1) * third[SAVED] + third[NEED] - budget, slope),
        (saved + room.behind - budget, slope),
    ]
    if np.isfinite(room.host):
        constraints.append((in_first_two * first[HOST] + last * third[HOST] - host, second[HOST] - first[HOST]))
    least, most = np.zeros(saved.shape), np.broadcast_to(in_first_two, saved.shape).astype(float)
    if late and not cuts:
        # Neighbouring runs of one policy would be one scan: allow only one of them.
        same, behind = (np.broadcast_to(triples[:, at, None] == triples[:, at + 1, None], saved.shape) for at in (0, 1))
        most = np.where(same | behind, 0.0, most)
        most = np.where(same & behind & (in_first_two > 0), -1.0, most)
    for constant, slopes in constraints:
        slopes = np.broadcast_to(slopes, constant.shape)
        with np.errstate(divide="ignore", invalid="ignore"):
            limit = -constant / slopes
        # A limit that misses a whole number only by rounding counts as that number.
        most = np.where(slopes > 0, np.minimum(most, np.floor(limit * (1 + ROUNDING) + 1e-9)), most)
        least = np.where(slopes < 0, np.maximum(least, np.ceil(limit * (1 - ROUNDING) - 1e-9)), least)
        most = np.where((slopes == 0) & (constant > 0), -1.0, most)
    gain = second[EXTRA] - first[EXTRA]
    count = np.where(gain < 0, most, least)
    fits = (least <= most) & (in_first_two >= 0)
    for last_try in (False, False, False, True) if late else ():
        # Only scans of equal length need more than the constraints say, and there are at most three such counts.
        runs = in_first_two - count, count, np.broadcast_to(last, count.shape)
        over = _over(block, (first, second, third), runs, room.before, budget) & fits
        if last_try or not over.any():
            fits = fits & ~over
            break
        count = count + np.where(over, np.where(gain < 0, -1, 1), 0)
    fits = fits & (least <= count) & (count <= most)
    seconds = np.where(fits, (in_first_two - count) * first[EXTRA] + count * second[EXTRA] + last * third[EXTRA], np.inf)
    row, place = np.unravel_index(int(seconds.argmin()), seconds.shape)
    if not np.isfinite(seconds[row, place]):
        return None
    third_count, second_count = int(last[place]), int(count[row, place])
    counts = layers - third_count - second_count, second_count, third_count
    return float(seconds[row, place]), tuple(zip(map(int, triples[row]), counts, strict=True))


def _measured(block: Block, policies: Sequence[Array], counts: Sequence[Array]) -> Array:
    """Of runs of layers in forward order, the sums that `first_mixes` describes: bytes saved without the late bytes, the peak
    above the memory in use before, bytes on the host, extra seconds.

    The late bytes of a run are free while a later run runs backward, unless that run, or one behind it, is a scan of the same
    length (`policies.not_yet_allocated`).

    Args:
        policies: the columns of `BlockTable.measures` for each run, shape (4, …).
        counts: the number of layers of each run.
    """
    peak, runs = np.zeros(()), list(zip(policies, counts, strict=True))
    for at, (policy, count) in enumerate(runs):
        kept = sum(own * (each[SAVED] - block.late_bytes) for each, own in runs[:at])
        for own in counts[:at] if block.late_bytes else ():
            begun = functools.reduce(np.logical_or, (_alike(own, later) for later in counts[at:]))
            kept = kept + np.where(begun, own * block.late_bytes, 0.0)
        peak = np.maximum(peak, np.where(count > 0, kept + (count - 1) * policy[SAVED] + policy[NEED], 0.0))
    saved, _, host, extra = sum(count * policy for policy, count in runs)
    return np.stack(np.broadcast_arrays(saved - sum(counts) * block.late_bytes, peak, host, extra))


def _over(block: Block, policies: Sequence[Array], runs: Sequence[Array], before: float, budget: float) -> Array:
    """Whether mixes with scans of equal length exceed the budget; shape of the ``runs``, (triples, counts of the last run)."""
    alike = np.nonzero(functools.reduce(np.logical_or, (_alike(*two) for two in itertools.combinations(runs, 2))))
    over = np.zeros(runs[0].shape, bool)
    measured = _measured(block, [policy[:, alike[0], 0] for policy in policies], [run[alike] for run in runs])
    over[alike] = before + measured[NEED] > budget
    return over


def _alike(one: Array, other: Array) -> Array:
    """Whether two lengths are those of scans that allocate their gradients together."""
    return (one == other) & (one > 1)


def first_mixes(
    block: Block,
    measures: Array,
    ends: Array,
    policies: Sequence[int],
    lean: Sequence[int],
    most: int,
    room: Room,
    host_price: float,
    *,
    cuts: bool = False,
) -> Array:
    """Mixes that fit in ``room``, shape (mixes, 10), for the first plan; only single policies if ``most`` is 1.

    They are all mixes of two policies, and where it helps to cut scans, those of three lean ones. The first four columns are
    those of `BlockTable.measures` for all layers together, as in `totals`: bytes saved are without the late bytes, and bytes
    needed are the peak above the memory in use before these layers. Of mixes that save, need and offload nearly the same bytes,
    only the cheapest is returned.

    Args:
        block: the kind of block, with the number of layers (`Block.repeats`).
        measures: shape (policies, 4), from `BlockTable.measures`.
        ends: whether each policy is legal for the last layer, shape (policies,).
        policies: the indices of the policies to mix.
        lean: the indices of the policies to mix in three runs, such as those that need least memory.
        host_price: seconds per byte in host memory.
        cuts: whether a scan may be cut between two runs of one policy (`cuts_help`).
    """
    layers = block.repeats
    counts = np.unique(np.linspace(0, layers - 1, min(layers, COUNTS)).round()) if most > 1 else np.zeros(1)
    chosen = np.array(policies, int)
    first, second, count = (axis.ravel() for axis in np.meshgrid(chosen, chosen[ends[chosen]], counts, indexing="ij"))
    keep = np.where(first == second, cuts | (count == 0), count > 0)
    mixed = np.stack([first, second, second, count, layers - count, 0 * count], axis=1)[keep]
    if cuts and layers > 2:
        places = np.unique(np.linspace(1, layers - 1, min(layers - 1, _PLACES)).round())
        pairs = [(one, other - one, layers - other) for one, other in itertools.combinations(places, 2)]
        triples = [triple for triple in itertools.product(lean, repeat=3) if ends[triple[2]]]
        mixed = np.concatenate([mixed, *(np.array([(*triple, *pair) for pair in pairs]) for triple in triples)])
    columns = _measured(block, [measures[run].T for run in mixed[:, :3].astype(int).T], mixed[:, 3:].T)
    mixes = np.column_stack([columns.T, mixed])
    fits = (mixes[:, NEED] <= (room.budget - room.before) * (1 + ROUNDING)) & (mixes[:, HOST] <= room.host * (1 + ROUNDING))
    mixes = mixes[fits]
    if not len(mixes):
        return mixes
    bins = _binned(mixes[:, SAVED], _SAVED_BINS) * _NEED_BINS + _binned(mixes[:, NEED], _NEED_BINS)
    if np.isfinite(room.host):
        bins = bins * _HOST_BINS + _binned(mixes[:, HOST], _HOST_BINS)
    order = np.lexsort((mixes[:, SAVED], mixes[:, EXTRA] + host_price * mixes[:, HOST]))
    _, cheapest = np.unique(bins[order], return_index=True)
    return mixes[order[cheapest]]


def runs_of(mix: Array) -> Runs:
    """The runs of one row of `first_mixes`."""
    pairs = zip(map(int, mix[4:7]), map(int, mix[7:]), strict=True)
    return tuple((policy, count) for policy, count in pairs if count)


def shared(kinds: Sequence[Array], budget: float, host_budget: float, host_price: float) -> list[Array] | None:
    """One mix per kind: the cheapest combination found that fits both budgets; None if no combination was found.

    Args:
        kinds: for each kind in forward order, its mixes, with the columns of `first_mixes`.
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
        keep = _fronts(states, host_is_limited=bool(np.isfinite(host_budget)))
        states = states[keep]
        trail.append((before[keep], chosen[keep]))
    at, path = int(states[:, 2].argmin()), []
    for mixes, (before, chosen) in zip(reversed(kinds), reversed(trail), strict=True):
        path.append(mixes[chosen[at]])
        at = int(before[at])
    return path[::-1]


def _fronts(states: Array, *, host_is_limited: bool) -> Array:
    """For each bin of saved bytes, the indices of its cheapest state and of its state with the fewest saved bytes.

    States are left out that are not cheaper than a state with fewer saved bytes. If host memory is limited, the result also
    has each bin's state with the fewest host bytes, because later kinds may need the rest of the host memory.
    """
    bins = _binned(states[:, 0], _BINS)

    def first(*keys: Array) -> Array:
        order = np.lexsort((*keys, bins))
        return order[np.unique(bins[order], return_index=True)[1]]

    keep = np.unique(np.concatenate([first(states[:, 2]), first(states[:, 0])]))
    keep = keep[np.lexsort((states[keep, 2], states[keep, 0]))]
    least = np.minimum.accumulate(states[keep, 2])
    keep = keep[np.concatenate([[True], states[keep, 2][1:] < least[:-1]])]
    return np.union1d(keep, first(states[:, 2], states[:, 1])) if host_is_limited else keep


def _binned(values: Array, bins: int) -> Array:
    low, high = values.min(), values.max()
    return ((values - low) / ((high - low) or 1.0) * (bins - 1)).astype(int)
