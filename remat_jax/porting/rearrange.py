"""Reshaping and permuting by a pattern, in the notation of einops: `(h d) e -> e h d`."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

import numpy as np

from remat_jax.errors import PortingError
from remat_jax.porting.steps import Arrays, Shape, Step

Group = tuple[str, ...]


@dataclass(frozen=True)
class Rearrange(Step):
    """Split, permute and join the axes of each array: PyTorch's axes on the left, Flax's on the right.

    A name is an axis, names in parentheses split a single axis (the last varies fastest), and `1` is an axis of size one.
    Sizes are read from Flax's shape; if an axis there joins several names, all but one of their sizes must be in `sizes`.

    Raises:
        PortingError: the two sides have different names, or sizes are missing.

    >>> heads = Rearrange("(h d) e -> e h d")
    >>> heads.before([(8, 2, 4)], 1)
    [(8, 8)]
    >>> heads.forward([np.arange(6).reshape(6, 1)], [(1, 2, 3)])[0]
    array([[[0, 1, 2],
            [3, 4, 5]]])
    """

    pattern: str
    sizes: tuple[tuple[str, int], ...] = ()

    def __post_init__(self) -> None:
        left, arrow, right = self.pattern.partition("->")
        if not arrow:
            raise PortingError(f"{self.pattern!r} has no '->'; write the axes of both, as in '(h d) e -> e h d'.")
        object.__setattr__(self, "pattern", f"{' '.join(left.split())} -> {' '.join(right.split())}")
        object.__setattr__(self, "sizes", tuple(sorted(self.sizes)))
        object.__setattr__(self, "_left", _groups(left, self.pattern))
        object.__setattr__(self, "_right", _groups(right, self.pattern))
        atoms = [name for group in self._sides[0] for name in group]
        if set(atoms) != {name for group in self._sides[1] for name in group}:
            raise PortingError(f"{self.pattern!r}: the two sides name different axes; name the same on both.")
        strange = [name for name, size in self.sizes if name not in atoms or size < 1]
        if strange:
            raise PortingError(f"{self.pattern!r}: {', '.join(strange)}: no axis has this name, or the size is not positive.")
        for group in self._sides[1]:
            if sum(name not in dict(self.sizes) for name in group) > 1:
                given = ", ".join(f"{name}=…" for name in group[1:])
                raise PortingError(
                    f"{self.pattern!r}: the size of ({' '.join(group)}) can be divided in many ways; give {given}."
                )

    @property
    def _sides(self) -> tuple[tuple[Group, ...], tuple[Group, ...]]:
        return self._left, self._right  # type: ignore[attr-defined]  # set by __post_init__, not a dataclass field

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
        right, known = self._sides[1], dict(self.sizes)
        if len(shape) != len(right):
            raise PortingError(f"{self.pattern!r} ends in {len(right)} axes, but the shape {tuple(shape)} has {len(shape)}")
        sizes = dict(known)
        for group, total in zip(right, shape, strict=True):
            given = math.prod(known[name] for name in group if name in known)
            rest = [name for name in group if name not in known]
            if (total % given if rest else total != given) or (given == 0):
                raise PortingError(
                    f"{str(self)!r}: an axis of {tuple(shape)}, of size {total}, does not divide into ({' '.join(group)})"
                )
            sizes |= dict.fromkeys(rest, total // given)
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
