"""Peak memory of a training step on fake tensors, which needs neither allocations nor an accelerator."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.distributed._tools.mem_tracker import MemTracker
from torch.utils._python_dispatch import TorchDispatchMode

from torch_ref.errors import FakeTensorStepError, InvalidArgumentError
from torch_ref.host import is_copying_to_host, live_host_copies

CATEGORIES = {
    "Parameter": "parameters",
    "Buffer": "buffers",
    "Gradient": "gradients",
    "Optstate": "optimizer_state",
    "Activation": "activations",
    "Temp": "temp",
    "Other": "batch",
}


@dataclass(frozen=True)
class TrainingStep:
    """The parts of a training step.

    Attributes:
        model: the module with the parameters.
        loss: a function from `*batch` to a scalar tensor, often a method of the model or a function that calls the model.
        batch: the arguments of `loss`.
        optimizer: the optimizer whose update ends the step; without an optimizer the step ends with the gradients.

    >>> import torch
    >>> model = torch.nn.Linear(2, 1)
    >>> step = TrainingStep(model, lambda x: model(x).sum(), (torch.ones(3, 2),), torch.optim.SGD(model.parameters(), lr=0.1))
    >>> before = model.bias.item()
    >>> step.run()
    >>> round(before - model.bias.item(), 4)  # the bias's gradient is the number of rows
    0.3
    """

    model: nn.Module
    loss: Callable[..., torch.Tensor]
    batch: tuple[torch.Tensor, ...]
    optimizer: torch.optim.Optimizer | None = None

    def run(self) -> None:
        """Run the step once: clear the gradients, forward, backward, update."""
        self.model.zero_grad(set_to_none=True)
        self.loss(*self.batch).backward()
        if self.optimizer is not None:
            self.optimizer.step()


@dataclass(frozen=True)
class PeakBytes:
    """Peak memory of a training step, on the device and in host copies.

    Attributes:
        device_bytes: bytes on the device at the peak, without host copies.
        breakdown: `device_bytes` by category: parameters, buffers, gradients, optimizer_state, activations, temp, batch.
        host_bytes: the largest number of bytes in host copies at any time of the step.
        tracked_bytes: the peak that `MemTracker` reports, which counts host copies as device memory.

    >>> import torch, torch_ref
    >>> def build():
    ...     model = torch.nn.Linear(100, 100, bias=False)
    ...     return torch_ref.TrainingStep(model, lambda x: model(x).sum(), (torch.ones(10, 100),))
    >>> peak = torch_ref.peak_bytes(build)
    >>> peak.breakdown["parameters"], peak.host_bytes, peak.device_bytes == sum(peak.breakdown.values())
    (40000, 0, True)
    """

    device_bytes: int
    breakdown: dict[str, int]
    host_bytes: int
    tracked_bytes: int


def peak_bytes(build: Callable[[], TrainingStep]) -> PeakBytes:
    """Track the memory of a training step, tensor by tensor, and return its peak.

    `build` is called under PyTorch's `FakeTensorMode` and must make model, optimizer and batch itself; their tensors are then
    fake CPU tensors and may have any size. A first step creates the optimizer's state;
    `torch.distributed._tools.mem_tracker.MemTracker` tracks the second step.

    The peak is the maximum, over all operators, of the sum of live storages. It is not the memory that a CUDA allocator
    reserves: rounding to 512 bytes, fragmentation, and workspaces of operators and libraries are missing, and fused
    attention takes its CPU path. `MemTracker` counts all allocations of an optimizer's update as optimizer state, and memory
    of a recomputation either as activations or as temporary; the total is unaffected.

    `MemTracker` cannot distinguish host copies from other fake CPU tensors. `torch_ref` tracks its own host copies: their
    bytes are subtracted from the activations after every operator, and no peak is recorded during a copy to the host, which
    allocates no device memory. Copies that a recomputation brings back count as device memory. Offloads by other libraries
    are not recognised.

    Raises:
        InvalidArgumentError: if `build` does not return a `TrainingStep` of fake tensors.
        FakeTensorStepError: if the step reads a value, as `.item()` does; fake tensors have no values.

    >>> import torch, torch_ref
    >>> def build():
    ...     model = torch.nn.Linear(1000, 1000, bias=False)
    ...     return torch_ref.TrainingStep(model, lambda x: model(x).sum(), (torch.zeros(10, 1000),))
    >>> peak = torch_ref.peak_bytes(build)
    >>> peak.breakdown["parameters"], peak.breakdown["batch"], peak.host_bytes
    (4000000, 40000, 0)
    """
    fake_mode = FakeTensorMode()
    with fake_mode:
        try:
            step = build()
            _check(step)
            step.run()
            gc.collect()
            return _tracked(step, fake_mode)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise FakeTensorStepError(
                f"the step reads the value of a fake tensor ({error}), but fake tensors have no values: remove `.item()`, "
                "printing and branches on values, and choose an optimizer that reads no values (`fused=True`)."
            ) from error


def _check(step: TrainingStep) -> None:
    if not isinstance(step, TrainingStep):
        raise InvalidArgumentError(f"build returned a {type(step).__name__}, expected a TrainingStep.")
    for part, tensors in (("model", step.model.parameters()), ("batch", step.batch)):
        if not all(isinstance(tensor, FakeTensor) for tensor in tensors):
            raise InvalidArgumentError(
                f"{part} of the TrainingStep has tensors that existed before, expected ones that build makes itself:"
                " move their construction into build."
            )


def _tracked(step: TrainingStep, fake_mode: FakeTensorMode) -> PeakBytes:
    tracker = MemTracker()
    tracker.track_external(step.model, *step.batch)
    if step.optimizer is not None:
        tracker.track_external(step.optimizer)
    peak = _DevicePeak(tracker, fake_mode)
    with tracker, peak:
        step.run()
    tracked = _by_category(tracker.get_tracker_snapshot("peak"))
    return PeakBytes(sum(peak.breakdown.values()), peak.breakdown, peak.host_bytes, sum(tracked.values()))


@dataclass
class _DevicePeak(TorchDispatchMode):
    """Reads the tracker after every operator, subtracts host copies, and keeps the maximum."""

    tracker: MemTracker
    fake_mode: FakeTensorMode
    breakdown: dict[str, int] = field(default_factory=dict)
    host_bytes: int = 0

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if not is_copying_to_host():
            self._read()
        return result

    def _read(self) -> None:
        now = _by_category(self.tracker.get_tracker_snapshot("current"))
        host = sum(copy.nbytes for copy in live_host_copies() if self._is_ours(copy.tensor))
        now["activations"] -= host
        self.host_bytes = max(self.host_bytes, host)
        if sum(now.values()) > sum(self.breakdown.values()):
            self.breakdown = now

    def _is_ours(self, tensor: torch.Tensor) -> bool:
        return isinstance(tensor, FakeTensor) and tensor.fake_mode is self.fake_mode


def _by_category(snapshot: dict[torch.device, dict[str, int]]) -> dict[str, int]:
    totals = dict.fromkeys(CATEGORIES.values(), 0)
    for device in snapshot.values():
        for kind, nbytes in device.items():
            category = CATEGORIES.get(getattr(kind, "value", ""))
            if category is not None:
                totals[category] += nbytes
    return totals
