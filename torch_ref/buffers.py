"""Keeps the recomputation of a block from updating the block's buffers a second time.

The recomputation starts from the buffers that the forward pass started from, and what it writes is dropped: a batch norm counts
each batch once, and a spectral norm or a codebook is recomputed from the values that forward used.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.parameter import is_lazy

from torch_ref.host import version_of


@dataclass
class _Buffer:
    module: nn.Module
    name: str
    tensor: torch.Tensor | None
    version: int | None
    before: torch.Tensor | None

    @property
    def is_changed(self) -> bool:
        now = self.module._buffers.get(self.name)
        if now is not self.tensor:
            return True
        return self.tensor is not None and (version_of(self.tensor) != self.version or self._has_other_values())

    def _has_other_values(self) -> bool:
        # The kernels of batch norms change their running statistics without changing the version counter.
        tensor, before = self.tensor, self.before
        if tensor is None or before is None or not (tensor.is_floating_point() or tensor.is_complex()):
            return False
        if tensor.is_meta or isinstance(tensor, FakeTensor):
            return False
        return not torch.equal(tensor, before)


class Buffers:
    """The buffers of some modules, with copies of their values."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._buffers = [
            _Buffer(
                module,
                name,
                tensor,
                *((None, None) if tensor is None or is_lazy(tensor) else (version_of(tensor), _copy(tensor))),
            )
            for module in modules
            for name, tensor in module._buffers.items()
        ]

    def changed(self) -> list[str]:
        """The names of the buffers that have changed since; the copies of all other buffers are dropped."""
        self._buffers = [buffer for buffer in self._buffers if buffer.is_changed]
        return [f"{type(buffer.module).__name__}.{buffer.name}" for buffer in self._buffers]

    @contextmanager
    def as_before(self) -> Iterator[None]:
        """Inside the context, the modules have copies of the values from before; afterwards, their own buffers again."""
        now = [buffer.module._buffers.get(buffer.name) for buffer in self._buffers]
        for buffer, tensor in zip(self._buffers, now, strict=True):
            # A lazy module's buffer had no value before the first call.
            before = tensor if buffer.before is None and buffer.tensor is not None else buffer.before
            buffer.module._buffers[buffer.name] = _copy(before)
        try:
            yield
        finally:
            for buffer, tensor in zip(self._buffers, now, strict=True):
                buffer.module._buffers[buffer.name] = tensor


def _copy(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.detach().clone()
