"""Compare an array of each framework: their axes may be in different orders, masks in different forms."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from remat_jax.parity.tolerances import TOLERANCES

_MASKED = -1e9  # additive masks hide a score by at most this number, or by minus infinity
_GAP = 1e-3  # all other numbers of such an array are at most this part of it


class Distance(NamedTuple):
    """How far Flax's array is from PyTorch's: the norm of their difference, and the norm of PyTorch's array."""

    error: float
    reference: float

    def relative(self, floor: float) -> float:
        """The error relative to the reference, or to `floor` if the reference is smaller."""
        scale = max(self.reference, floor)
        return 0.0 if self.error == 0 else self.error / scale if scale else np.inf

    def is_bad(self, floor: float) -> bool:
        """Whether the error is larger than rounding in float64 explains."""
        return not self.relative(floor) <= TOLERANCES["float64"].value


def distance(torch: np.ndarray, flax: np.ndarray) -> Distance:
    """How far apart two arrays of equal size are, in the order of axes that brings them closest.

    Attention masks, boolean or additive, are compared by the positions that they show; a boolean mask may be inverted.

    >>> distance(np.eye(2, 3), np.eye(3, 2)).error
    0.0
    >>> distance(np.array([True, False]), np.array([0.0, -np.inf])).error
    0.0
    """
    masks = visible(torch), visible(flax)
    if masks[0] is not None and masks[1] is not None:
        nearest = _nearest(masks[0], masks[1])
        if nearest.error and bool in (torch.dtype, flax.dtype):
            return min(nearest, _nearest(~masks[0], masks[1]))
        return nearest
    return _nearest(torch, flax)


def visible(x: np.ndarray) -> np.ndarray | None:
    """The positions that an attention mask shows; None for an array that is no mask."""
    if x.dtype == bool:
        return x
    if x.dtype.kind != "f" or not x.size or not np.min(x) <= _MASKED:
        return None
    seen = x == 0
    return seen if np.all(seen | (x <= _MASKED)) else None


def layouts(x: np.ndarray, shape: tuple[int, ...]) -> Iterator[np.ndarray]:
    """`x` in all orders of its axes, reshaped to `shape`; orders that have the shape already come first."""
    orders = list(itertools.permutations(range(x.ndim))) if x.ndim <= 4 else [tuple(range(x.ndim))]
    moved = [np.transpose(x, order) for order in orders]
    for fits in (True, False):
        yield from (array.reshape(shape) for array in moved if (array.shape == shape) is fits)


def _nearest(torch: np.ndarray, flax: np.ndarray) -> Distance:
    best = Distance(np.inf, 0.0)
    for one in layouts(torch, flax.shape):
        best = min(best, _distance(one, flax))
        if not best.is_bad(0.0):
            break
    return best


def best_layout(torch: np.ndarray, flax: np.ndarray) -> np.ndarray:
    """`torch` in the order of axes in which it equals `flax`; if none does, in the first order that fits the shape."""
    equal = next((layout for layout in layouts(torch, flax.shape) if not _distance(layout, flax).is_bad(0.0)), None)
    return next(layouts(torch, flax.shape)) if equal is None else equal


def _distance(torch: np.ndarray, flax: np.ndarray) -> Distance:
    one, other = torch.astype(np.float64), flax.astype(np.float64)
    shown = ~hidden(one)
    if not np.array_equal(shown, ~hidden(other)):
        return Distance(np.inf, norm(one))
    one, other = one[shown], other[shown]
    finite = np.isfinite(one)
    if not (np.array_equal(finite, np.isfinite(other)) and np.array_equal(one[~finite], other[~finite], equal_nan=True)):
        return Distance(np.inf, norm(one))
    return Distance(norm(one[finite] - other[finite]), norm(one))


def hidden(x: np.ndarray) -> np.ndarray:
    """Where an array hides a position from a softmax, by a number far below all others, such as a dtype's least.

    Such numbers are left out of a comparison: their size has no effect and would hide every other error.

    >>> hidden(np.array([0.5, -2.0, np.finfo(np.float64).min])), hidden(np.array([-2e9, 1e9]))
    (array([False, False,  True]), array([False, False]))
    """
    low = x <= _MASKED
    return low if low.any() and np.max(np.abs(x[~low]), initial=0.0) < -_MASKED * _GAP else np.zeros_like(low)


def norm(x: np.ndarray) -> float:
    """The Euclidean norm of an array's finite elements, without those that hide a position."""
    x = x.astype(np.float64)
    x = x[np.isfinite(x) & ~hidden(x)]
    largest = float(np.max(np.abs(x), initial=0.0))
    return largest * float(np.linalg.norm(x / largest)) if largest else 0.0


def pairs(
    torch: Sequence[np.ndarray], flax: Sequence[np.ndarray], names: tuple[Sequence[str], Sequence[str]] = ((), ())
) -> list[tuple[int, int]]:
    """The arrays of two calls to compare: first those with equal names, then each Flax array with PyTorch's first free array.

    The arrays of a pair agree in size and sort. If the calls share a name, integer arrays with different names never pair.

    >>> pairs([np.zeros((2, 3)), np.zeros(4)], [np.zeros(4), np.zeros(5), np.zeros((3, 2))])
    [(1, 0), (0, 2)]
    >>> ids, mask, places = np.array([3, 4]), np.array([1, 1]), np.array([0, 1])
    >>> pairs([ids, mask], [mask, ids, places], (("ids", "mask"), ("mask", "ids", "places")))
    [(1, 0), (0, 1)]
    """
    theirs, ours = ([*side, *[""] * len(arrays)] for side, arrays in zip(names, (torch, flax), strict=True))
    common = ({*theirs} & {*ours}) - {""}
    left, found = list(range(len(torch))), dict[int, int]()

    def fits(k: int, place: int, by_name: bool) -> bool:
        if torch[k].size != flax[place].size or _sort(torch[k]) != _sort(flax[place]):
            return False
        if by_name:
            return ours[place] in common and theirs[k] == ours[place]
        different = theirs[k] and ours[place] and flax[place].dtype.kind in "iu"
        return not {theirs[k], ours[place]} & common and not (common and different)

    for by_name, place in itertools.product((True, False), range(len(flax))):
        other = next((k for k in left if fits(k, place, by_name)), None)
        if place not in found and other is not None:
            left.remove(other)
            found[place] = other
    return sorted(((other, place) for place, other in found.items()), key=lambda pair: pair[1])


def _sort(x: np.ndarray) -> str:
    return "mask" if visible(x) is not None else "number" if x.dtype.kind == "f" else "integer"
