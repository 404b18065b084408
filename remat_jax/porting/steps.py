"""The elementary steps of a transform: how they convert arrays and gradients between PyTorch and Flax.

Let F be a transform (PyTorch → Flax) and A its linear part. Values are converted by F and its inverse, gradients by Aᵀ
(Flax → PyTorch) and the inverse of Aᵀ (PyTorch → Flax). For a permutation, Aᵀ is the inverse of A, so gradients are converted
like values; for a scale, a shift and a sum they are not.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from remat_jax.errors import PortingError

Shape = tuple[int, ...]
Arrays = list[np.ndarray]


class Step:
    """A step from arrays to arrays; the base class is the identity.

    A step that joins or splits arrays changes their number. Gradients are converted like values unless a step overrides it.
    """

    def before(self, after: list[Shape], count: int) -> list[Shape]:
        """The shapes that become `after`; `count` is the number of arrays at the start of the whole transform.

        Raises:
            PortingError: no shapes become `after`.
        """
        return after

    def forward(self, arrays: Arrays, after: list[Shape]) -> Arrays:
        """PyTorch's values to Flax's, which have the shapes `after`."""
        return arrays

    def inverse(self, arrays: Arrays, before: list[Shape]) -> Arrays:
        """Flax's values to PyTorch's, which have the shapes `before`."""
        return arrays

    def adjoint(self, arrays: Arrays, before: list[Shape]) -> Arrays:
        """Flax's gradients to PyTorch's: the transpose of the linear part."""
        return self.inverse(arrays, before)

    def gradient(self, arrays: Arrays, after: list[Shape]) -> Arrays:
        """PyTorch's gradients to Flax's: the inverse of `adjoint`."""
        return self.forward(arrays, after)


@dataclass(frozen=True)
class Scale(Step):
    """Flax's array is `factor` times PyTorch's, for instance if only one framework scales an embedding."""

    factor: float

    def __post_init__(self) -> None:
        if not np.isfinite(self.factor) or self.factor == 0:
            raise PortingError(
                f"scale({self.factor}): the factor must be finite and not 0; otherwise the values could not be restored."
            )

    def __str__(self) -> str:
        return f"scale({self.factor!r})"

    def forward(self, arrays: Arrays, after: list[Shape]) -> Arrays:
        return [_exactly(x, lambda y: y * self.factor) for x in arrays]

    def inverse(self, arrays: Arrays, before: list[Shape]) -> Arrays:
        return [_exactly(x, lambda y: y / self.factor) for x in arrays]

    def adjoint(self, arrays: Arrays, before: list[Shape]) -> Arrays:
        return self.forward(arrays, before)

    def gradient(self, arrays: Arrays, after: list[Shape]) -> Arrays:
        return self.inverse(arrays, after)


@dataclass(frozen=True)
class Shift(Step):
    """Flax's array is PyTorch's plus `offset`: Gemma's norm multiplies by 1 + weight."""

    offset: float

    def __str__(self) -> str:
        return f"shift({self.offset!r})"

    def forward(self, arrays: Arrays, after: list[Shape]) -> Arrays:
        return [_exactly(x, lambda y: y + self.offset) for x in arrays]

    def inverse(self, arrays: Arrays, before: list[Shape]) -> Arrays:
        return [_exactly(x, lambda y: y - self.offset) for x in arrays]

    def adjoint(self, arrays: Arrays, before: list[Shape]) -> Arrays:
        return arrays

    def gradient(self, arrays: Arrays, after: list[Shape]) -> Arrays:
        return arrays


def _exactly(x: np.ndarray, function) -> np.ndarray:  # type: ignore[no-untyped-def]
    # Computed in float64, so that only the result is rounded, and only once.
    return function(x.astype(np.float64)).astype(x.dtype)


@dataclass(frozen=True)
class Flip(Step):
    """Reverse the order along some axes, as in the kernel of a transposed convolution."""

    axes: tuple[int, ...]

    def __str__(self) -> str:
        return f"flip({', '.join(map(str, self.axes))})"

    def forward(self, arrays: Arrays, after: list[Shape]) -> Arrays:
        return [np.flip(x, self.axes) for x in arrays]

    def inverse(self, arrays: Arrays, before: list[Shape]) -> Arrays:
        return self.forward(arrays, before)


@dataclass(frozen=True)
class Split(Step):
    """Split a PyTorch tensor along `axis` into several Flax arrays, whose shapes give the sizes."""

    axis: int

    def __str__(self) -> str:
        return f"split({self.axis})"

    def before(self, after: list[Shape], count: int) -> list[Shape]:
        return [joined(after, self.axis, str(self))]

    def forward(self, arrays: Arrays, after: list[Shape]) -> Arrays:
        return _cut(arrays, [shape[self.axis] for shape in after], self.axis)

    def inverse(self, arrays: Arrays, before: list[Shape]) -> Arrays:
        return [np.concatenate(arrays, self.axis)]


@dataclass(frozen=True)
class Concat(Step):
    """Concatenate several PyTorch tensors along `axis` into a Flax array; without `sizes` they have equal sizes."""

    axis: int
    sizes: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"concat({', '.join(map(str, (self.axis, *self.sizes)))})"

    def before(self, after: list[Shape], count: int) -> list[Shape]:
        if len(after) != 1:
            raise PortingError(f"{self} makes one array, but {len(after)} are needed")
        (shape,) = after
        if not -len(shape) <= self.axis < len(shape):
            raise PortingError(f"{self}: an array of shape {shape} has no such axis")
        total = shape[self.axis]
        sizes = self.sizes or (total // count,) * count
        if sum(sizes) != total or len(sizes) != count:
            raise PortingError(f"{self} of {count} tensors: the sizes {sizes} do not add up to axis {self.axis} of {shape}")
        axis = self.axis % len(shape)
        return [(*shape[:axis], size, *shape[axis + 1 :]) for size in sizes]

    def forward(self, arrays: Arrays, after: list[Shape]) -> Arrays:
        return [np.concatenate(arrays, self.axis)]

    def inverse(self, arrays: Arrays, before: list[Shape]) -> Arrays:
        return _cut(arrays, [shape[self.axis] for shape in before], self.axis)


@dataclass(frozen=True)
class Sum(Step):
    """Flax has a single array where PyTorch adds several, such as the two biases of an LSTM.

    The inverse gives the first tensor the whole value and the others 0: the same function with different tensors. The
    gradients of all these PyTorch tensors are equal.
    """

    def __str__(self) -> str:
        return "sum"

    def before(self, after: list[Shape], count: int) -> list[Shape]:
        if len(after) != 1:
            raise PortingError(f"sum makes one array, but {len(after)} are needed")
        return after * count

    def forward(self, arrays: Arrays, after: list[Shape]) -> Arrays:
        return [_sum(arrays)]

    def inverse(self, arrays: Arrays, before: list[Shape]) -> Arrays:
        return [arrays[0], *(np.zeros_like(arrays[0]) for _ in before[1:])]

    def adjoint(self, arrays: Arrays, before: list[Shape]) -> Arrays:
        return [arrays[0] for _ in before]

    def gradient(self, arrays: Arrays, after: list[Shape]) -> Arrays:
        return [the_same(arrays, "sum")]


@dataclass(frozen=True)
class GruBias(Step):
    """The two biases of PyTorch's GRU as the four of Flax's: r, z and n of the input, n of the state.

    For r and for z PyTorch adds two biases and Flax has one; the inverse gives the state's r and z the value 0.
    """

    def __str__(self) -> str:
        return "gru_bias"

    def before(self, after: list[Shape], count: int) -> list[Shape]:
        if len(after) != 4 or count != 2 or len(set(after)) != 1 or len(after[0]) != 1:
            raise PortingError(f"gru_bias makes four vectors of one size from two tensors, not {after} from {count}")
        return [(3 * after[0][0],)] * 2

    def forward(self, arrays: Arrays, after: list[Shape]) -> Arrays:
        (ir, iz, inew), (hr, hz, hnew) = (np.split(x, 3) for x in arrays)
        return [_sum([ir, hr]), _sum([iz, hz]), inew, hnew]

    def inverse(self, arrays: Arrays, before: list[Shape]) -> Arrays:
        r, z, inew, hnew = arrays
        return [np.concatenate([r, z, inew]), np.concatenate([np.zeros_like(r), np.zeros_like(z), hnew])]

    def adjoint(self, arrays: Arrays, before: list[Shape]) -> Arrays:
        r, z, inew, hnew = arrays
        return [np.concatenate([r, z, inew]), np.concatenate([r, z, hnew])]

    def gradient(self, arrays: Arrays, after: list[Shape]) -> Arrays:
        (ir, iz, inew), (hr, hz, hnew) = (np.split(x, 3) for x in arrays)
        return [the_same([ir, hr], "gru_bias"), the_same([iz, hz], "gru_bias"), inew, hnew]


def the_same(arrays: Sequence[np.ndarray], step: str) -> np.ndarray:
    """The first of several gradients that must be equal, because PyTorch adds their tensors.

    Raises:
        PortingError: the gradients differ by more than rounding, so they are not gradients of a sum.
    """
    first = arrays[0].astype(np.float64)
    # Half of the digits: far above rounding, far below the difference of unrelated gradients.
    limit = np.sqrt(float(np.spacing(np.asarray(1, arrays[0].dtype)))) * np.linalg.norm(first)
    if any(not np.linalg.norm(x.astype(np.float64) - first) <= limit for x in arrays[1:]):
        raise PortingError(
            f"{step}: the tensors are added in PyTorch, so their gradients are equal; the given gradients differ"
        )
    return arrays[0]


def joined(shapes: Sequence[Shape], axis: int, step: str) -> Shape:
    """The shape of arrays concatenated along `axis`.

    >>> joined([(2, 3), (4, 3)], 0, "split(0)")
    (6, 3)
    """
    rank = len(shapes[0])
    if not -rank <= axis < rank:
        raise PortingError(f"{step}: an array of shape {shapes[0]} has no such axis")
    axis %= rank
    if len({(*shape[:axis], *shape[axis + 1 :]) for shape in shapes}) != 1 or {len(shape) for shape in shapes} != {rank}:
        raise PortingError(f"{step}: the shapes {', '.join(map(str, shapes))} differ in more than axis {axis}")
    return (*shapes[0][:axis], sum(shape[axis] for shape in shapes), *shapes[0][axis + 1 :])


def _cut(arrays: Arrays, sizes: Iterable[int], axis: int) -> Arrays:
    return np.split(arrays[0], list(itertools.accumulate(sizes))[:-1], axis)


def _sum(arrays: Arrays) -> np.ndarray:
    return np.sum([x.astype(np.float64) for x in arrays], axis=0).astype(arrays[0].dtype)
