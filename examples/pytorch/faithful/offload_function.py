"""The `OffloadFunction` of tutorials on offloading, with its fault: it doubles the gradient.

Forward copies its input to the host and returns the input unchanged. Backward fetches the copy, computes a stand-in for
"the model's own forward" (`x * 2`) and returns its gradient. Forward and backward thus belong to two functions:
the gradient is twice the correct one. Nothing is freed, because the input is returned and the next layer keeps it.
`torch_ref.OffloadFunction` is the correct form.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class OffloadFunction(torch.autograd.Function):
    """The identity in forward, times two in backward.

    >>> import torch
    >>> x = torch.ones(2, requires_grad=True)
    >>> y = OffloadFunction.apply(x)
    >>> y.sum().backward()
    >>> y.tolist(), x.grad.tolist()
    ([1.0, 1.0], [2.0, 2.0])
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        """Copy `x` to the host, and return it."""
        ctx.save_for_backward(x.detach().to("cpu", copy=True))
        ctx.device = x.device
        return x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor | None:
        """The gradient of `x * 2`."""
        (kept,) = ctx.saved_tensors
        x = kept.to(ctx.device).requires_grad_()
        with torch.enable_grad():
            (x * 2).backward(grad)
        return x.grad


class OffloadDecoder(nn.Module):
    """Two linear layers, (batch, width) → the same, with the function between them.

    >>> OffloadDecoder(8)(torch.ones(2, 8)).shape
    torch.Size([2, 8])
    """

    def __init__(self, width: int = 512) -> None:
        super().__init__()
        self.layer1 = nn.Linear(width, width)
        self.layer2 = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run both layers."""
        return self.layer2(OffloadFunction.apply(self.layer1(x)))
