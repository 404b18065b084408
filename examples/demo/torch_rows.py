"""Measurements in PyTorch: gradients, training, executions, residuals and peak memory of a mode."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

import torch_ref
from remat_jax.porting import as_numpy

from .cases import Batch, Case
from .outcome import Evidence
from .setting import BLOCK_RUNS

FRAMEWORK = "PyTorch"


class TorchTrainer:
    """The training of a case in one mode, step by step."""

    def __init__(self, case: Case, mode: str) -> None:
        self.model = case.torch_model()
        self.loss = case.torch_loss(self.model, mode)
        self.optimizer = torch.optim.Adam(self.model.parameters(), case.learning_rate)

    def step(self, batch: Batch) -> float:
        """The loss before the update."""
        tensors = to_tensors(batch)
        self.optimizer.zero_grad()
        loss = self.loss(*tensors)
        loss.backward()
        self.optimizer.step()
        return loss.item()


def measure(case: Case, mode: str, trainer: TorchTrainer) -> Evidence:
    """Train with `trainer` and measure."""
    batches = case.batches()
    loss_of = case.torch_loss(model := case.torch_model(), mode)
    tensors = to_tensors(batches[0])
    saved = torch_ref.saved_for_backward(loss_of, *tensors)
    with torch_ref.count_calls(*case.blocks) as calls:
        loss_of(*tensors).backward()
    return Evidence(
        framework=FRAMEWORK,
        model=case.name,
        mode=mode,
        losses=tuple(trainer.step(batch) for batch in batches),
        gradients64=gradients(case, mode, torch.float64),
        gradients32=gradients_of(model),
        block_executions=calls.total,
        expected_executions=BLOCK_RUNS[mode] * case.layers,
        offloads=mode == "offload",
        residual_device_bytes=saved.device_bytes,
        residual_host_bytes=saved.host_bytes,
        peak_bytes={"torch": torch_ref.peak_bytes(_step(case, mode)).device_bytes, "cpu": None, "h200": None},
    )


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute in one thread: several threads wait for each other by spinning, which stalls them on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def gradients(case: Case, mode: str, dtype: torch.dtype) -> dict[str, np.ndarray]:
    """The gradients of the first batch at the initial weights, the whole computation in `dtype`."""
    model = case.torch_model().to(dtype)
    case.torch_loss(model, mode)(*to_tensors(case.batches()[0], dtype)).backward()
    return gradients_of(model)


def gradients_of(model: torch.nn.Module) -> dict[str, np.ndarray]:
    """The gradients that a backward pass has stored."""
    return {name: as_numpy(parameter.grad) for name, parameter in model.named_parameters()}


def to_tensors(batch: Batch, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    """Copies as tensors: integers as int64, which PyTorch's losses require, other arrays in `dtype`."""
    return tuple(torch.tensor(x, dtype=torch.int64 if x.dtype.kind == "i" else dtype) for x in batch)


def _step(case: Case, mode: str) -> Callable[[], Any]:
    batch = case.batches()[0]

    def build() -> torch_ref.TrainingStep:
        # Under fake tensors: only shapes matter there.
        model = case.module()
        optimizer = torch.optim.Adam(model.parameters(), case.learning_rate)
        integer = [x.dtype.kind == "i" for x in batch]
        tensors = tuple(
            torch.zeros(x.shape, dtype=torch.int64 if is_integer else torch.float32)
            for x, is_integer in zip(batch, integer, strict=True)
        )
        return torch_ref.TrainingStep(model, case.torch_loss(model, mode), tensors, optimizer)

    return build
