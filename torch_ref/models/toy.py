"""A minimal block for examples."""

from __future__ import annotations

import torch
from torch import nn


class ToyModel(nn.Module):
    """A single sigmoid.

    >>> ToyModel()(torch.zeros(1)).item()
    0.5
    """

    def __init__(self) -> None:
        super().__init__()
        self.activation = nn.Sigmoid()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the sigmoid to a tensor of any shape."""
        return self.activation(x)
