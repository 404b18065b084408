"""`gradient_checkpoint_forward` as it should be: one call, three modes, nothing lost on the way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from torch_ref.errors import InvalidArgumentError
from torch_ref.modes import mode_of
from torch_ref.receipts import record_call
from torch_ref.replay import Replay


def gradient_checkpoint_forward(
    model: Callable[..., Any],
    use_gradient_checkpointing: bool,
    use_gradient_checkpointing_offload: bool,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Call `model(*args, **kwargs)` in the mode that the two flags select; outputs and gradients are the same in all.

    | mode | flags | between forward and backward |
    | --- | --- | --- |
    | off | both False | autograd keeps what it needs |
    | checkpoint | the first | the block's arguments are kept, the rest is computed again |
    | offload | the second, with or without the first | the same with the arguments in host memory |

    Tensors anywhere in the arguments count, in lists, tuples, dicts and named tuples, positional or by keyword; what
    is inside other objects is kept as it is. An argument that is an `nn.Parameter` (or a view of one) stays on the
    device. Copies are pinned and asynchronous on CUDA. A tensor that several calls are given is copied once. The
    random state of the CPU and of every accelerator that the arguments or the block's parameters are on is restored
    for the recomputation. Non-reentrant. With gradients disabled the block is called plainly, in every mode.

    Every keyword reaches the block, also those that `torch.utils.checkpoint.checkpoint` knows itself (`debug`,
    `early_stop`, `use_reentrant`, `function`, ...). Only `model`, `use_gradient_checkpointing` and
    `use_gradient_checkpointing_offload` cannot: Python reports such a call as a `TypeError` before it gets here. Wrap
    the block in a function that renames the keyword.

    Raises:
        InvalidArgumentError: if `model` cannot be called or a flag is not a bool.
        NothingToOffloadError: if offload is asked for and no argument can be moved.
        MutatedTensorError: in the backward pass, if an offloaded argument was changed in place meanwhile. For
            arguments that are kept on the device autograd raises its own `RuntimeError`.
        ReboundVariableError: in the backward pass, if `model` is a function that captures a variable which was bound
            anew meanwhile, such as a loop variable.

    The signature is that of DiffSynth-Studio's `diffsynth.core.gradient`; see `torch_ref.faithful` for what that one
    does differently.

    >>> import torch, torch_ref
    >>> x = torch.zeros(2, 3, requires_grad=True)
    >>> y = torch_ref.gradient_checkpoint_forward(
    ...     torch_ref.ToyModel(), use_gradient_checkpointing=True, use_gradient_checkpointing_offload=False, x=x
    ... )
    >>> y.sum().backward()
    >>> x.grad[0].tolist()
    [0.25, 0.25, 0.25]
    """
    check_callable(model)
    mode = mode_of(use_gradient_checkpointing, use_gradient_checkpointing_offload)
    entry = record_call(model, mode, "right")
    if mode == "off" or not torch.is_grad_enabled():
        return model(*args, **kwargs)
    replay = Replay(model, args, kwargs)
    del args, kwargs
    if mode == "offload":
        replay.offload(entry)
    return checkpoint(replay, *replay.take_kept(), use_reentrant=False, preserve_rng_state=True)


def check_callable(model: object) -> None:
    """Refuse a block that cannot be called.

    Raises:
        InvalidArgumentError: naming its type.
    """
    if not callable(model):
        raise InvalidArgumentError(
            f"model is a {type(model).__name__}, expected a module or a function: the block itself, not its output."
        )
