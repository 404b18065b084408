"""A recomputation that must run to its end, and one that differs from the forward pass."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import torch_ref
from parity_tests.reference.blocks import call


class Changing(nn.Module):
    """A block whose second run differs from its first."""

    def __init__(self, change: str) -> None:
        super().__init__()
        self.linear, self.change, self.cache, self.queue = nn.Linear(4, 4), change, [], [2.0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        self.cache.append(y)
        match self.change:
            case "cache":
                return torch.tanh(torch.cat(self.cache, 1)).sum()
            case "shape in an operator":
                return torch.tanh(torch.cat(self.cache, 1) + y.detach()).sum()
            case "fewer":
                return torch.tanh(y) if len(self.cache) > 1 else torch.tanh(torch.sin(torch.tanh(y)))
            case "dtype":
                return torch.tanh(y.double() if len(self.cache) > 1 else y)
            case _:
                return torch.tanh(y * self.queue.pop())


@pytest.mark.parametrize("way", ["offload", "full", "save: *linear*"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("cache", "recomputed metadata: .*2, 6, 4"),
        ("shape in an operator", "raised RuntimeError, and its forward pass did not"),
        ("fewer", "tensors saved during forward|computes"),
        ("dtype", "torch.float64|computes"),
        ("queue", "raised IndexError, and its forward pass did not: pop from empty list"),
    ],
)
def test_a_block_that_runs_otherwise_the_second_time_is_named_with_the_remedy(way, change, message):
    block, x = Changing(change), torch.ones(2, 3, 4, requires_grad=True) * 1.0
    run = call if way in torch_ref.MODES else lambda way, *rest: torch_ref.selective_checkpoint(rest[0], way, *rest[1:])
    output = run(way, block, x)
    with pytest.raises(torch_ref.ChangedRecomputationError, match=message) as caught:
        output.sum().backward()
    assert "Changing" in str(caught.value) and "as an argument of the block" in str(caught.value)
