"""DiffSynth-Studio's `gradient_checkpoint_forward` with its quirks, as a reference for ports.

It is written from the behaviour of `diffsynth/core/gradient/gradient_checkpoint.py`. The first case that applies is used:

1. Checkpointing is on and DeepSpeed's activation checkpointing is configured: the arguments are flattened and passed
   positionally, so keyword names are lost. Without a top-level tensor that requires a gradient, the block runs without a
   checkpoint. The offload flag is ignored.
2. The offload flag is set, with or without the other flag: `save_on_cpu()`, unpinned, encloses a non-reentrant checkpoint.
3. The checkpointing flag is set: the block runs under a non-reentrant checkpoint without `save_on_cpu`.
4. Otherwise the block is called plainly.

Consequences: only *positional, top-level* tensors go to the host, with a separate copy for each use. A call that
passes everything by keyword offloads nothing and does not restore the device's random state. Keywords of
`torch.utils.checkpoint.checkpoint` (`debug`, `early_stop`, ...) never reach the block, and `use_reentrant` and
`function` raise an error. A captured loop variable silently gives wrong gradients. Flags may be any values and are
tested for truth: 1 counts as True, 0 and None as False. The recomputation updates running statistics a second time. A
forgotten flag is replaced by the truth value of the block's first argument.

There is one difference from the original: on the CPU, the original's `save_on_cpu` keeps the tensor itself. Here the tensor
is copied, as from a GPU, so that receipts show the same bytes on a machine without a GPU.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from torch_ref.checkpoint import check_callable
from torch_ref.host import HostCopy
from torch_ref.modes import mode_of
from torch_ref.receipts import CallEntry, record_call, tensors_in

__all__ = ["gradient_checkpoint_forward"]


def gradient_checkpoint_forward(
    model: Callable[..., Any],
    use_gradient_checkpointing: Any,
    use_gradient_checkpointing_offload: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Call `model(*args, **kwargs)` like DiffSynth-Studio's function of this name; this module's docstring lists its quirks.

    Flags are tested for truth: 1, 0 and None are valid. `torch_ref.gradient_checkpoint_forward` accepts only bools.

    Raises:
        InvalidArgumentError: if `model` cannot be called.

    >>> import torch, torch_ref
    >>> x = torch.ones(2, 3, requires_grad=True)
    >>> with torch_ref.receipt() as r:
    ...     y = torch_ref.faithful.gradient_checkpoint_forward(torch.nn.Sigmoid(), False, True, input=x)
    >>> r.bytes_offered, r.bytes_on_host
    (24, 0)
    """
    check_callable(model)
    mode = mode_of(bool(use_gradient_checkpointing), bool(use_gradient_checkpointing_offload))
    entry = record_call(model, mode, "faithful")
    deepspeed = _configured_deepspeed() if use_gradient_checkpointing else None
    if deepspeed is not None:
        return _through_deepspeed(deepspeed, model, args, kwargs, entry)
    if mode == "off":
        return model(*args, **kwargs)
    if mode == "offload":
        entry.offered(tensors_in(args, kwargs))
    with _unpinned_save_on_cpu(entry) if mode == "offload" else nullcontext():
        return checkpoint(_forwarding(model), *args, **kwargs, use_reentrant=False)


def _forwarding(model: Callable[..., Any]) -> Callable[..., Any]:
    def forward(*args: Any, **kwargs: Any) -> Any:
        return model(*args, **kwargs)

    return forward


def _configured_deepspeed() -> Any:
    # A configured DeepSpeed is already imported; this reference must not import it itself.
    deepspeed = sys.modules.get("deepspeed")
    return deepspeed if deepspeed is not None and deepspeed.checkpointing.is_configured() else None


def _through_deepspeed(
    deepspeed: Any, model: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], entry: CallEntry
) -> Any:
    if entry.mode == "offload":
        entry.note = "DeepSpeed's checkpointing is configured, so the offload flag was ignored."
    flattened = (*args, *kwargs.values())
    if not any(isinstance(arg, torch.Tensor) and arg.requires_grad for arg in flattened):
        return model(*args, **kwargs)
    return deepspeed.checkpointing.checkpoint(_forwarding(model), *flattened)


def _unpinned_save_on_cpu(entry: CallEntry) -> saved_tensors_hooks:
    def pack(tensor: torch.Tensor) -> HostCopy | torch.Tensor:
        if not tensor.numel():
            return tensor.detach()
        copy = HostCopy(tensor, pin=False)
        entry.packed(copy, made=True)
        return copy

    def unpack(packed: HostCopy | torch.Tensor) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        entry.brought_back(packed)
        return packed.view(packed.bring_back(), packed.layout, requires_grad=False)

    return saved_tensors_hooks(pack, unpack)
