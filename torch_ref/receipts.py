"""Receipts: the bytes that an offload actually moved."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from torch_ref.host import HostCopy, nbytes_of

_open: list[Receipt] = []


@dataclass
class CallEntry:
    """A call of a block by `gradient_checkpoint_forward` or `OffloadFunction`, or under a policy.

    Attributes:
        block: the name of the block's class or function.
        mode: `off`, `checkpoint` or `offload`, from the flags; under a policy the policy's name or text.
        form: `faithful` for `torch_ref.faithful`, `selective` under a policy, `right` for other calls.
        grad_enabled: whether gradients were recorded; if not, the block was called plainly.
        note: why the call did not follow its mode; empty if it did.
        tensors_offered: the number of tensors that an offload could move: arguments, and under a policy the block's
            arrays. Parameters stay on the device, and a view of an array does not count.
        bytes_offered: the bytes of the offered tensors.
        tensors_packed: the number of offered tensors that backward will read from host memory.
        bytes_on_host: bytes copied to the host for this call; 0 if an earlier call made the copy.
        bytes_brought_back: bytes copied back so far, counted at every recomputation.

    >>> import torch, torch_ref
    >>> with torch_ref.receipt() as told:
    ...     _ = torch_ref.gradient_checkpoint_forward(torch.nn.Linear(4, 4), True, True, torch.ones(2, 4, requires_grad=True))
    >>> [(call.block, call.mode, call.bytes_offered, call.bytes_on_host) for call in told.calls]
    [('Linear', 'offload', 32, 32)]
    """

    block: str
    mode: str
    form: str
    grad_enabled: bool
    note: str = ""
    tensors_offered: int = 0
    bytes_offered: int = 0
    tensors_packed: int = 0
    bytes_on_host: int = 0
    bytes_brought_back: int = 0
    _sources: dict[Any, int] = field(default_factory=dict, repr=False)

    def offered(self, tensors: Sequence[torch.Tensor]) -> None:
        """Record tensors that the offload could move."""
        distinct = {id(t): t for t in tensors}.values()
        self.tensors_offered += len(distinct)
        self.bytes_offered += sum(map(nbytes_of, distinct))

    def packed(self, copy: HostCopy, made: bool) -> None:
        """Record a tensor in host memory; `made` is False if the copy already existed."""
        self.tensors_packed += 1
        self.bytes_on_host += copy.nbytes if made else 0
        if copy.source_storage is not None:
            self._sources[copy.source_storage] = copy.source_nbytes

    def brought_back(self, copy: HostCopy) -> None:
        """Record that a copy was brought back to the device."""
        self.bytes_brought_back += copy.nbytes


class Receipt:
    """The calls inside a `receipt()` block; its numbers grow until the end of the backward pass.

    >>> import torch, torch_ref
    >>> block, x = torch.nn.Sigmoid(), torch.ones(2, 3, requires_grad=True)
    >>> with torch_ref.receipt() as r:
    ...     y = torch_ref.gradient_checkpoint_forward(block, True, True, input=x)
    >>> r.bytes_offered, r.bytes_on_host, r.tensors_packed, r.bytes_brought_back
    (24, 24, 1, 0)
    >>> y.sum().backward()
    >>> r.bytes_brought_back
    24
    """

    def __init__(self) -> None:
        self._calls: list[CallEntry] = []

    @property
    def calls(self) -> tuple[CallEntry, ...]:
        """The entries of all calls, in order."""
        return tuple(self._calls)

    @property
    def bytes_offered(self) -> int:
        """Bytes of the tensors that all calls offered to an offload; a tensor passed to two calls counts twice."""
        return sum(call.bytes_offered for call in self._calls)

    @property
    def bytes_on_host(self) -> int:
        """Bytes that were copied to the host; a tensor that several calls share counts once."""
        return sum(call.bytes_on_host for call in self._calls)

    @property
    def tensors_packed(self) -> int:
        """The number of tensors that backward reads from host memory."""
        return sum(call.tensors_packed for call in self._calls)

    @property
    def bytes_brought_back(self) -> int:
        """Bytes copied from the host back to the device so far."""
        return sum(call.bytes_brought_back for call in self._calls)

    @property
    def bytes_released(self) -> int:
        """Bytes of the copied storages that the device has freed by now; read this between forward and backward.

        A tensor that is still referenced elsewhere, such as the batch, is not freed.
        """
        sources = {storage: nbytes for call in self._calls for storage, nbytes in call._sources.items()}
        return sum(nbytes for storage, nbytes in sources.items() if storage() is None)

    @property
    def warnings(self) -> tuple[str, ...]:
        """A sentence for each requested effect that did not happen."""
        if not self._calls:
            return ("no block was called through torch_ref inside this receipt.",)
        sentences = [f"{call.block}: {call.note}" for call in self._calls if call.note]
        idle = [c for c in self._calls if c.mode == "offload" and not c.note and not c.bytes_on_host]
        idle = [c for c in idle if not c.tensors_packed]
        if idle:
            offered = sum(c.bytes_offered for c in idle)
            remedy = "the faithful form moves positional tensors only; torch_ref.gradient_checkpoint_forward moves all"
            sentences.append(
                f"{len(idle)} offloaded call(s) moved 0 of the {offered} offered bytes to the host"
                f" ({', '.join(sorted({c.block for c in idle}))}): {remedy}."
            )
        if self.bytes_on_host and not self.bytes_released:
            sentences.append(
                f"{self.bytes_on_host} bytes are on the host, but no device memory was freed: something else still holds the "
                "tensors."
            )
        return tuple(dict.fromkeys(sentences))


@contextmanager
def receipt() -> Iterator[Receipt]:
    """Record the bytes that `gradient_checkpoint_forward` (both forms), `OffloadFunction` and policies move.

    Calls inside the `with` block are recorded, on all threads. Calls during a recomputation (nested checkpoints) are recorded
    if the backward pass also runs inside the block.

    >>> import torch, torch_ref
    >>> layer, x = torch.nn.Linear(4, 4), torch.ones(2, 4, requires_grad=True)
    >>> with receipt() as told:
    ...     torch_ref.gradient_checkpoint_forward(layer, True, True, x).sum().backward()
    >>> told.calls[0].bytes_on_host, told.calls[0].bytes_brought_back
    (32, 32)
    """
    opened = Receipt()
    _open.append(opened)
    try:
        yield opened
    finally:
        _open.remove(opened)


def record_call(block: Callable[..., Any], mode: str, form: str) -> CallEntry:
    """Create the entry of a call and add it to every open receipt."""
    entry = CallEntry(name_of(block), mode, form, torch.is_grad_enabled())
    if mode != "off" and not entry.grad_enabled:
        entry.note = f"called with gradients disabled, so mode {mode!r} had nothing to keep."
    for opened in _open:
        opened._calls.append(entry)
    return entry


def tensors_in(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors in the arguments, at any depth, that an offload could move."""
    return [leaf for leaf in pytree.tree_leaves((args, kwargs)) if is_offloadable(leaf)]


def is_offloadable(leaf: object) -> bool:
    """Whether an argument is a tensor that an offload moves: not empty, and no parameter or view of a parameter."""
    if not isinstance(leaf, torch.Tensor) or leaf.is_nested or leaf.is_meta or leaf.numel() == 0:
        return False
    return not isinstance(leaf, nn.Parameter) and not isinstance(leaf._base, nn.Parameter)


def name_of(block: Callable[..., Any]) -> str:
    """The name of a block's class or function."""
    if inspect.isfunction(block) or inspect.ismethod(block):
        return block.__qualname__.rpartition("<locals>.")[2]
    return getattr(block, "__name__", None) or type(block).__name__
