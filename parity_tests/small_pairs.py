"""Pairs of small models: named PyTorch layers, and a forward pass of each framework as a function.

In both frameworks the function gets the module first, and then the inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import numpy as np
import torch

from remat_jax import porting

DENSE = "{name}.weight -> params/{name}/kernel | linear\n{name}.bias -> params/{name}/bias"
"""The rules of all linear layers at the root of a model."""
LINEAR = "weight -> params/kernel | linear\nbias -> params/bias"
"""The rules of one linear layer."""
SERIES = np.random.default_rng(0).normal(size=(6, 5, 4)).astype(np.float32)


class Torch(torch.nn.Module):
    """A module of PyTorch with named inner modules, parameters or numbers."""

    def __init__(self, run: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.run = run
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *inputs: Any) -> Any:
        return self.run(self, *inputs)


class Flax(nn.Module):
    """A Linen module that makes its inner modules where it calls them."""

    run: Callable[..., Any]

    @nn.compact
    def __call__(self, *inputs: Any) -> Any:
        return self.run(self, *inputs)


class Kernel(nn.Module):
    """A square dense layer whose kernel has PyTorch's layout, or Flax's."""

    turned: bool = True
    width: int = 4

    @nn.compact
    def __call__(self, x: Any) -> Any:
        kernel = self.param("kernel", nn.initializers.lecun_normal(), (self.width, self.width), x.dtype)
        bias = self.param("bias", nn.initializers.zeros, (self.width,), x.dtype)
        return x @ (kernel.T if self.turned else kernel) + bias


def linears(width: int, *names: str) -> dict[str, torch.nn.Module]:
    """Square linear layers by name."""
    return {name: torch.nn.Linear(width, width) for name in names}


def mlp() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))


def finding(report: Any, name: str) -> str:
    """What a check of a report has found."""
    return next(check.found for check in report.checks if check.name == name)


def named(report: Any, direction: str, *fields: str) -> Any:
    """Some fields of the first difference in a direction; None if nothing differs."""
    first = report.divergences.get(direction)
    return first and tuple(first[field] for field in fields)


def gradients_of(model: torch.nn.Module) -> dict[str, np.ndarray]:
    """The gradients by name; zeros for parameters that the loss does not reach."""
    named = model.named_parameters()
    return {name: porting.as_numpy(torch.zeros_like(x) if x.grad is None else x.grad) for name, x in named}
