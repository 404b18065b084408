"""The vision tower of SigLIP: patches, learned positions, an encoder; no pooling.

Parameters have the names of `SiglipVisionModel` in `transformers`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from torch_ref.checkpoint import gradient_checkpoint_forward
from torch_ref.errors import InvalidArgumentError


class SiglipAttention(nn.Module):
    """Multi-head attention of every patch to every patch, with explicit products: (batch, patches, width) → the same."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        if heads < 1 or width % heads:
            raise InvalidArgumentError(f"heads is {heads}, expected a divisor of width, which is {width}.")
        self.heads = heads
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(width, width) for _ in range(3))
        self.out_proj = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attend."""
        q, k, v = (
            project(x).unflatten(-1, (self.heads, -1)).transpose(1, 2).flatten(0, 1)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        scores = torch.bmm(q, k.transpose(1, 2)) * q.shape[-1] ** -0.5
        mixed = torch.bmm(scores.softmax(dim=-1), v).unflatten(0, (-1, self.heads))
        return self.out_proj(mixed.transpose(1, 2).flatten(2))


class SiglipMlp(nn.Module):
    """Linear, GELU by the tanh formula, linear."""

    def __init__(self, width: int, mlp_dim: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(width, mlp_dim), nn.Linear(mlp_dim, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the MLP along the last axis."""
        return self.fc2(F.gelu(self.fc1(x), approximate="tanh"))


class SiglipLayer(nn.Module):
    """A pre-norm layer, (batch, patches, width) → the same: the block of checkpointing.

    >>> SiglipLayer(width=8, heads=2, mlp_dim=12)(torch.zeros(2, 5, 8)).shape
    torch.Size([2, 5, 8])
    """

    def __init__(self, width: int, heads: int, mlp_dim: int) -> None:
        super().__init__()
        self.layer_norm1, self.layer_norm2 = nn.LayerNorm(width, eps=1e-6), nn.LayerNorm(width, eps=1e-6)
        self.self_attn = SiglipAttention(width, heads)
        self.mlp = SiglipMlp(width, mlp_dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute the layer."""
        x = x + self.self_attn(self.layer_norm1(x))
        return x + self.mlp(self.layer_norm2(x))


class SiglipTower(nn.Module):
    """Images (batch, 3, image_size, image_size) → the states of their patches (batch, patches, width).

    Raises:
        InvalidArgumentError: if there is no layer, `patch_size` does not divide `image_size`, `heads` does not divide
            `width`, or images have another shape.

    >>> tower = SiglipTower(width=8, heads=2, mlp_dim=12, num_layers=1, image_size=6, patch_size=3)
    >>> tower(torch.zeros(2, 3, 6, 6)).shape
    torch.Size([2, 4, 8])
    """

    def __init__(self, width: int, heads: int, mlp_dim: int, num_layers: int, image_size: int, patch_size: int) -> None:
        super().__init__()
        if num_layers < 1:
            raise InvalidArgumentError(f"num_layers of the vision tower is {num_layers}, expected at least 1.")
        if patch_size < 1 or image_size % patch_size:
            raise InvalidArgumentError(f"patch_size is {patch_size}, expected a divisor of image_size, which is {image_size}.")
        self.image_size = image_size
        self.embeddings = nn.ModuleDict(
            {
                "patch_embedding": nn.Conv2d(3, width, kernel_size=patch_size, stride=patch_size),
                "position_embedding": nn.Embedding((image_size // patch_size) ** 2, width),
            }
        )
        layers = nn.ModuleList(SiglipLayer(width, heads, mlp_dim) for _ in range(num_layers))
        self.encoder = nn.ModuleDict({"layers": layers})
        self.post_layernorm = nn.LayerNorm(width, eps=1e-6)

    def forward(
        self,
        images: torch.Tensor,
        use_gradient_checkpointing: bool = False,
        use_gradient_checkpointing_offload: bool = False,
    ) -> torch.Tensor:
        """Encode; the flags are those of `gradient_checkpoint_forward`, for each layer."""
        expected = (3, self.image_size, self.image_size)
        if tuple(images.shape[1:]) != expected:
            raise InvalidArgumentError(
                f"images have shape {tuple(images.shape)}, expected (batch, {', '.join(map(str, expected))}): resize them,"
                " and put the channels first."
            )
        x = self.embeddings["patch_embedding"](images).flatten(2).transpose(1, 2)
        x = x + self.embeddings["position_embedding"].weight
        for layer in self.encoder["layers"]:
            x = gradient_checkpoint_forward(layer, use_gradient_checkpointing, use_gradient_checkpointing_offload, x)
        return self.post_layernorm(x)
