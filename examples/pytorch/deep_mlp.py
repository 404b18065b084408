"""A deep perceptron: many linear layers of equal width, each followed by a ReLU, and a linear head."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint_sequential

from torch_ref.checkpoint import gradient_checkpoint_forward
from torch_ref.errors import InvalidArgumentError

from .segments import check_segments, checkpoint_segments


class MlpLayer(nn.Linear):
    """A linear layer with its ReLU: (batch, in_features) → (batch, out_features), one block.

    Its parameters are those of a linear layer, `weight` and `bias`. The ReLU is inside, so cutting a list of blocks
    cannot lose it.

    >>> MlpLayer(3, 5)(torch.ones(2, 3)).min().item() >= 0
    True
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute `relu(x Wᵀ + b)`."""
        return torch.relu(super().forward(x))


class DeepMLP(nn.Module):
    """`num_layers` linear layers, each but the last followed by a ReLU: `num_layers - 1` blocks and a head.

    Shapes: (batch, in_features) → (batch, out_features), with `hidden_size` in between. Parameters are named
    `layers.N.weight` and `layers.N.bias`; the last layer is the head.

    Raises:
        InvalidArgumentError: if `num_layers` is less than 2.

    >>> model = DeepMLP(num_layers=16, hidden_size=8, in_features=6)
    >>> model(torch.zeros(3, 6), segments=4).shape
    torch.Size([3, 10])
    """

    def __init__(self, num_layers: int = 10, hidden_size: int = 512, in_features: int = 1024, out_features: int = 10) -> None:
        super().__init__()
        if num_layers < 2:
            raise InvalidArgumentError(f"num_layers is {num_layers}, expected at least 2: an input layer and the head.")
        blocks = [MlpLayer(hidden_size if index else in_features, hidden_size) for index in range(num_layers - 1)]
        self.layers = nn.ModuleList([*blocks, nn.Linear(hidden_size, out_features)])

    def forward(
        self,
        x: torch.Tensor,
        use_gradient_checkpointing: bool = False,
        use_gradient_checkpointing_offload: bool = False,
        *,
        segments: int | Sequence[int] | None = None,
    ) -> torch.Tensor:
        """Run all layers on `x` of shape (batch, in_features).

        The flags put each block into one of the three modes of `gradient_checkpoint_forward`; the head is outside.
        `segments` cuts the list of layers instead, including the head: an integer is the number of segments for PyTorch's
        `checkpoint_sequential`; a sequence gives the indices at which the segments after the first begin
        (`checkpoint_segments`). In both cases the last segment is not checkpointed.

        Raises:
            InvalidArgumentError: if `segments` does not fit the number of layers, or is given together with a flag.
        """
        if segments is None:
            for block in self.layers[:-1]:
                x = gradient_checkpoint_forward(block, use_gradient_checkpointing, use_gradient_checkpointing_offload, x)
            return self.layers[-1](x)
        if use_gradient_checkpointing or use_gradient_checkpointing_offload:
            raise InvalidArgumentError(
                f"segments is {segments!r} and a flag is True: each would checkpoint the same blocks. Give one of them."
            )
        if isinstance(segments, Sequence):
            return checkpoint_segments(self.layers, segments, x)
        check_segments(len(self.layers), segments)
        return checkpoint_sequential(self.layers, segments, x, use_reentrant=False)
