"""A repeatable call: the first run uses the caller's arguments, later runs use saved or fetched arguments."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint
from torch.utils.weak import TensorWeakRef

from torch_ref.buffers import Buffers
from torch_ref.captures import Captures, reached_modules
from torch_ref.errors import InvalidArgumentError, MutatedTensorError, NothingToOffloadError
from torch_ref.host import HostCopy, is_opaque, nbytes_of, owner_of, to_host, version_of
from torch_ref.layout import Layout
from torch_ref.receipts import CallEntry, is_offloadable, name_of
from torch_ref.recomputation import WatchedForward, failures_explained, save_at_the_end


class Replay:
    """A block and its arguments, for `torch.utils.checkpoint.checkpoint`.

    The first call passes the caller's own containers and tensors, exactly as without checkpointing. Later calls rebuild
    the containers. A tensor that was passed twice is again a single object; otherwise `nn.MultiheadAttention` would take a
    different path.

    If `run` is given, it is called in place of the block, after the offloaded arguments are back on the device.
    """

    def __init__(
        self,
        block: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        run: Callable[..., Any] | None = None,
    ) -> None:
        flat, self._spec = pytree.tree_flatten((args, kwargs))
        distinct = list({id(leaf): leaf for leaf in flat}.values())
        if any(isinstance(leaf, Iterator) for leaf in distinct):
            raise InvalidArgumentError(
                f"an argument of {name_of(block)} is an iterator, which the forward pass consumes, so the recomputation would "
                "find it empty: pass a list."
            )
        # `distinct`, and then `_kept`, holds the leaves, so ids are unique.
        index = {id(leaf): k for k, leaf in enumerate(distinct)}
        self._positions = [index[id(leaf)] for leaf in flat]
        self.block = block
        self._run = block if run is None else run
        self._captures = Captures(block)
        self._devices = accelerators_of(block, [leaf for leaf in distinct if isinstance(leaf, torch.Tensor)])
        self._first: tuple[tuple[Any, ...], dict[str, Any]] | None = (args, kwargs)
        self._anchors = 0
        self._kept: list[Any] = distinct
        self._copies: list[weakref.ref[HostCopy]] = []
        self._previous: weakref.ref[Replay] | None = None

    def offload(
        self, entry: CallEntry, min_bytes: int = 0, chosen: Callable[[torch.Tensor], bool] = lambda tensor: True
    ) -> None:
        """Copy to the host every offloadable argument of at least `min_bytes` for which `chosen` is true.

        Raises:
            NothingToOffloadError: if there is no such argument.
        """
        tensors = [leaf for leaf in self._kept if is_offloadable(leaf) and chosen(leaf)]
        large = [tensor for tensor in tensors if nbytes_of(tensor) >= min_bytes]
        if not large and not any(isinstance(leaf, torch.Tensor) and not leaf.numel() for leaf in self._kept):
            raise NothingToOffloadError(_nothing_to_offload(entry, tensors, min_bytes))
        entry.offered(tensors)
        # Copy the largest tensor first, so that smaller views of its storage share the copy.
        moved = {id(tensor): OffloadedArgument(tensor, entry) for tensor in sorted(large, key=_stretch, reverse=True)}
        self._kept = [moved.get(id(leaf), leaf) for leaf in self._kept]
        self._copies = [weakref.ref(argument.copy) for argument in moved.values()]
        self._previous, _latest.replay = getattr(_latest, "replay", None), weakref.ref(self)

    @property
    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The caller's arguments; empty after the first call."""
        return self._first or ((), {})

    def take_kept(self) -> list[Any]:
        """Return the arguments that the checkpoint must keep, and drop this object's references to them.

        `torch.utils.checkpoint` saves the random state only for devices of its tensor arguments, so an empty tensor is
        added for every other accelerator of the block.
        """
        present = {leaf.device for leaf in self._kept if isinstance(leaf, torch.Tensor)}
        anchors = [torch.empty(0, device=device) for device in sorted(self._devices - present, key=str)]
        self._anchors = len(anchors)
        kept, self._kept = [*anchors, *self._kept], []
        return kept

    def __call__(self, *kept: Any) -> Any:
        """Run the block: first with the caller's arguments, later with `kept`, whose offloaded arguments are fetched."""
        if self._first is not None:
            (args, kwargs), self._first = self._first, None
            output = self._run_first(args, kwargs)
            moved = [leaf for leaf in kept if isinstance(leaf, OffloadedArgument)]
            for argument in moved:
                argument.check_written({other.copy for other in moved} - {argument.copy})
            return output
        self._captures.check_unchanged()
        fetched: dict[HostCopy, torch.Tensor] = {}
        leaves = [leaf.fetch(fetched) if isinstance(leaf, OffloadedArgument) else leaf for leaf in kept[self._anchors :]]
        # Backward next reaches the call before this one: fetch that call's arguments while this call is recomputed.
        previous = self._previous() if self._previous is not None else None
        if previous is not None:
            previous.fetch_ahead()
        args, kwargs = pytree.tree_unflatten([leaves[k] for k in self._positions], self._spec)
        with self._buffers.as_before(), failures_explained(name_of(self.block)):
            output = self._run(*args, **kwargs)
            if self._ends_in_a_late_write:
                save_at_the_end()
        return output

    def _run_first(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._buffers = Buffers(reached_modules(self.block, pytree.tree_leaves((args, kwargs))))
        try:
            with WatchedForward(name_of(self.block)) as forward:
                output = self._run(*args, **kwargs)
                self._ends_in_a_late_write = forward.ends_in_a_late_write(output)
                if self._ends_in_a_late_write:
                    save_at_the_end()
        finally:
            self._buffers.changed()
        return output

    def checkpointed(self) -> Any:
        """Call the block under PyTorch's non-reentrant checkpoint."""
        return checkpoint(self, *self.take_kept(), use_reentrant=False, preserve_rng_state=True)

    def fetch_ahead(self) -> None:
        """Start copying the offloaded arguments back, if the copies are asynchronous."""
        for reference in self._copies:
            copy = reference()
            if copy is not None:
                copy.fetch_ahead()


_latest = threading.local()


class OffloadedArgument:
    """A tensor argument on the host; its content is fetched at every recomputation."""

    def __init__(self, source: torch.Tensor, entry: CallEntry) -> None:
        self.copy, made = to_host(source)
        self._layout = None if is_opaque(source) else Layout.of(source)
        # For a view, refer to its base, which shares the view's version counter and lives longer.
        self._source = TensorWeakRef(owner_of(source))
        self._requires_grad = source.requires_grad
        self._entry = entry
        entry.packed(self.copy, made)

    def check_written(self, others: set[HostCopy]) -> None:
        """Raise an error if the block changed this argument in place and the host copies may not reproduce the change.

        Raises:
            MutatedTensorError: if the copy may have been unfinished, or another copy contains the same storage.
        """
        source = self._source()
        if source is None or is_opaque(source) or version_of(source) == self.copy.version:
            return
        storage = source.untyped_storage()
        shared = any(other.source_storage is not None and other.source_storage() is storage for other in others)
        if shared or self.copy.is_asynchronous:
            why = "another argument overlaps it" if shared else "its copy to the host may still be running"
            raise MutatedTensorError(
                f"{self._entry.block} changes an offloaded argument, shape {tuple(source.shape)}, in place, and {why}, so the "
                "recomputation would start from other values. Give the block a clone, or make the change out of place."
            )

    def fetch(self, fetched: dict[HostCopy, torch.Tensor]) -> torch.Tensor:
        """The argument on the device. `fetched` holds, by host copy, the contents that this recomputation has fetched so far.

        Raises:
            MutatedTensorError: if the original tensor is alive and was changed in place; without offload, autograd raises.
        """
        source = self._source()
        if source is not None and version_of(source) != self.copy.version:
            raise MutatedTensorError(
                f"an offloaded argument of {self._entry.block}, shape {tuple(source.shape)}, was changed in place"
                f" between the forward and the backward pass: it is at version {version_of(source)}, expected"
                f" {self.copy.version}. Give the block a clone, or make the change out of place."
            )
        if self.copy not in fetched:
            self._entry.brought_back(self.copy)
            fetched[self.copy] = self.copy.bring_back()
        return self.copy.view(fetched[self.copy], self._layout, self._requires_grad)


def _stretch(tensor: torch.Tensor) -> int:
    return 0 if is_opaque(tensor) else Layout.of(tensor).extent * tensor.itemsize


def _nothing_to_offload(entry: CallEntry, tensors: list[torch.Tensor], min_bytes: int) -> str:
    if tensors:
        largest = max(map(nbytes_of, tensors))
        return f"min_bytes is {min_bytes}, but the largest tensor argument of {entry.block} has {largest}: lower min_bytes."
    return (
        f"offload was requested, but no argument of {entry.block} is a tensor that can be moved (parameters stay on the "
        "device): expected at least one. Pass the block's input as an argument instead of capturing it, or use "
        "use_gradient_checkpointing alone."
    )


def accelerators_of(block: Callable[..., Any], leaves: list[torch.Tensor]) -> set[torch.device]:
    """The accelerators whose random state a block may use: the devices of its tensors and parameters."""
    owner = block if isinstance(block, nn.Module) else getattr(block, "__self__", None)
    tensors = list(leaves)
    if isinstance(owner, nn.Module):
        tensors += [*owner.parameters(), *owner.buffers()]
    return {tensor.device for tensor in tensors if tensor.device.type not in ("cpu", "meta")}
