"""Any function with its inputs in host memory between the passes, computed again in backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from torch_ref.checkpoint import check_callable
from torch_ref.errors import InvalidArgumentError
from torch_ref.receipts import record_call
from torch_ref.replay import Replay


class OffloadFunction:
    """Calls `function` so that backward finds its tensor arguments in host memory and computes the rest again.

    What a hand-written `torch.autograd.Function` of this name has to get right, and most do not: outputs and gradients are
    those of `function`, for any number of tensors anywhere in the arguments, keywords and arguments that are no tensors
    included, and for parameters that `function` captures. Autocast and the random state of forward hold in the
    recomputation. A tensor that lies inside another argument is copied with that one. On CUDA the copies are pinned and run
    beside the computation in both directions: out while the function runs, back while the call after it goes through
    backward. `torch.autograd.grad`, second derivatives and arguments without gradient work, as it is non-reentrant.

    Args:
        function: a module or a function; captured tensors and parameters stay on the device.
        min_bytes: arguments that are smaller stay on the device; a copy has a price of its own.

    Raises:
        InvalidArgumentError: if `function` cannot be called or `min_bytes` is no integer from 0 up.
        NothingToOffloadError: in a call, if no argument can be moved.
        MutatedTensorError, ReboundVariableError: as `gradient_checkpoint_forward`; the former also in forward, where
            `function` changes an argument in place and the copy could miss that: on CUDA, or if arguments overlap.

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
        return checkpoint(replay, *replay.take_kept(), use_reentrant=False, preserve_rng_state=True)
