"""Peak memory of a training step on a GPU, as PyTorch's CUDA allocator counts it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from torch_ref.errors import InvalidArgumentError
from torch_ref.peak import TrainingStep


@dataclass(frozen=True)
class AllocatedBytes:
    """The memory of a GPU's allocator during a training step.

    Attributes:
        peak_bytes: the largest sum of live tensors, each rounded up to 512 bytes (`max_memory_allocated`).
        reserved_bytes: the most memory that the allocator took from the driver, including gaps between tensors
            (`max_memory_reserved`). The GPU must have this memory free in addition to the CUDA context.
        before_bytes: the memory of all tensors before the step: parameters, gradients, optimizer state, batch and any other.

    >>> told = AllocatedBytes(peak_bytes=3 << 20, reserved_bytes=4 << 20, before_bytes=1 << 20)
    >>> told.peak_bytes - told.before_bytes  # what the step itself added
    2097152
    """

    peak_bytes: int
    reserved_bytes: int
    before_bytes: int


def allocated_bytes(build: Callable[[], TrainingStep], device: torch.device | str = "cuda") -> AllocatedBytes:
    """Run a training step on a GPU and return the peak of its allocator.

    `build` makes model, optimizer and batch on `device`, as for `torch_ref.peak_bytes`, which predicts the same step's peak
    without a GPU. A first step, which creates the optimizer's state, is not counted. The allocator also counts other tensors
    on the device, and workspaces inside operators; `torch_ref.peak_bytes` includes neither.

    Raises:
        InvalidArgumentError: if `device` is not a CUDA device of this machine, `build` does not return a `TrainingStep`, or
            the step's tensors are on another device.

    >>> import torch, torch_ref
    >>> def build():
    ...     model = torch.nn.Linear(1000, 1000, bias=False, device="cuda")
    ...     return torch_ref.TrainingStep(model, lambda x: model(x).sum(), (torch.zeros(10, 1000, device="cuda"),))
    >>> if torch.cuda.is_available():
    ...     assert torch_ref.allocated_bytes(build).peak_bytes >= 8_000_000
    """
    where = torch.device(device)
    if where.type != "cuda" or not torch.cuda.is_available():
        raise InvalidArgumentError(
            f"device={str(device)!r}: expected a CUDA device of this machine, which has {torch.cuda.device_count()}. Without a "
            "GPU, torch_ref.peak_bytes tracks the same step on fake tensors."
        )
    step = build()
    if not isinstance(step, TrainingStep):
        raise InvalidArgumentError(f"build returned a {type(step).__name__}, expected a TrainingStep.")
    elsewhere = {str(tensor.device) for tensor in (*step.model.parameters(), *step.batch) if tensor.device.type != "cuda"}
    if elsewhere:
        raise InvalidArgumentError(
            f"build: the TrainingStep has tensors on {', '.join(sorted(elsewhere))}, expected all on {where}: make them there."
        )
    step.run()
    torch.cuda.synchronize(where)
    torch.cuda.reset_peak_memory_stats(where)
    before = torch.cuda.memory_allocated(where)
    step.run()
    torch.cuda.synchronize(where)
    return AllocatedBytes(torch.cuda.max_memory_allocated(where), torch.cuda.max_memory_reserved(where), before)
