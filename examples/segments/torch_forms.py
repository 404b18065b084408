"""The forms in PyTorch, and their measurements."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
import torch

import torch_ref
from remat_jax.porting import as_numpy

from .. import pytorch
from .setting import Setting

FRAMEWORK = "PyTorch"
Segments = int | Sequence[int] | None


def model_of(setting: Setting, num_layers: int | None = None) -> pytorch.DeepMLP:
    """The model in float32, the same weights in every call, large enough that signals survive all layers."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(setting.seed)
        model = pytorch.DeepMLP(num_layers or setting.num_layers, **setting.widths)
        for layer in model.layers:
            torch.nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
    return model


def segments_of(name: str, boundaries: Sequence[int]) -> Segments:
    """The argument of `DeepMLP` for a cut: PyTorch's own function makes the uniform cuts."""
    if name.startswith("by hand"):
        return tuple(boundaries)
    return len(boundaries) + 1 if boundaries else None


def loss_of(model: pytorch.DeepMLP, segments: Segments) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """The weighted sum of the outputs."""
    return lambda x, weights: (model(x, segments=segments) * weights).sum()


def gradients(setting: Setting, segments: Segments) -> dict[str, np.ndarray]:
    """All gradients in float64."""
    model = model_of(setting).double()
    loss_of(model, segments)(*(torch.tensor(array) for array in setting.data("float64"))).backward()
    return {name: as_numpy(parameter.grad) for name, parameter in model.named_parameters()}


def saved_bytes(setting: Setting, segments: Segments, num_layers: int | None = None) -> int:
    """The bytes that the graph keeps of the model between the passes, without the batch."""
    model = model_of(setting, num_layers)
    return torch_ref.saved_for_backward(lambda x: model(x, segments=segments), torch.tensor(setting.data()[0])).device_bytes


def peak_bytes(setting: Setting, segments: Segments, num_layers: int | None = None) -> int:
    """The tracked peak of a step that ends with the gradients."""

    def build() -> torch_ref.TrainingStep:
        model = pytorch.DeepMLP(num_layers or setting.num_layers, **setting.widths)
        x = torch.zeros(setting.batch, setting.in_features)
        return torch_ref.TrainingStep(model, lambda x: model(x, segments=segments).sum(), (x,))

    return torch_ref.peak_bytes(build).device_bytes


def counts(setting: Setting, segments: Segments) -> tuple[int, int]:
    """A layer's forward executions in a step, and the matrix products of the step."""
    model = model_of(setting)
    loss = loss_of(model, segments)
    with torch_ref.count_calls(torch.nn.Linear) as calls, torch_ref.count_matmuls() as matmuls:
        loss(*map(torch.tensor, setting.data())).backward()
    return calls.total, matmuls.total


class Stepper:
    """Runs steps and measures the time of each."""

    def __init__(self, setting: Setting, segments: Segments) -> None:
        self._model = model_of(setting)
        self._loss = loss_of(self._model, segments)
        self._data = [torch.tensor(array) for array in setting.data()]

    def compiled_matmuls(self) -> None:
        """Nothing is compiled."""

    def step(self, batch: object) -> tuple[float, float]:
        """The loss, and the seconds of the step."""
        start = time.perf_counter()
        self._model.zero_grad()
        loss = self._loss(*self._data)
        loss.backward()
        value = loss.item()
        return value, time.perf_counter() - start
