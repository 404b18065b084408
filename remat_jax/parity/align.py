"""Compare a PyTorch array with a Flax array: their axes may be in different orders, and masks may have different forms."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from remat_jax.parity.rule import norm, relative_error
from remat_jax.parity.tolerances import TOLERANCES

_MASKED = -1e9  # additive masks hide a score by adding this number, a lower number, or minus infinity
_GAP = 1e-3  # `hidden`: all numbers above _MASKED must be smaller in magnitude than -_MASKED * _GAP = 1e6


class Distance(NamedTuple):
    """The distance of two arrays: `error` is the norm of their difference, `reference` the norm of PyTorch's array."""

    error: float
    reference: float

    def relative(self, floor: float) -> float:
        """The error relative to the reference, or to `floor` if the reference is smaller."""
        return relative_error(self.error, self.reference, floor)

    def is_bad(self, floor: float) -> bool:
        """Whether the error is too large to be float64 rounding."""
        return not self.relative(floor) <= TOLERANCES["float64"].value


def distance(torch: np.ndarray, flax: np.ndarray) -> Distance:
    """The smallest distance between two arrays of equal size over the orders of `torch`'s axes (`_layouts`).

    Two attention masks, boolean or additive, are compared by the positions that they show. If either is boolean, a
    mask and its inverse count as equal.

    >>> distance(np.eye(2, 3), np.eye(3, 2)).error
    0.0
    >>> distance(np.array([True, False]), np.array([0.0, -np.inf])).error
    0.0
    """
    theirs, ours = visible(torch), visible(flax)
    if theirs is None or ours is None:
        return _nearest(torch, flax)
    nearest = _nearest(theirs, ours)
    inverted = nearest.error and bool in (torch.dtype, flax.dtype)
    return min(nearest, _nearest(~theirs, ours)) if inverted else nearest


def visible(x: np.ndarray) -> np.ndarray | None:
    """A boolean array of the positions that the attention mask `x` shows; None if `x` is no mask."""
    if x.dtype == bool:
        return x
    if x.dtype.kind != "f" or not x.size or not float(np.min(x)) <= _MASKED:
        return None
    shown = x == 0
    return shown if np.all(shown | (x.astype(np.float64) <= _MASKED)) else None


def _layouts(x: np.ndarray, shape: tuple[int, ...]) -> Iterator[np.ndarray]:
    """`x` in every order of its axes, reshaped to `shape`; orders that need no reshape come first.

    If `x` has more than four axes, only their given order is used.
    """
    orders = list(itertools.permutations(range(x.ndim))) if x.ndim <= 4 else [tuple(range(x.ndim))]
    moved = [np.transpose(x, order) for order in orders]
    for fits in (True, False):
        yield from (array.reshape(shape) for array in moved if (array.shape == shape) is fits)


def _nearest(torch: np.ndarray, flax: np.ndarray) -> Distance:
    best = Distance(np.inf, 0.0)
    for layout in _layouts(torch, flax.shape):
        best = min(best, _distance(layout, flax))
        if not best.is_bad(0.0):
            break
    return best


def best_layout(torch: np.ndarray, flax: np.ndarray) -> np.ndarray:
    """`torch` with its axes reordered so that it equals `flax`; if no order makes it equal, the first of `_layouts`."""
    equal = (layout for layout in _layouts(torch, flax.shape) if not _distance(layout, flax).is_bad(0.0))
    return next(equal, next(_layouts(torch, flax.shape)))


def _distance(torch: np.ndarray, flax: np.ndarray) -> Distance:
    theirs, ours = torch.astype(np.float64), flax.astype(np.float64)
    reference, shown = shown_norm(theirs), ~hidden(theirs)
    if not np.array_equal(shown, ~hidden(ours)):
        return Distance(np.inf, reference)
    theirs, ours = theirs[shown], ours[shown]
    finite = np.isfinite(theirs)
    if not (np.array_equal(finite, np.isfinite(ours)) and np.array_equal(theirs[~finite], ours[~finite], equal_nan=True)):
        return Distance(np.inf, reference)
    return Distance(shown_norm(theirs[finite] - ours[finite]), reference)


def hidden(x: np.ndarray) -> np.ndarray:
    """A boolean array of the positions that `x` hides from a softmax by a number far below all other numbers.

    These numbers are not compared: their size has no effect on the softmax and would hide every other error.

    >>> hidden(np.array([0.5, -2.0, np.finfo(np.float64).min])), hidden(np.array([-2e9, 1e9]))
    (array([False, False,  True]), array([False, False]))
    """
    low = x <= _MASKED
    return low if low.any() and np.max(np.abs(x[~low]), initial=0.0) < -_MASKED * _GAP else np.zeros_like(low)


def shown_norm(x: np.ndarray) -> float:
    """The Euclidean norm of an array's finite elements, except elements that hide a position."""
    return norm(x[np.isfinite(x) & ~hidden(x)])


def pairs(
    torch: Sequence[np.ndarray], flax: Sequence[np.ndarray], names: tuple[Sequence[str], Sequence[str]] = ((), ())
) -> list[tuple[int, int]]:
    """Index pairs (PyTorch, Flax) of the arrays to compare, in Flax's order.

    Arrays with equal names are paired first; each remaining Flax array is paired with the first PyTorch array that fits.
    `names` are the names of both sides' arrays, PyTorch's first; an array without a name has "". Paired arrays have equal sizes
    and are both masks, both floating-point numbers, or both integers. If the sides share at least one name, two integer arrays
    whose names differ are never paired.

    >>> pairs([np.zeros((2, 3)), np.zeros(4)], [np.zeros(4), np.zeros(5), np.zeros((3, 2))])
    [(1, 0), (0, 2)]
    >>> ids, mask, places = np.array([3, 4]), np.array([1, 1]), np.array([0, 1])
    >>> pairs([ids, mask], [mask, ids, places], (("ids", "mask"), ("mask", "ids", "places")))
    [(1, 0), (0, 1)]
    """
    theirs, ours = ([*side, *[""] * len(arrays)] for side, arrays in zip(names, (torch, flax), strict=True))
    common = ({*theirs} & {*ours}) - {""}
    free, paired = list(range(len(torch))), dict[int, int]()

    def fits(k: int, place: int, by_name: bool) -> bool:
        if torch[k].size != flax[place].size or _sort(torch[k]) != _sort(flax[place]):
            return False
        if by_name:
            return ours[place] in common and theirs[k] == ours[place]
        different = theirs[k] and ours[place] and flax[place].dtype.kind in "iu"
        return not {theirs[k], ours[place]} & common and not (common and different)

    for by_name, place in itertools.product((True, False), range(len(flax))):
        other = next((k for k in free if fits(k, place, by_name)), None)
        if place not in paired and other is not None:
            free.remove(other)
            paired[place] = other
    return [(other, place) for place, other in sorted(paired.items())]


def _sort(x: np.ndarray) -> str:
    return "mask" if visible(x) is not None else "number" if x.dtype.kind == "f" else "integer"
