"""Counts residuals: the bytes that the graph keeps between the forward and the backward pass."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

from torch_ref.errors import InvalidArgumentError
from torch_ref.host import is_copying_to_host
from torch_ref.module_paths import ModulePaths, following


@dataclass(frozen=True)
class SavedEntry:
    """A storage that the graph keeps alive.

    Attributes:
        nbytes: size of the storage.
        place: `device`; `host`; or `input`, for an argument of the function that is on the device.
        operator: the operator that made the storage, such as `aten.addmm.default`.
        shape: shape of the first tensor on the storage.
        dtype: data type of the first tensor on the storage.
        module: path of the innermost module that was running when the storage was made. The path of a module that a
            function captures starts with the module's class.

    >>> import torch, torch_ref
    >>> kept = torch_ref.saved_for_backward(torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Sigmoid()), torch.ones(2, 4))
    >>> [(one.operator, one.shape, one.nbytes, one.place) for one in kept.entries if one.place == "device"]
    [('aten.sigmoid.default', (2, 8), 64, 'device')]
    """

    nbytes: int
    place: str
    operator: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    module: str = ""


@dataclass(frozen=True)
class SavedBytes:
    """Bytes that the graph keeps for backward; a storage with several views counts once.

    Attributes:
        entries: the storages, in the order of creation.

    >>> import torch, torch_ref
    >>> kept = torch_ref.saved_for_backward(torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Sigmoid()), torch.ones(2, 4))
    >>> kept.device_bytes == sum(one.nbytes for one in kept.entries if one.place == "device")
    True
    """

    entries: tuple[SavedEntry, ...]

    @property
    def device_bytes(self) -> int:
        """Bytes that the forward pass computed and the graph keeps on the device, without parameters and inputs."""
        return self._at("device")

    @property
    def host_bytes(self) -> int:
        """Bytes that an offload keeps in host memory, copies of inputs included."""
        return self._at("host")

    @property
    def input_bytes(self) -> int:
        """Bytes of the arguments that the graph keeps on the device."""
        return self._at("input")

    def _at(self, place: str) -> int:
        return sum(entry.nbytes for entry in self.entries if entry.place == place)


def saved_for_backward(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> SavedBytes:
    """Count the bytes that the graph of `fn(*args, **kwargs)` keeps alive for its backward pass.

    The function runs once. A weak reference watches every storage that an operator makes. Then the result is dropped
    while its graph is kept, and finally the graph is dropped. The storages that live exactly until then are kept alive by the
    graph: through saved tensors, hooks, checkpoints or host copies, in any nesting. (Counting the calls of saved-tensor
    hooks would miss storages: only the innermost pair of hooks is called, and a checkpoint keeps its arguments outside hooks.)

    Existing tensors are not counted: parameters, buffers, tensors that `fn` captures. Arguments are passed as copies, so
    an argument is counted, as `input_bytes`, exactly if the graph keeps it. `host_bytes` counts the host copies of
    `torch_ref`'s offloads; if tensors are on an accelerator, it counts all kept tensors on the CPU. The random states that
    checkpoints save (about 5 kB each, on the host) are not counted, because no operator makes them. Fake tensors work too.

    Raises:
        InvalidArgumentError: if the result has no tensor with a graph.

    >>> import torch, torch_ref
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Sigmoid())
    >>> saved = torch_ref.saved_for_backward(model, torch.ones(2, 4))
    >>> saved.device_bytes, saved.host_bytes, saved.input_bytes
    (64, 0, 32)
    """
    if not callable(fn):
        raise InvalidArgumentError(f"fn is a {type(fn).__name__}, expected a function or a module.")
    watch = _StorageWatch(ModulePaths(fn, ""))
    with watch, following(watch.paths):
        copied_args, copied_kwargs = watch.copy_inputs((args, kwargs))
        result = fn(*copied_args, **copied_kwargs)
        del copied_args, copied_kwargs
    graph = [leaf.grad_fn for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor) and leaf.grad_fn]
    if not graph:
        raise InvalidArgumentError(
            "fn returned no tensor with a graph, expected at least one: call it with gradients enabled, and with a"
            " parameter or an argument that requires a gradient."
        )
    del result
    # Storages in reference cycles must not count as kept by the graph.
    gc.collect()
    held = _settled(watch)
    graph.clear()
    gc.collect()
    left = watch.alive()
    held_by_graph = [entry for key, entry in held.items() if key not in left and entry.nbytes]
    return SavedBytes(_placed(held_by_graph, watch.accelerated))


def _settled(watch: _StorageWatch) -> dict[int, SavedEntry]:
    """The storages that are alive after the threads of collectives let go; they hold arrays a moment longer than the caller."""
    alive = watch.alive()
    while dist.is_available() and dist.is_initialized():
        time.sleep(0.02)
        before, alive = alive, watch.alive()
        if len(alive) == len(before):
            break
    return alive


class _StorageWatch(TorchDispatchMode):
    """Remembers every storage that operators return, and the first operator that returned it.

    The storage of a tensor that existed before outlives the graph, so it is not counted if an operator returns a view of it.
    """

    def __init__(self, paths: ModulePaths) -> None:
        super().__init__()
        self.paths = paths
        self._known: dict[int, StorageWeakRef] = {}
        self._made: dict[int, SavedEntry] = {}
        self._copies: dict[int, torch.Tensor] = {}  # by the id of an argument of `copy_inputs`, which holds it
        self._copying_input = False
        self.accelerated = False

    def copy_inputs(self, arguments: Any) -> Any:
        """Non-leaf copies of the arguments, which the graph keeps only if backward reads them. Parameters are not copied."""
        self._copying_input = True
        try:
            return pytree.tree_map_only(torch.Tensor, self._copy_input, arguments)
        finally:
            self._copying_input = False
            self._copies.clear()

    def alive(self) -> dict[int, SavedEntry]:
        """The watched storages that are still alive."""
        return {key: entry for key, entry in self._made.items() if not self._known[key].expired()}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in _with_storage(result):
            if self._is_new(tensor):
                self._made[tensor.untyped_storage()._cdata] = self._entry(tensor, str(func))
        return result

    def _copy_input(self, tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, nn.Parameter):
            return tensor
        if id(tensor) not in self._copies:
            self._copies[id(tensor)] = tensor.clone()
        return self._copies[id(tensor)]

    def _is_new(self, tensor: torch.Tensor) -> bool:
        storage = tensor.untyped_storage()
        if storage._cdata in self._known:
            return False
        # The weak reference prevents reuse of the address for another storage.
        self._known[storage._cdata] = StorageWeakRef(storage)
        return True

    def _entry(self, tensor: torch.Tensor, operator: str) -> SavedEntry:
        place = tensor.device.type
        self.accelerated |= place != "cpu"
        if self._copying_input:
            place = "input"
        elif is_copying_to_host():
            place = "host"
        nbytes, shape = tensor.untyped_storage().nbytes(), tuple(tensor.shape)
        return SavedEntry(nbytes, place, operator, shape, tensor.dtype, self.paths.current)


def _placed(entries: list[SavedEntry], accelerated: bool) -> tuple[SavedEntry, ...]:
    def place(entry: SavedEntry) -> str:
        if entry.place in ("input", "host"):
            return entry.place
        return "host" if accelerated and entry.place == "cpu" else "device"

    return tuple(replace(entry, place=place(entry)) for entry in entries)


def _with_storage(tree: Any) -> list[torch.Tensor]:
    tensors = [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
    return [t for t in tensors if t.layout == torch.strided and not is_traceable_wrapper_subclass(t)]
