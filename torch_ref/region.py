"""A call of a block under a policy: every array that the block computes is named, and saved, offloaded or recomputed.

Three dispatch modes enclose the block, in both passes. An operator passes through them in this order:

1. `_Naming` names the operator's result and asks the policy for its action.
2. PyTorch's own modes of `create_selective_checkpoint_contexts` save the arrays that the policy saves, and return them
   in the recomputation instead of computing them.
3. `_Moving` copies the arrays that the policy offloads to host memory, and fetches them in the recomputation instead of
   computing them. (Eager PyTorch treats `CheckpointPolicy.MUST_CPU_OFFLOAD` as "recompute".) `_Moving` comes last because
   PyTorch's modes count operators, and must see the same operators in both passes.

The modes are entered around the block itself and not through the `context_fn` of `torch.utils.checkpoint`, so that
fetching the block's arguments does not count as part of the block.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _pop_mode_temporarily
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from torch_ref.errors import ChangedRecomputationError, MutatedTensorError
from torch_ref.host import HostCopy, is_copying_to_host, is_opaque, to_host
from torch_ref.layout import Layout
from torch_ref.module_paths import ModulePaths, following
from torch_ref.operators import Operator, draws
from torch_ref.policy import OFFLOAD, RECOMPUTE, SAVE, Candidate, Policy
from torch_ref.receipts import CallEntry


class Region:
    """A block under its policy, called once for the forward pass and then for each recomputation.

    Attributes:
        candidates: the arrays that the forward pass computed, in order.
        random: names of the arrays whose operators draw from the random state; these arrays are always recomputed.
        is_empty: whether an array without elements was selected for offload.
    """

    def __init__(self, block: Callable[..., Any], run: Callable[..., Any], policy: Policy, path: str, entry: CallEntry):
        self.candidates: list[Candidate] = []
        self.random: set[str] = set()
        self.is_empty = False
        self._block, self._run, self._policy, self._path, self._entry = block, run, policy, path, entry
        self._now = _Now()
        self._saving, self._cached = create_selective_checkpoint_contexts(self._now.policy_fn)
        self._offloaded: dict[str, Any] = {}
        # Address of a saved storage → name. PyTorch holds what it saves beyond the forward pass, at whose end this is cleared.
        self._saved: dict[int, str] = {}
        self._is_first = True

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Run the block: the first call saves and offloads arrays, later calls reuse them."""
        is_first, self._is_first = self._is_first, False
        paths = ModulePaths(self._block, self._path)
        modes = (_Moving(self, is_first), self._saving if is_first else self._cached, _Naming(self, paths, is_first))
        with _no_autocast_cache(), modes[0], modes[1], modes[2], following(paths):
            try:
                return self._run(*args, **kwargs)
            finally:
                self._saved.clear()

    def decide(self, operator: Operator, label: str, count: int, is_first: bool) -> None:
        """Name the result of the current operator, and ask the policy for its action."""
        name = f"{label}#{count}"
        candidate = Candidate(name, operator.primitive, has_batch_dims=operator.has_batch_dims)
        if is_first:
            self.candidates.append(candidate)
            if operator.is_random:
                self.random.add(name)
        # If a random operator were skipped, the next random operator would get its random state.
        action = RECOMPUTE if operator.is_random else self._policy.action(candidate)
        self._now.set(name, action)

    def check_repeats(self, name: str, index: int) -> None:
        """Raise an error if the recomputation differs from forward: saved arrays would replace wrong operators' results."""
        expected = self.candidates[index].name if index < len(self.candidates) else "nothing"
        if name != expected:
            raise ChangedRecomputationError(
                f"the recomputation of {self._entry.block} computes {name} where its forward pass computed {expected}. Under "
                "a policy both must run the same operators in the same order: pass the state that changed between them (a "
                "counter, a flag, the train mode of a module) as an argument of the block."
            )

    def note_saved(self, output: Any) -> None:
        """Remember the storages that PyTorch saves, to detect later writes to them."""
        for tensor in _tensors(output):
            self._saved[tensor.untyped_storage()._cdata] = self._now.name

    def check_not_saved(self, func: Any, written: list[torch.Tensor]) -> None:
        """Raise an error for an in-place change of a saved array, because the recomputation would change it a second time.

        Raises:
            MutatedTensorError: the message names the array and the operator.
        """
        for tensor in _tensors(written):
            name = self._saved.get(tensor.untyped_storage()._cdata)
            if name is not None:
                raise MutatedTensorError(
                    f"{func} changes {name} in place, which policy {str(self._policy)!r} saves, so the recomputation would "
                    f"start from the changed values. Put 'recompute: {name}' (or a glob) in front of the policy, offload the "
                    "array, or make the change out of place."
                )

    def offload(self, output: Any) -> None:
        """Copy the output of an operator to the host."""
        tensors = [tensor for tensor in _tensors(output) if _is_worth_a_copy(tensor)]
        self.is_empty |= any(not tensor.numel() for tensor in _tensors(output))
        self._entry.offered(tensors)
        self._offloaded[self._now.name] = pytree.tree_map_only(torch.Tensor, self._put, output)

    def fetch(self) -> Any:
        """Copy back from the host the output that the current operator had in the forward pass."""
        return pytree.tree_map_only(_Put, lambda put: put.fetch(), self._offloaded[self._now.name])

    def _put(self, tensor: torch.Tensor) -> _Put:
        return _Put(tensor, self._entry)

    @property
    def now(self) -> _Now:
        """The name and the action of the current operator's result."""
        return self._now


class _Now:
    """The name and the action of the current operator's result.

    PyTorch's modes refer to this object and not to the region, to avoid a reference cycle.
    """

    def __init__(self) -> None:
        self.set("", RECOMPUTE)

    def set(self, name: str, action: str) -> None:
        self.name, self.action = name, action

    def policy_fn(self, *_: Any, **__: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if self.action == SAVE else CheckpointPolicy.MUST_RECOMPUTE


class _Naming(TorchDispatchMode):
    def __init__(self, region: Region, paths: ModulePaths, is_first: bool) -> None:
        super().__init__()
        self._region, self._paths, self._is_first = region, paths, is_first
        self._counts: Counter[str] = Counter()
        self._index = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if is_copying_to_host():  # a nested offload may copy in only one of the passes: do not name its operators
            with _pop_mode_temporarily():
                return func(*args, **kwargs)
        region, operator = self._region, Operator.of(func)
        if operator.is_random and not draws(func, args, kwargs):
            operator = replace(operator, is_random=False)
        region.now.set("", RECOMPUTE)
        if operator.makes_array:
            self._name(operator)
        elif self._is_first and operator.writes:
            region.check_not_saved(func, operator.written(func, args, kwargs))
        output = func(*args, **kwargs)
        if self._is_first and region.now.action == SAVE:
            region.note_saved(output)
        return output

    def _name(self, operator: Operator) -> None:
        label = f"{self._paths.current}:{operator.primitive}"
        self._region.decide(operator, label, self._counts[label], self._is_first)
        if not self._is_first:
            self._region.check_repeats(self._region.now.name, self._index)
        self._counts[label] += 1
        self._index += 1


class _Moving(TorchDispatchMode):
    def __init__(self, region: Region, is_first: bool) -> None:
        super().__init__()
        self._region, self._is_first = region, is_first

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        region = self._region
        # PyTorch's modes also run other operators (detach), which make no array.
        is_moved = region.now.action == OFFLOAD and Operator.of(func).makes_array
        if is_moved and not self._is_first:
            return region.fetch()
        output = func(*args, **(kwargs or {}))
        if is_moved:
            region.offload(output)
        return output


class _Put:
    """An offloaded tensor: a host copy; a scalar or an empty tensor is not worth a copy and stays on the device."""

    def __init__(self, tensor: torch.Tensor, entry: CallEntry) -> None:
        self._entry = entry
        self._layout = None if is_opaque(tensor) else Layout.of(tensor)
        self._stays = None if _is_worth_a_copy(tensor) else tensor.detach().clone()
        self._copy: HostCopy | None = None
        if self._stays is None:
            self._copy, made = to_host(tensor)
            entry.packed(self._copy, made)

    def fetch(self) -> torch.Tensor:
        """The tensor on the device: a new copy at each call, because the block may change it."""
        if self._stays is not None:
            return self._stays.clone()
        assert self._copy is not None
        self._entry.brought_back(self._copy)
        return self._copy.view(self._copy.bring_back(), self._layout, False)


def _is_worth_a_copy(tensor: torch.Tensor) -> bool:
    return tensor.dim() > 0 and tensor.numel() > 0


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor) and not is_opaque(leaf)]


@contextmanager
def _no_autocast_cache() -> Iterator[None]:
    # Autocast caches casts of weights, so with the cache the recomputation would run fewer operators.
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)
