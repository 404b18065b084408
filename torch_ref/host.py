"""Copies of tensors in host memory: created, shared, counted, and copied back.

The copy of a CUDA tensor is pinned and asynchronous. A CPU tensor gets a plain second copy, so that a machine without an
accelerator moves the same bytes.
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
    """A copy of a tensor in host memory, alive until this object is garbage collected.

    A tensor without gaps is copied as the range of storage that it covers, so the copy also serves other views of this
    range.

    Attributes:
        tensor: the copy, without gaps and without expanded dimensions.
        nbytes: the copy's size in bytes.
        layout: the copied tensor's layout in its storage; None for sparse tensors and wrapper subclasses.
        version: the copied tensor's version counter at the time of copying; None if it has no counter.
        source_storage: weak reference to the copied storage; it is dead once the device has freed the storage.
        source_nbytes: size of the copied storage in bytes.
    """

    def __init__(self, source: torch.Tensor, pin: bool) -> None:
        self.device = source.device
        self.layout = None if is_opaque(source) else Layout.of(source)
        with torch.no_grad(), _marked_as_host():
            self.tensor, self._copied = copy_out(self._stored(source.detach()), pin and self.layout is not None)
        self.nbytes = nbytes_of(self.tensor)
        self.version = version_of(source)
        storage = None if self.layout is None else source.untyped_storage()
        # Use Python's weak reference: with torch.multiprocessing's, PyTorch 2.7's MemTracker misses freed storages.
        self.source_storage = None if storage is None else weakref.ref(storage)
        self.source_nbytes = nbytes_of(source) if storage is None else storage.nbytes()
        self._owner = TensorWeakRef(owner_of(source))
        self._ahead: Arrival | None = None
        _live.add(self)

    def bring_back(self) -> torch.Tensor:
        """Copy the content back to the device of the copied tensor; the host copy remains.

        The result requires a gradient if its dtype allows one. It is not a leaf, so a block may change it in place like its
        own input. Its layout may differ from that of the copied tensor; `view` restores the layout.
        """
        arrival, self._ahead = self._ahead or fetch(self.tensor, self.device, self._copied), None
        return arrival.wait()

    def fetch_ahead(self) -> None:
        """Start copying the content back asynchronously, if possible."""
        if self._copied is not None and self._ahead is None:
            self._ahead = fetch(self.tensor, self.device, self._copied)

    def view(self, back: torch.Tensor, layout: Layout | None, requires_grad: bool) -> torch.Tensor:
        """View `back`, a result of `bring_back`, with `layout`, which this copy must cover."""
        back = back if requires_grad else back.detach()
        if self.layout is None or layout is None:
            return back
        with torch.set_grad_enabled(requires_grad):
            if not self.layout.is_dense:
                return back if back.size() == layout.size else back.expand(layout.size)
            return back.as_strided(layout.size, layout.stride, layout.offset - self.layout.offset)

    @property
    def is_asynchronous(self) -> bool:
        """Whether the copy is asynchronous, so that a later change of the source may affect it."""
        return self._copied is not None

    def is_of(self, source: torch.Tensor) -> bool:
        """Whether `source` shares its version counter with the copied tensor."""
        return self._owner() is owner_of(source)

    def covers(self, layout: Layout) -> bool:
        """Whether this copy contains a tensor of `layout` on the same storage."""
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
    """Copy a tensor to host memory, or find a copy that covers it; also return whether a copy was made.

    Tensors share a copy if they are the same view of a storage at the same version, or if they are views of a range that was
    copied whole. Of several tensors, copy the largest first. Writes that bypass the version counter (through `.data` or a
    NumPy alias) are not noticed; autograd does not notice them either.
    """
    version = version_of(source)
    if version is None or is_opaque(source):
        return HostCopy(source, pin=True), True
    copies = _by_storage.setdefault(source.untyped_storage(), weakref.WeakSet())
    layout = Layout.of(source)
    for copy in copies:
        # An alias through `.data` has its own version counter, which starts anew.
        if copy.version == version and copy.is_of(source) and copy.covers(layout):
            return copy, False
    made = HostCopy(source, pin=True)
    copies.add(made)
    return made, True


def owner_of(tensor: torch.Tensor) -> torch.Tensor:
    """The base of a view, whose version counter the view shares; for a tensor that is no view, the tensor itself."""
    return tensor if tensor._base is None else tensor._base


def nbytes_of(tensor: torch.Tensor) -> int:
    """A tensor's bytes; for a sparse tensor, the bytes of its indices and values."""
    if tensor.layout == torch.sparse_coo:
        return tensor._indices().nbytes + tensor._values().nbytes
    return tensor.nbytes


def live_host_copies() -> list[HostCopy]:
    """The host copies that are still referenced."""
    return list(_live)


def is_copying_to_host() -> bool:
    """Whether this thread is allocating memory for a host copy."""
    return getattr(_copying, "depth", 0) > 0


def version_of(tensor: torch.Tensor) -> int | None:
    """A tensor's version counter; None for an inference tensor, which has none."""
    return None if tensor.is_inference() else tensor._version


def is_opaque(tensor: torch.Tensor) -> bool:
    """Whether a tensor has no accessible storage of its own: sparse tensors and wrapper subclasses."""
    return tensor.layout != torch.strided or is_traceable_wrapper_subclass(tensor)


@contextmanager
def _marked_as_host() -> Iterator[None]:
    _copying.depth = getattr(_copying, "depth", 0) + 1
    try:
        yield
    finally:
        _copying.depth -= 1
