"""A tensor's position in its storage, and whether it covers other views of the storage."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch


@dataclass(frozen=True)
class Layout:
    """The layout of a view of a storage.

    Attributes:
        offset: the index of the first element.
        size: the shape.
        stride: the step of each dimension, in elements.
        dtype: the data type.
        is_lazy: whether a conjugation or negation is still pending.

    >>> import torch
    >>> whole = Layout.of(torch.zeros(4, 6))
    >>> whole.is_dense, whole.extent, whole.covers(Layout.of(torch.zeros(4, 6)[1:3, ::2]))
    (True, 24, True)
    >>> Layout.of(torch.zeros(4, 6)[:, ::2]).is_dense
    False
    """

    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    is_lazy: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Layout:
        """The layout of a strided tensor."""
        is_lazy = tensor.is_conj() or tensor.is_neg()
        return cls(tensor.storage_offset(), tuple(tensor.size()), tuple(tensor.stride()), tensor.dtype, is_lazy)

    @property
    def expanded(self) -> tuple[int, ...]:
        """The dimensions that repeat the same elements (stride 0)."""
        return tuple(d for d, (size, step) in enumerate(zip(self.size, self.stride, strict=True)) if step == 0 and size > 1)

    @cached_property
    def extent(self) -> int:
        """The length of the storage range that the view reads, from its first to its last element."""
        if 0 in self.size:
            return 0
        return 1 + sum((size - 1) * step for size, step in zip(self.size, self.stride, strict=True))

    @cached_property
    def is_dense(self) -> bool:
        """Whether the view reads every element of its storage range, and is not lazy."""
        read = prod(size for d, size in enumerate(self.size) if d not in self.expanded)
        if self.is_lazy or read != self.extent:
            return False
        steps = sorted((step, size) for step, size in zip(self.stride, self.size, strict=True) if step and size > 1)
        reached = 1
        for step, size in steps:
            if step != reached:  # dimensions overlap: some elements are read twice, and some are never read
                return False
            reached *= size
        return True

    def covers(self, other: Layout) -> bool:
        """Whether a copy of this view contains every element of `other`, a view of the same storage."""
        if self == other:
            return True
        inside = self.offset <= other.offset and other.offset + other.extent <= self.offset + self.extent
        return self.is_dense and not other.is_lazy and self.dtype == other.dtype and inside
