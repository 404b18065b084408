"""The elementary steps of a transform: how they convert arrays and gradients between PyTorch and Flax.

Let F be a transform (PyTorch → Flax) and A its linear part. Values are converted by F and its inverse, gradients by Aᵀ
(Flax → PyTorch) and the inverse of Aᵀ (PyTorch → Flax). For a permutation, Aᵀ is the inverse of A, so gradients are converted
like values; for a scale, a shift and a sum they are not.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from remat_jax.errors import PortingError

Shape = tuple[int, ...]
Arrays = list[np.ndarray]
Group = tuple[str, ...]


class Step:
    """A step from arrays to arrays; the base class is the identity, and converts gradients like values.

    `before` returns the shapes of the step's inputs, given those of its results; `count` is the number of PyTorch tensors of
    the whole transform. The other methods convert as in `Transform`; their second argument has the shapes of their results.
    """

    def before(self, after: list[Shape], count: int) -> list[Shape]:
        return after

    def forward(self, arrays: Arrays, after: list[Shape]) -> Arrays:
        return arrays

    def inverse(self, arrays: Arrays, before: list[Shape]) -> Arrays:
        return arrays

    def adjoint(self, arrays: Arrays, before: list[Shape]) -> Arrays:
        return self.inverse(arrays, before)

    def gradient(self, arrays: Arrays, after: list[Shape]) -> Arrays:
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
        return _rounded_once(arrays, lambda x: x * self.factor)

    def inverse(self, arrays: Arrays, before: list[Shape]) -> Arrays:
        return _rounded_once(arrays, lambda x: x / self.factor)

    def adjoint(self, arrays: Arrays, before: list[Shape]) -> Arrays:
        return self.forward(arrays, before)

    def gradient(self, arrays: Arrays, after: list[Shape]) -> Arrays:
        return self.inverse(arrays, after)


@dataclass(frozen=True)
class Shift(Step):
    """Flax's array is PyTorch's plus `offset`, as for Gemma's norm, which multiplies by 1 + weight in PyTorch."""

    offset: float

    def __str__(self) -> str:
        return f"shift({self.offset!r})"

    def forward(self, arrays: Arrays, after: list[Shape]) -> Arrays:
        return _rounded_once(arrays, lambda x: x + self.offset)

    def inverse(self, arrays: Arrays, before: list[Shape]) -> Arrays:
        return _rounded_once(arrays, lambda x: x - self.offset)

    def adjoint(self, arrays: Arrays, before: list[Shape]) -> Arrays:
        return arrays

    def gradient(self, arrays: Arrays, after: list[Shape]) -> Arrays:
        return arrays


def _rounded_once(arrays: Arrays, function: Callable[[np.ndarray], np.ndarray]) -> Arrays:
    """`function` of each array, computed in float64 and rounded to the array's dtype."""
    return [function(x.astype(np.float64)).astype(x.dtype) for x in arrays]


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
        first, rank = after[0], len(after[0])
        axis = _axis(self.axis, first, self)
        if {len(shape) for shape in after} != {rank} or len({(*shape[:axis], *shape[axis + 1 :]) for shape in after}) != 1:
            raise PortingError(f"{self}: the shapes {', '.join(map(str, after))} differ in more than axis {axis}")
        return [(*first[:axis], sum(shape[axis] for shape in after), *first[axis + 1 :])]

    def forward(self, arrays: Arrays, after: list[Shape]) -> Arrays:
        return _cut(arrays, [shape[self.axis] for shape in after], self.axis)

    def inverse(self, arrays: Arrays, before: list[Shape]) -> Arrays:
        return [np.concatenate(arrays, self.axis)]


@dataclass(frozen=True)
class Concat(Step):
    """Concatenate several PyTorch tensors along `axis` into a Flax array; without `sizes`, the tensors' sizes are equal."""

    axis: int
    sizes: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"concat({', '.join(map(str, (self.axis, *self.sizes)))})"

    def before(self, after: list[Shape], count: int) -> list[Shape]:
        shape = _single(after, self)
        axis = _axis(self.axis, shape, self)
        total = shape[axis]
        sizes = self.sizes or (total // count,) * count
        if sum(sizes) != total or len(sizes) != count:
            raise PortingError(f"{self} of {count} tensors: the sizes {sizes} do not add up to axis {self.axis} of {shape}")
        return [(*shape[:axis], size, *shape[axis + 1 :]) for size in sizes]

    def forward(self, arrays: Arrays, after: list[Shape]) -> Arrays:
        return [np.concatenate(arrays, self.axis)]

    def inverse(self, arrays: Arrays, before: list[Shape]) -> Arrays:
        return _cut(arrays, [shape[self.axis] for shape in before], self.axis)


@dataclass(frozen=True)
class Sum(Step):
    """Flax has a single array where PyTorch adds several tensors, such as the two biases of an LSTM.

    The inverse sets the first tensor to the whole value and the others to 0. The gradients of these tensors are equal.
    """

    def __str__(self) -> str:
        return "sum"

    def before(self, after: list[Shape], count: int) -> list[Shape]:
        return [_single(after, self)] * count

    def forward(self, arrays: Arrays, after: list[Shape]) -> Arrays:
        return [_sum(arrays)]

    def inverse(self, arrays: Arrays, before: list[Shape]) -> Arrays:
        return [arrays[0], *(np.zeros_like(arrays[0]) for _ in before[1:])]

    def adjoint(self, arrays: Arrays, before: list[Shape]) -> Arrays:
        return [arrays[0] for _ in before]

    def gradient(self, arrays: Arrays, after: list[Shape]) -> Arrays:
        return [_the_same(arrays, self)]


@dataclass(frozen=True)
class GruBias(Step):
    """PyTorch's two GRU biases, of input and state, become four in Flax: the sums for gates r and z, and both biases of n."""

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
        return [_the_same([ir, hr], self), _the_same([iz, hz], self), inew, hnew]


def _single(after: list[Shape], step: Step) -> Shape:
    if len(after) != 1:
        raise PortingError(f"{step} makes one array, but {len(after)} are needed")
    return after[0]


def _axis(axis: int, shape: Shape, step: Step) -> int:
    """The axis, counted from the front."""
    if not -len(shape) <= axis < len(shape):
        raise PortingError(f"{step}: an array of shape {shape} has no such axis")
    return axis % len(shape)


def _the_same(arrays: Arrays, step: Step) -> np.ndarray:
    """The first of several gradients, which must be equal up to rounding because PyTorch adds their tensors."""
    first = arrays[0].astype(np.float64)
    # Half of the digits must agree: the limit is far above rounding and far below the difference of unrelated gradients.
    limit = np.sqrt(float(np.spacing(np.asarray(1, arrays[0].dtype)))) * np.linalg.norm(first)
    if any(not np.linalg.norm(x.astype(np.float64) - first) <= limit for x in arrays[1:]):
        raise PortingError(
            f"{step}: the tensors are added in PyTorch, so their gradients are equal; the given gradients differ"
        )
    return arrays[0]


def _cut(arrays: Arrays, sizes: Iterable[int], axis: int) -> Arrays:
    return np.split(arrays[0], list(itertools.accumulate(sizes))[:-1], axis)


def _sum(arrays: Arrays) -> np.ndarray:
    return np.sum([x.astype(np.float64) for x in arrays], axis=0).astype(arrays[0].dtype)


@dataclass(frozen=True)
class Rearrange(Step):
    """Split, permute and join the axes of each array: PyTorch's axes on the left, Flax's on the right.

    A name is an axis, names in parentheses are factors of one axis (the last varies fastest), and `1` is an axis of size one.
    Sizes are read from Flax's shape; if a Flax axis joins several names, `sizes` must give all but one of their sizes.

    >>> Rearrange("(h d) e -> e h d").forward([np.arange(6).reshape(6, 1)], [(1, 2, 3)])[0]
    array([[[0, 1, 2],
            [3, 4, 5]]])
    """

    pattern: str
    sizes: tuple[tuple[str, int], ...] = ()

    def __post_init__(self) -> None:
        left, arrow, right = self.pattern.partition("->")
        if not arrow:
            raise PortingError(f"{self.pattern!r} has no '->'; write the axes of both sides, as in '(h d) e -> e h d'.")
        object.__setattr__(self, "pattern", f"{' '.join(left.split())} -> {' '.join(right.split())}")
        object.__setattr__(self, "sizes", tuple(sorted(self.sizes)))
        atoms = {name for group in self._sides[0] for name in group}
        if atoms != {name for group in self._sides[1] for name in group}:
            raise PortingError(f"{self.pattern!r}: the two sides name different axes; name the same axes on both.")
        strange = [name for name, size in self.sizes if name not in atoms or size < 1]
        if strange:
            raise PortingError(f"{self.pattern!r}: {', '.join(strange)}: no axis has this name, or the size is not positive.")
        for group in self._sides[1]:
            if sum(name not in dict(self.sizes) for name in group) > 1:
                assignments = ", ".join(f"{name}=…" for name in group[1:])
                raise PortingError(
                    f"{self.pattern!r}: the size of ({' '.join(group)}) can be divided in many ways; give {assignments}."
                )

    @functools.cached_property
    def _sides(self) -> tuple[tuple[Group, ...], tuple[Group, ...]]:
        left, _, right = self.pattern.partition("->")
        return _groups(left, self.pattern), _groups(right, self.pattern)

    def __str__(self) -> str:
        return ", ".join([self.pattern, *(f"{name}={size}" for name, size in self.sizes)])

    def before(self, after: list[Shape], count: int) -> list[Shape]:
        return [_shape(self._sides[0], self._measure(shape)) for shape in after]

    def forward(self, arrays: Arrays, after: list[Shape]) -> Arrays:
        left, right = self._sides
        return [_move(x, left, right, self._measure(shape)) for x, shape in zip(arrays, after, strict=True)]

    def inverse(self, arrays: Arrays, before: list[Shape]) -> Arrays:
        left, right = self._sides
        return [_move(x, right, left, self._measure(x.shape)) for x in arrays]

    def _measure(self, shape: Shape) -> dict[str, int]:
        """The size of every named axis, read from the right side's shape."""
        right, fixed_sizes = self._sides[1], dict(self.sizes)
        if len(shape) != len(right):
            raise PortingError(f"{self.pattern!r} ends in {len(right)} axes, but the shape {tuple(shape)} has {len(shape)}")
        sizes = dict(fixed_sizes)
        for group, total in zip(right, shape, strict=True):
            product = math.prod(fixed_sizes[name] for name in group if name in fixed_sizes)
            rest = [name for name in group if name not in fixed_sizes]
            if total % product if rest else total != product:
                raise PortingError(
                    f"{str(self)!r}: an axis of {tuple(shape)}, of size {total}, does not divide into ({' '.join(group)})"
                )
            sizes |= dict.fromkeys(rest, total // product)
        return sizes


def _groups(side: str, pattern: str) -> tuple[Group, ...]:
    tokens = re.findall(r"\([^()]*\)|\S+", side)
    groups = tuple(() if token == "1" else tuple(token.strip("()").split()) for token in tokens)
    atoms = [name for group in groups for name in group]
    if any(not name.isidentifier() for name in atoms) or len(set(atoms)) != len(atoms):
        raise PortingError(f"{pattern!r}: {side.strip()!r} must be names of axes, each once, or '1', as in '(h d) e'.")
    return groups


def _shape(groups: tuple[Group, ...], sizes: dict[str, int]) -> Shape:
    return tuple(math.prod(sizes[name] for name in group) for group in groups)


def _move(x: np.ndarray, source: tuple[Group, ...], to: tuple[Group, ...], sizes: dict[str, int]) -> np.ndarray:
    here, there = ([name for group in side for name in group] for side in (source, to))
    divided = x.reshape([sizes[name] for name in here])
    return divided.transpose([here.index(name) for name in there]).reshape(_shape(to, sizes))
