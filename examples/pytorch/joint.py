"""Two transformers that attend to each other, layer by layer: a prefix (image and prompt) and an action expert.

The structure of OpenPI's π0, at any size: a vision tower makes the prefix, each stream has its own weights, and a joint
attention runs over both. The block of checkpointing is a `JointLayer`: it takes and returns a *list* of two tensors.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

from torch_ref.checkpoint import gradient_checkpoint_forward
from torch_ref.errors import InvalidArgumentError


class ExpertLayer(nn.Module):
    """The weights of a stream in a layer: projections into and out of the shared attention, and an MLP."""

    def __init__(self, width: int, attention_width: int) -> None:
        super().__init__()
        self.norm1 = nn.RMSNorm(width, eps=1e-6)
        self.qkv = nn.Linear(width, 3 * attention_width, bias=False)
        self.out = nn.Linear(attention_width, width, bias=False)
        self.norm2 = nn.RMSNorm(width, eps=1e-6)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)


class JointLayer(nn.Module):
    """One layer of both streams: pre-norm, one attention over the concatenated streams, an MLP for each.

    Shapes: streams (batch, time_i, width_i) → the same; mask (total time, total time), added to the scores.

    >>> layer = JointLayer((8, 4), attention_width=8, heads=2)
    >>> [y.shape[-1] for y in layer([torch.zeros(2, 3, 8), torch.zeros(2, 5, 4)], torch.zeros(8, 8))]
    [8, 4]
    """

    def __init__(self, widths: Sequence[int], attention_width: int, heads: int) -> None:
        super().__init__()
        if heads < 1 or attention_width % heads:
            raise InvalidArgumentError(f"heads is {heads}, expected a divisor of attention_width, which is {attention_width}.")
        self.experts = nn.ModuleList(ExpertLayer(width, attention_width) for width in widths)
        self.heads = heads

    def forward(self, streams: Sequence[torch.Tensor], mask: torch.Tensor) -> list[torch.Tensor]:
        """Compute the layer for both streams."""
        lengths = [x.shape[1] for x in streams]
        packed = torch.cat([e.qkv(e.norm1(x)) for e, x in zip(self.experts, streams, strict=True)], dim=1)
        batch, total, width = packed.shape
        q, k, v = packed.reshape(batch, total, 3, self.heads, width // 3 // self.heads).permute(2, 0, 3, 1, 4).flatten(1, 2)
        scores = torch.bmm(q, k.transpose(1, 2)) * q.shape[-1] ** -0.5 + mask
        mixed = torch.bmm(scores.softmax(dim=-1), v).unflatten(0, (batch, self.heads)).transpose(1, 2).flatten(2)
        streams = [x + e.out(part) for e, x, part in zip(self.experts, streams, mixed.split(lengths, dim=1), strict=True)]
        return [x + e.down(F.gelu(e.up(e.norm2(x)))) for e, x in zip(self.experts, streams, strict=True)]


class JointDecoder(nn.Module):
    """A vision tower, joint layers, and a final norm and projection for the actions.

    Parameters: `vision_tower.…`, `layers.N.experts.{0,1}.…`, `norms.{0,1}.weight`, `action_in.…`, `action_out.…`.

    >>> model = JointDecoder(num_layers=2, widths=(8, 4), heads=2, patch=12, action_dim=3)
    >>> model(torch.zeros(2, 5, 12), torch.zeros(2, 4, 3), use_gradient_checkpointing=True).shape
    torch.Size([2, 4, 3])
    """

    def __init__(
        self,
        num_layers: int,
        widths: tuple[int, int] = (32, 16),
        heads: int = 2,
        patch: int = 48,
        action_dim: int = 8,
    ) -> None:
        super().__init__()
        if num_layers < 1:
            raise InvalidArgumentError(f"num_layers is {num_layers}, expected at least 1.")
        self.vision_tower = nn.Linear(patch, widths[0])
        self.action_in = nn.Linear(action_dim, widths[1])
        self.layers = nn.ModuleList(JointLayer(widths, widths[0], heads) for _ in range(num_layers))
        self.norms = nn.ModuleList(nn.RMSNorm(width, eps=1e-6) for width in widths)
        self.action_out = nn.Linear(widths[1], action_dim)

    def forward(
        self,
        patches: torch.Tensor,
        actions: torch.Tensor,
        use_gradient_checkpointing: bool = False,
        use_gradient_checkpointing_offload: bool = False,
    ) -> torch.Tensor:
        """Predict (batch, horizon, action_dim) from patches (batch, n, patch) and noisy actions of the result's shape."""
        streams = [self.vision_tower(patches), self.action_in(actions)]
        mask = self.mask(streams)
        flags = (use_gradient_checkpointing, use_gradient_checkpointing_offload)
        for layer in self.layers:
            streams = gradient_checkpoint_forward(layer, *flags, streams, mask)
        return self.action_out(self.norms[1](streams[1]))

    def mask(self, streams: Sequence[torch.Tensor]) -> torch.Tensor:
        """The additive mask: the prefix sees itself, the actions see everything; −∞ hides a position."""
        prefix, total = streams[0].shape[1], sum(x.shape[1] for x in streams)
        mask = streams[0].new_zeros(total, total)
        mask[:prefix, prefix:] = -torch.inf
        return mask
