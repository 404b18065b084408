"""`OffloadFunction`: recompute a function in backward from arguments that were kept in host memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torch_ref.checkpoint import check_callable
from torch_ref.errors import InvalidArgumentError
from torch_ref.receipts import record_call
from torch_ref.replay import Replay


class OffloadFunction:
    """Calls `function`, keeps its tensor arguments in host memory until backward, and recomputes the rest.

    It handles the cases that hand-written `torch.autograd.Function`s of this name often get wrong. Outputs and gradients
    equal those of `function`, for any number of tensors anywhere in the arguments, for keywords and arguments that are no
    tensors, and for parameters that `function` captures. The recomputation uses forward's autocast and random state. If an
    argument is a view inside another argument, both share one copy. On CUDA the copies are pinned and asynchronous. The copy
    to the host runs alongside the function, the copy back alongside the backward pass of the call after this one. Because
    the checkpoint is non-reentrant, `torch.autograd.grad`, second derivatives and arguments without gradient work.

    Args:
        function: a module or a function; captured tensors and parameters stay on the device.
        min_bytes: smaller arguments stay on the device, because every copy has an overhead.

    Raises:
        InvalidArgumentError: if `function` cannot be called, or `min_bytes` is not an integer of at least 0.
        NothingToOffloadError: in a call, if no argument can be moved.
        MutatedTensorError, ReboundVariableError, ChangedRecomputationError: as in `gradient_checkpoint_forward`.
            MutatedTensorError is also raised in forward if `function` changes an argument in place and the recomputation could
            start from other values: on CUDA, where the copy may still be running, or if arguments overlap.

    >>> import torch, torch_ref
    >>> doubled = torch_ref.OffloadFunction(lambda x, factor: x * factor)
    >>> x = torch.ones(3, requires_grad=True)
    >>> with torch_ref.receipt() as r:
    ...     doubled(x, factor=2).sum().backward()
    >>> x.grad.tolist(), r.bytes_on_host
    ([2.0, 2.0, 2.0], 12)
    """

    def __init__(self, function: Callable[..., Any], *, min_bytes: int = 0) -> None:
        check_callable(function)
        if not isinstance(min_bytes, int) or isinstance(min_bytes, bool) or min_bytes < 0:
            raise InvalidArgumentError(f"min_bytes is {min_bytes!r}, expected an integer from 0 up: bytes of one tensor.")
        self.function = function
        self.min_bytes = min_bytes

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Call the function; every positional argument and keyword reaches it."""
        entry = record_call(self.function, "offload", "right")
        if not torch.is_grad_enabled():
            return self.function(*args, **kwargs)
        replay = Replay(self.function, args, kwargs)
        del args, kwargs
        replay.offload(entry, self.min_bytes)
        return replay.checkpointed()
