"""Copies of tensors in host memory: made, shared, counted, brought back.

A host copy is pinned and made beside the computation where the tensor is on a CUDA device. Where it is on the CPU
already it is a plain second copy, so that a machine without an accelerator moves the same bytes as one with it.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.weak import TensorWeakRef

from torch_ref.layout import Layout
from torch_ref.transfers import Arrival, copy_out, fetch

_copying = threading.local()


class HostCopy:
    """The content of one tensor, in host memory, until it is garbage collected.

    A tensor without gaps is kept as the stretch of storage that it covers, and other views of that stretch can be had
    from the same copy.

    Attributes:
        tensor: the copy, without gaps and without dimensions that were only expanded.
        nbytes: its size in bytes.
        layout: where the tensor was in its storage; None for sparse tensors and wrapper subclasses.
        version: version counter of the tensor when it was copied; None where it has none.
        source_storage: weak reference to the storage that was copied, to tell whether the device gave it back.
        source_nbytes: size of that storage in bytes.
    """

    def __init__(self, source: torch.Tensor, pin: bool) -> None:
        self.device = source.device
        self.layout = None if is_opaque(source) else Layout.of(source)
        with torch.no_grad(), _marked_as_host():
            self.tensor, self._copied = copy_out(self._stored(source.detach()), pin and self.layout is not None)
        self.nbytes = nbytes_of(self.tensor)
        self.version = version_of(source)
        storage = None if self.layout is None else source.untyped_storage()
        # A weak reference of Python's: one of torch.multiprocessing's own keeps MemTracker of PyTorch 2.7 from noticing
        # that the storage is gone.
        self.source_storage = None if storage is None else weakref.ref(storage)
        self.source_nbytes = nbytes_of(source) if storage is None else storage.nbytes()
        self._owner = TensorWeakRef(owner_of(source))
        self._ahead: Arrival | None = None
        _live.add(self)

    def bring_back(self) -> torch.Tensor:
        """Copy the content to the device that it came from; the host copy stays as it is.

        The result can have a gradient where its data type allows it, but is no leaf, so that a block may change it in
        place as it could its own input. `view` gives it the layout of a tensor.
        """
        arrival, self._ahead = self._ahead or fetch(self.tensor, self.device, self._copied), None
        return arrival.wait()

    def fetch_ahead(self) -> None:
        """Start bringing the content back, beside the computation; where that is not possible do nothing."""
        if self._copied is not None and self._ahead is None:
            self._ahead = fetch(self.tensor, self.device, self._copied)

    def view(self, back: torch.Tensor, layout: Layout | None, requires_grad: bool) -> torch.Tensor:
        """Give what `bring_back` returned the layout of a tensor that this copy covers."""
        back = back if requires_grad else back.detach()
        if self.layout is None or layout is None:
            return back
        with torch.set_grad_enabled(requires_grad):
            if not self.layout.is_dense:
                return back if back.size() == layout.size else back.expand(layout.size)
            return back.as_strided(layout.size, layout.stride, layout.offset - self.layout.offset)

    @property
    def is_asynchronous(self) -> bool:
        """Whether the copy runs beside the computation, so that a later change of the source may reach it."""
        return self._copied is not None

    def is_of(self, source: torch.Tensor) -> bool:
        """Tell whether `source` shares its version counter with what was copied."""
        return self._owner() is owner_of(source)

    def covers(self, layout: Layout) -> bool:
        """Tell whether a tensor of `layout` on the same storage can be had from this copy."""
        return self.layout is not None and self.layout.covers(layout)

    def _stored(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.layout is None:
            return tensor
        if self.layout.is_dense:
            return tensor.as_strided((self.layout.extent,), (1,))
        for dim in self.layout.expanded:
            tensor = tensor.narrow(dim, 0, 1)
        return tensor


_live: weakref.WeakSet[HostCopy] = weakref.WeakSet()
_by_storage: weakref.WeakKeyDictionary[torch.UntypedStorage, weakref.WeakSet[HostCopy]] = weakref.WeakKeyDictionary()


def to_host(source: torch.Tensor) -> tuple[HostCopy, bool]:
    """Copy a tensor to host memory, or find a copy that covers it; says whether a copy was made.

    Arguments share a copy if they are the same view of the same storage at the same version, or views of a stretch of
    it that was copied whole: give the largest first. Writes that hide from the tensor's version counter (through `.data` or
    a NumPy alias) are not seen; autograd does not see them either.
    """
    version = version_of(source)
    if version is None or is_opaque(source):
        return HostCopy(source, pin=True), True
    copies = _by_storage.setdefault(source.untyped_storage(), weakref.WeakSet())
    layout = Layout.of(source)
    for copy in copies:
        # An alias through `.data` has a counter of its own, which starts again.
        if copy.version == version and copy.is_of(source) and copy.covers(layout):
            return copy, False
    made = HostCopy(source, pin=True)
    copies.add(made)
    return made, True


def owner_of(tensor: torch.Tensor) -> torch.Tensor:
    """Give the tensor that a view shares its version counter with, or the tensor itself."""
    return tensor if tensor._base is None else tensor._base


def nbytes_of(tensor: torch.Tensor) -> int:
    """Give a tensor's bytes, of a sparse one those of its indices and values."""
    if tensor.layout == torch.sparse_coo:
        return tensor._indices().nbytes + tensor._values().nbytes
    return tensor.nbytes


def live_host_copies() -> list[HostCopy]:
    """List the host copies that something still holds."""
    return list(_live)


def is_copying_to_host() -> bool:
    """Tell whether the memory that is being allocated on this thread is host memory."""
    return getattr(_copying, "depth", 0) > 0


def version_of(tensor: torch.Tensor) -> int | None:
    """Give a tensor's version counter, or None for an inference tensor, which has none."""
    return None if tensor.is_inference() else tensor._version


def is_opaque(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor has no storage of its own that could be looked at: sparse ones and wrapper subclasses."""
    return tensor.layout != torch.strided or is_traceable_wrapper_subclass(tensor)


@contextmanager
def _marked_as_host() -> Iterator[None]:
    _copying.depth = getattr(_copying, "depth", 0) + 1
    try:
        yield
    finally:
        _copying.depth -= 1
