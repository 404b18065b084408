"""One array of either framework, laid beside the other: axes may be in another order, masks of another form."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from remat_jax.parity.tolerances import TOLERANCES

_MASKED = -1e9  # what is added to a score that is not to be seen is at most this, or minus infinity
_GAP = 1e-3  # and all else in the array is so much smaller


class Distance(NamedTuple):
    """How far Flax's array is from PyTorch's: the norm of their difference, and the norm of PyTorch's."""

    error: float
    reference: float

    def relative(self, floor: float) -> float:
        """The error as part of the reference, or of `floor` where the reference is smaller."""
        scale = max(self.reference, floor)
        return 0.0 if self.error == 0 else self.error / scale if scale else np.inf

    def is_bad(self, floor: float) -> bool:
        """Whether no rounding in float64 explains it."""
        return not self.relative(floor) <= TOLERANCES["float64"].value


def distance(torch: np.ndarray, flax: np.ndarray) -> Distance:
    """How far two arrays of one size are from each other, in the order of axes in which they are closest.

    Attention masks, whether boolean or to be added, are compared as what they let see; a boolean one may be
    the other's opposite.

    >>> distance(np.eye(2, 3), np.eye(3, 2)).error
    0.0
    >>> distance(np.array([True, False]), np.array([0.0, -np.inf])).error
    0.0
    """
    masks = visible(torch), visible(flax)
    if masks[0] is not None and masks[1] is not None:
        found = _nearest(masks[0], masks[1])
        if found.error and bool in (torch.dtype, flax.dtype):
            return min(found, _nearest(~masks[0], masks[1]))
        return found
    return _nearest(torch, flax)


def visible(x: np.ndarray) -> np.ndarray | None:
    """What an attention mask lets see; None for an array that is no mask."""
    if x.dtype == bool:
        return x
    if x.dtype.kind != "f" or not x.size or not np.min(x) <= _MASKED:
        return None
    seen = x == 0
    return seen if np.all(seen | (x <= _MASKED)) else None


def layouts(x: np.ndarray, shape: tuple[int, ...]) -> Iterator[np.ndarray]:
    """`x` in all orders of its axes, reshaped; as it is first, then those that have the shape by themselves."""
    orders = list(itertools.permutations(range(x.ndim))) if x.ndim <= 4 else [tuple(range(x.ndim))]
    moved = [np.transpose(x, order) for order in orders]
    for fits in (True, False):
        yield from (one.reshape(shape) for one in moved if (one.shape == shape) is fits)


def _nearest(torch: np.ndarray, flax: np.ndarray) -> Distance:
    best = Distance(np.inf, 0.0)
    for one in layouts(torch, flax.shape):
        best = min(best, _distance(one, flax))
        if not best.is_bad(0.0):
            break
    return best


def best_layout(torch: np.ndarray, flax: np.ndarray) -> np.ndarray:
    """`torch` in the order of axes in which it is `flax`; where it is in none, in the first that has the shape."""
    found = next((one for one in layouts(torch, flax.shape) if not _distance(one, flax).is_bad(0.0)), None)
    return next(layouts(torch, flax.shape)) if found is None else found


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

    How far below is no matter, and would hide every error beside it.

    >>> hidden(np.array([0.5, -2.0, np.finfo(np.float64).min])), hidden(np.array([-2e9, 1e9]))
    (array([False, False,  True]), array([False, False]))
    """
    low = x <= _MASKED
    return low if low.any() and np.max(np.abs(x[~low]), initial=0.0) < -_MASKED * _GAP else np.zeros_like(low)


def norm(x: np.ndarray) -> float:
    """The Euclidean norm of what is finite, and hides nothing, in an array."""
    x = x.astype(np.float64)
    x = x[np.isfinite(x) & ~hidden(x)]
    largest = float(np.max(np.abs(x), initial=0.0))
    return largest * float(np.linalg.norm(x / largest)) if largest else 0.0


def pairs(
    torch: Sequence[np.ndarray], flax: Sequence[np.ndarray], names: tuple[Sequence[str], Sequence[str]] = ((), ())
) -> list[tuple[int, int]]:
    """Which arrays of two calls to compare: those of one name, then each of Flax's with the first of PyTorch's that is left.

    Both are of one size and sort. Where both sides have a name in common, integers of different names are different things.

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
