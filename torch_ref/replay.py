"""A call that can be made again: the caller's arguments the first time, kept or fetched ones afterwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.weak import TensorWeakRef

from torch_ref.captures import Captures
from torch_ref.errors import MutatedTensorError, NothingToOffloadError
from torch_ref.host import to_host, version_of
from torch_ref.receipts import CallEntry, is_offloadable


class Replay:
    """A block and its arguments, ready to be handed to `torch.utils.checkpoint.checkpoint`.

    The first call passes the caller's own containers and tensors on, so that a block sees exactly what it sees
    without checkpointing. Later calls rebuild the containers, and an argument that was given twice is one object
    again (`nn.MultiheadAttention` takes another path otherwise).
    """

    def __init__(self, block: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        flat, self._spec = pytree.tree_flatten((args, kwargs))
        distinct = list({id(leaf): leaf for leaf in flat}.values())
        index = {id(leaf): k for k, leaf in enumerate(distinct)}
        self._positions = [index[id(leaf)] for leaf in flat]
        self._block = block
        self._captures = Captures(block)
        self._first: tuple[tuple[Any, ...], dict[str, Any]] | None = (args, kwargs)
        self._anchors = 0
        self._kept: list[Any] = distinct

    def offload(self, entry: CallEntry) -> None:
        """Put every argument that can be moved on the host.

        Raises:
            NothingToOffloadError: if there is none.
        """
        tensors = [leaf for leaf in self._kept if is_offloadable(leaf)]
        if not tensors and not any(isinstance(leaf, torch.Tensor) and not leaf.numel() for leaf in self._kept):
            raise NothingToOffloadError(
                f"use_gradient_checkpointing_offload is True, but no argument of {entry.block} is a tensor that can be"
                " moved (parameters stay on the device): expected at least one. Pass the block's input as an"
                " argument instead of capturing it, or use use_gradient_checkpointing alone."
            )
        entry.offered(tensors)
        self._kept = [OffloadedArgument(leaf, entry) if is_offloadable(leaf) else leaf for leaf in self._kept]

    def take_kept(self, devices: set[torch.device]) -> list[Any]:
        """Hand over what the checkpoint must keep; nothing of it is held here afterwards.

        `torch.utils.checkpoint` keeps the random state of the devices of its tensor arguments only, so an empty
        tensor stands for each other device in `devices`.
        """
        present = {leaf.device for leaf in self._kept if isinstance(leaf, torch.Tensor)}
        anchors = [torch.empty(0, device=device) for device in sorted(devices - present, key=str)]
        self._anchors = len(anchors)
        kept, self._kept = [*anchors, *self._kept], []
        return kept

    def __call__(self, *kept: Any) -> Any:
        """Run the block: the first time as the caller called it, later with `kept`, fetching what was offloaded."""
        if self._first is not None:
            (args, kwargs), self._first = self._first, None
            return self._block(*args, **kwargs)
        self._captures.check_unchanged()
        leaves = [leaf.fetch() if isinstance(leaf, OffloadedArgument) else leaf for leaf in kept[self._anchors :]]
        args, kwargs = pytree.tree_unflatten([leaves[k] for k in self._positions], self._spec)
        return self._block(*args, **kwargs)


class OffloadedArgument:
    """A tensor argument's place on the host; its content is fetched at every recomputation."""

    def __init__(self, source: torch.Tensor, entry: CallEntry) -> None:
        self._copy, made = to_host(source)
        self._source = TensorWeakRef(source)
        self._requires_grad = source.requires_grad
        self._entry = entry
        entry.packed(self._copy, made)

    def fetch(self) -> torch.Tensor:
        """Bring the content back.

        Raises:
            MutatedTensorError: if the tensor still lives and was changed in place, which without offload autograd
                refuses too.
        """
        source = self._source()
        if source is not None and version_of(source) != self._copy.version:
            raise MutatedTensorError(
                f"an offloaded argument of {self._entry.block}, shape {tuple(source.shape)}, was changed in place"
                f" between the forward and the backward pass: it is at version {version_of(source)}, expected"
                f" {self._copy.version}. Give the block a clone, or make the change out of place."
            )
        self._entry.brought_back(self._copy)
        return self._copy.bring_back(self._requires_grad)


def accelerators_of(block: Callable[..., Any], leaves: list[torch.Tensor]) -> set[torch.device]:
    """Name the accelerators whose random state a block may use: those of its tensors and parameters."""
    owner = block if isinstance(block, nn.Module) else getattr(block, "__self__", None)
    tensors = list(leaves)
    if isinstance(owner, nn.Module):
        tensors += [*owner.parameters(), *owner.buffers()]
    return {tensor.device for tensor in tensors if tensor.device.type not in ("cpu", "meta")}
