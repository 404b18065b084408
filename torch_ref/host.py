"""Copies of tensors in host memory: made, shared, counted, brought back.

A host copy is pinned and copied without waiting where the tensor is on a CUDA device. Where it is on the CPU
already it is a plain second copy, so that a machine without an accelerator moves the same bytes as one with it.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

_copying = threading.local()


class HostCopy:
    """The content of one tensor, in host memory, until it is garbage collected.

    Attributes:
        tensor: the copy, without dimensions that were only expanded.
        nbytes: its size in bytes.
        version: version counter of the tensor when it was copied; None where it has none.
        source_storage: weak reference to the storage that was copied, to tell whether the device gave it back.
        source_nbytes: size of that storage in bytes.
    """

    def __init__(self, source: torch.Tensor, pin: bool) -> None:
        self.device = source.device
        self.size = source.size()
        with torch.no_grad(), _marked_as_host():
            self.tensor, self._copied = _copy_to_host(_without_expanded(source.detach()), pin)
        self.nbytes = self.tensor.nbytes
        self.version = version_of(source)
        storage = None if _is_opaque(source) else source.untyped_storage()
        # A weak reference of Python's: one of torch.multiprocessing's own keeps MemTracker of PyTorch 2.7 from noticing
        # that the storage is gone.
        self.source_storage = None if storage is None else weakref.ref(storage)
        self.source_nbytes = source.nbytes if storage is None else storage.nbytes()
        _live.add(self)

    def bring_back(self, requires_grad: bool) -> torch.Tensor:
        """Copy the content to the device that it came from; the host copy stays as it is.

        With `requires_grad` the result is no leaf, so that a block may change it in place as it could its own input.
        """
        if self._copied is not None:
            torch.cuda.current_stream(self.device).wait_event(self._copied)
        with torch.set_grad_enabled(requires_grad):
            host = self.tensor.detach().requires_grad_(requires_grad)
            back = host.to(self.device, non_blocking=self._copied is not None, copy=True)
            return back if back.size() == self.size else back.expand(self.size)


_live: weakref.WeakSet[HostCopy] = weakref.WeakSet()
_shared: weakref.WeakValueDictionary[tuple[Any, ...], HostCopy] = weakref.WeakValueDictionary()


def to_host(source: torch.Tensor) -> tuple[HostCopy, bool]:
    """Copy a tensor to host memory, or find the copy that exists already; says whether a copy was made.

    Two arguments share a copy if they are the same view of the same storage at the same version. Writes that hide
    from the version counter (through `.data` or a NumPy alias) are not seen; autograd does not see them either.
    """
    key = _identity(source)
    found = None if key is None else _shared.get(key)
    # The address in the key may have gone to another storage meanwhile.
    if found is not None and found.source_storage is not None and found.source_storage() is source.untyped_storage():
        return found, False
    made = HostCopy(source, pin=True)
    if key is not None:
        _shared[key] = made
    return made, True


def live_host_copies() -> list[HostCopy]:
    """List the host copies that something still holds."""
    return list(_live)


def is_copying_to_host() -> bool:
    """Tell whether the memory that is being allocated on this thread is host memory."""
    return getattr(_copying, "depth", 0) > 0


def version_of(tensor: torch.Tensor) -> int | None:
    """Give a tensor's version counter, or None for an inference tensor, which has none."""
    return None if tensor.is_inference() else tensor._version


@contextmanager
def _marked_as_host() -> Iterator[None]:
    _copying.depth = getattr(_copying, "depth", 0) + 1
    try:
        yield
    finally:
        _copying.depth -= 1


def _copy_to_host(tensor: torch.Tensor, pin: bool) -> tuple[torch.Tensor, torch.cuda.Event | None]:
    if not pin or tensor.device.type != "cuda" or _is_opaque(tensor):
        return tensor.to("cpu", copy=True), None
    host = torch.empty_like(tensor, device="cpu", pin_memory=True)
    host.copy_(tensor, non_blocking=True)
    # The recomputation may run on another stream than the one that the copy was put on.
    copied = torch.cuda.Event()
    copied.record(torch.cuda.current_stream(tensor.device))
    return host, copied


def _without_expanded(tensor: torch.Tensor) -> torch.Tensor:
    if _is_opaque(tensor):
        return tensor
    for dim, (size, stride) in enumerate(zip(tensor.size(), tensor.stride(), strict=True)):
        if stride == 0 and size > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def _identity(tensor: torch.Tensor) -> tuple[Any, ...] | None:
    version = version_of(tensor)
    if version is None or _is_opaque(tensor):
        return None
    view = (tensor.storage_offset(), tensor.size(), tensor.stride(), tensor.dtype, tensor.is_conj(), tensor.is_neg())
    return (tensor.untyped_storage()._cdata, *view, version)


def _is_opaque(tensor: torch.Tensor) -> bool:
    return tensor.layout != torch.strided or is_traceable_wrapper_subclass(tensor)
