"""`gradient_checkpoint_forward`: call a block in one of three modes, with all arguments and exact gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

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
    """Call `model(*args, **kwargs)` in the mode that the two flags select; all modes give equal outputs and gradients.

    | mode | flags | between forward and backward |
    | --- | --- | --- |
    | off | both False | autograd saves its residuals |
    | checkpoint | only the first is True | the block's arguments are saved, the rest is recomputed |
    | offload | the second is True | as for checkpoint, with the arguments in host memory |

    Tensors are found anywhere in positional and keyword arguments, also in lists, tuples, dicts and named tuples. Tensors
    inside other objects stay on the device, as do an `nn.Parameter` and views of it. Copies are pinned and asynchronous on
    CUDA. A tensor that is passed to several calls is copied once. The recomputation restores the random state of the CPU and
    of every accelerator that has arguments or parameters of the block. The checkpoint is non-reentrant. With gradients disabled
    the block is called plainly, in every mode.

    Every keyword reaches the block, even one that is a parameter of `torch.utils.checkpoint.checkpoint` (`debug`,
    `early_stop`, `use_reentrant`, `function`, ...). The exceptions are `model`, `use_gradient_checkpointing` and
    `use_gradient_checkpointing_offload`, for which Python raises a `TypeError`: wrap the block in a function that renames
    the keyword.

    Raises:
        InvalidArgumentError: if `model` cannot be called or a flag is not a bool.
        NothingToOffloadError: if the mode is offload and no argument can be moved.
        MutatedTensorError: in the backward pass, if an offloaded argument was changed in place after the call. For
            arguments on the device, autograd raises its own `RuntimeError`.
        ReboundVariableError: in the backward pass, if `model` is a function that captures a variable which was rebound
            after the call, such as a loop variable.
        ChangedRecomputationError: in the backward pass, if the recomputation saves other tensors than the forward pass, or
            raises an error that the forward pass did not raise, as a block with a cache may.

    The signature is that of DiffSynth-Studio's `diffsynth.core.gradient`; `torch_ref.faithful` lists the differences.

    >>> import torch, torch_ref
    >>> x = torch.zeros(2, 3, requires_grad=True)
    >>> y = torch_ref.gradient_checkpoint_forward(
    ...     torch.nn.Sigmoid(), use_gradient_checkpointing=True, use_gradient_checkpointing_offload=False, input=x
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
    return replay.checkpointed()


def check_callable(model: object) -> None:
    """Check that a block can be called.

    Raises:
        InvalidArgumentError: if it cannot; the message names the block's type.
    """
    if not callable(model):
        raise InvalidArgumentError(
            f"model is a {type(model).__name__}, expected a module or a function: the block itself, not its output."
        )
