"""Small blocks and helpers that several tests of the reference use."""

from __future__ import annotations

import gc
from typing import Any

import torch
from torch import nn

import torch_ref
from torch_ref.host import live_host_copies


class Gate(nn.Module):
    """Takes two tensors; the last operator is a matrix product."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.linear(torch.sigmoid(x) * torch.tanh(y))


def gradients(fn: Any, module: nn.Module, *inputs: torch.Tensor, seed: int = 0) -> list[torch.Tensor]:
    """Gradients of fn(*inputs) for all inputs that require one and all parameters, with a fixed random state."""
    torch.manual_seed(seed)
    wanted = [t for t in inputs if t.requires_grad] + list(module.parameters())
    output = fn(*inputs)
    weights = torch.linspace(-1, 1, output.numel(), dtype=output.dtype, device=output.device).reshape(output.shape)
    return list(torch.autograd.grad((output * weights).sum(), wanted))


def live_copies() -> int:
    gc.collect()
    return len(live_host_copies())


def all_equal(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return len(left) == len(right) and all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def call(mode: str, block: Any, /, *args: Any, **kwargs: Any) -> Any:
    flags = torch_ref.mode_flags(mode)
    return torch_ref.gradient_checkpoint_forward(block, *flags.values(), *args, **kwargs)
