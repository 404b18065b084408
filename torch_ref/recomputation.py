"""The non-reentrant checkpoint around a call that can be repeated, and two ways in which a recomputation goes wrong.

PyTorch ends a recomputation as soon as the last tensor is saved that the forward pass saved. An operator that writes a tensor
after it saved it has then not run: `rrelu_with_noise` draws its noise into a tensor that it saved before, and its gradient
would be computed from memory that was never written. And a block that runs otherwise the second time, as one with a cache
that grows, ends in an error of PyTorch that names neither the block nor a remedy.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import CheckpointError, _StopRecomputationError

from torch_ref.errors import ChangedRecomputationError, TorchRefError

# Nodes of operators that write a tensor after they saved it. Of PyTorch's operators, no other one writes an argument, apart
# from the one that it returns, and saves it for its gradient.
_WRITES_WHAT_IT_SAVED = frozenset({"RreluWithNoiseBackward0"})

_REMEDY = (
    "Both must run the same operators on tensors of the same shapes: pass the state that changed between them (a cache, a "
    "counter, a flag, the train mode of a module) as an argument of the block, or change it outside of the block."
)


class WatchedForward:
    """A context around the block's forward pass: it notes what is saved, and explains what PyTorch finds in the recomputation.

    >>> x = torch.ones(2, requires_grad=True)
    >>> with WatchedForward("rrelu") as forward:
    ...     output = torch.nn.functional.rrelu(x, training=True)
    >>> forward.ends_in_a_late_write(output)
    True
    """

    def __init__(self, block: str) -> None:
        self._start = torch.autograd._get_sequence_nr()  # the number that the next node of the graph gets
        self._after_last_save: list[int] = []
        top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
        hooks = None if top is None else top(True)  # before PyTorch 2.8 there is no way to them: its own error stays
        self._hooks = (
            nullcontext() if hooks is None else saved_tensors_hooks(*_explaining(block, self._after_last_save, *hooks))
        )

    def __enter__(self) -> WatchedForward:
        self._hooks.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._hooks.__exit__(None, None, None)

    def ends_in_a_late_write(self, output: Any) -> bool:
        """Whether the operator that saved last writes one of these tensors afterwards."""
        # An operator makes its node first, then saves: later savers have numbers from that of the node after it.
        oldest = self._after_last_save[0] - 1 if self._after_last_save else self._start
        waiting = [tensor.grad_fn for tensor in _tensors(output)]
        seen: set[Any] = set()
        while waiting:
            node = waiting.pop()
            if node is None or node in seen or node._sequence_nr() < oldest:
                continue
            if node.name() in _WRITES_WHAT_IT_SAVED:
                return True
            seen.add(node)
            waiting += [other for other, _ in node.next_functions]
        return False


def _explaining(block: str, after_last_save: list[int], pack: Any, unpack: Any) -> tuple[Any, Any]:
    """The hooks of PyTorch's checkpoint; what it finds wrong with a recomputation becomes an error of ours."""

    def noted(tensor: torch.Tensor) -> Any:
        after_last_save[:] = [torch.autograd._get_sequence_nr()]
        return pack(tensor)

    def explained(packed: Any) -> Any:
        try:
            return unpack(packed)
        except CheckpointError as error:
            if "already unpacked" in str(error):  # the backward pass reads a saved tensor twice
                raise
            details = " ".join(str(error).partition("Tip:")[0].split()).removeprefix("torch.utils.checkpoint: ")
            raise ChangedRecomputationError(
                f"the recomputation of {block} differs from its forward pass. {_REMEDY} PyTorch says: {details}"
            ) from error

    return noted, explained


def _tensors(output: Any) -> list[torch.Tensor]:
    leaves = pytree.tree_leaves(output)
    # An object that is no tree, such as a dataclass, counts with its attributes.
    attributes = [vars(leaf) for leaf in leaves if hasattr(leaf, "__dict__") and not isinstance(leaf, torch.Tensor | type)]
    return [leaf for leaf in [*leaves, *pytree.tree_leaves(attributes)] if isinstance(leaf, torch.Tensor)]


@contextmanager
def failures_explained(block: str) -> Iterator[None]:
    """In the recomputation: an error that the forward pass did not raise becomes one of ours."""
    try:
        yield
    except (_StopRecomputationError, TorchRefError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise ChangedRecomputationError(
            f"the recomputation of {block} raised {type(error).__name__}, and its forward pass did not: {error}. {_REMEDY}"
        ) from error


def save_at_the_end() -> None:
    """Save a number last, for nothing: PyTorch ends the recomputation there, after all operators of the block."""
    torch.ones((), requires_grad=True).exp()
