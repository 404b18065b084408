"""Parts of Gemma: an optionally conditioned norm, rotary positions, the weights of a stream of a joint layer.

Parameters have the names of `transformers`; a conditioned norm has the names of OpenPI's modified version.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from torch_ref.errors import InvalidArgumentError

Rotation = tuple[torch.Tensor, torch.Tensor]


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums that must not lose digits: `dtype`, at least float32.

    >>> wide(torch.bfloat16), wide(torch.float64)
    (torch.float32, torch.float64)
    """
    return torch.promote_types(dtype, torch.float32)


class AdaptiveRMSNorm(nn.Module):
    """x / sqrt(mean(x²) + ε), scaled; with `condition_width` the scale, a shift and a gate come from a condition.

    Without a condition the scale is 1 + `weight`, there is no shift, and the gate is None. With a condition, `dense` maps
    it to (scale, shift, gate), and the result is normed · (1 + scale) + shift; `dense` starts at zero.

    Shapes: x (batch, time, width), condition (batch, condition_width) → x's shape, and a gate (batch, 1, width) or None.

    >>> y, gate = AdaptiveRMSNorm(2)(torch.tensor([[[3.0, 4.0]]]))
    >>> [round(float(v), 3) for v in y.detach()[0, 0]], gate
    ([0.849, 1.131], None)
    """

    def __init__(self, width: int, condition_width: int | None = None, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        if condition_width is None:
            self.weight = nn.Parameter(torch.zeros(width))
        else:
            self.dense = nn.Linear(condition_width, 3 * width)
            nn.init.zeros_(self.dense.weight)
            nn.init.zeros_(self.dense.bias)
        self.is_adaptive = condition_width is not None

    def forward(self, x: torch.Tensor, condition: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the normed x and the gate, in the dtype of x."""
        exact = x.to(wide(x.dtype))
        normed = exact * torch.rsqrt(exact.square().mean(-1, keepdim=True) + self.eps)
        if not self.is_adaptive:
            return (normed * (1 + self.weight.to(exact.dtype))).to(x.dtype), None
        if condition is None:
            raise InvalidArgumentError("condition is None, expected (batch, condition_width): it conditions this norm.")
        scale, shift, gate = self.dense(condition)[:, None].to(exact.dtype).chunk(3, dim=-1)
        return (normed * (1 + scale) + shift).to(x.dtype), gate.to(x.dtype)


def gated_residual(x: torch.Tensor, y: torch.Tensor, gate: torch.Tensor | None) -> torch.Tensor:
    """x + y · gate; without a gate x + y."""
    return x + y if gate is None else x + y * gate


def rotations(positions: torch.Tensor, head_dim: int, dtype: torch.dtype, theta: float = 10000.0) -> Rotation:
    """Cosine and sine of rotary positions, (batch, time) → twice (batch, 1, time, head_dim / 2) in `dtype`.

    The angles are in float32 at least: in bfloat16 a position beyond 256 would be rounded.

    >>> [t.shape for t in rotations(torch.arange(3)[None], 8, torch.float32)]
    [torch.Size([1, 1, 3, 4]), torch.Size([1, 1, 3, 4])]
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64, device=positions.device) / head_dim
    angles = positions[:, None, :, None].to(wide(dtype)) * (theta**-exponents).to(wide(dtype))
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """Rotate each pair (x[i], x[i + D/2]) of (batch, heads, time, D) by its angle."""
    cos, sin = rotation
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class GemmaAttentionWeights(nn.Module):
    """The four projections of a stream; all streams share the attention itself."""

    def __init__(self, width: int, heads: int, kv_heads: int, head_dim: int) -> None:
        super().__init__()
        self.q_proj = nn.Linear(width, heads * head_dim, bias=False)
        self.k_proj = nn.Linear(width, kv_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(width, kv_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(heads * head_dim, width, bias=False)


class GemmaMlp(nn.Module):
    """down(gelu(gate(x)) · up(x)), without biases; GELU by the tanh formula."""

    def __init__(self, width: int, mlp_dim: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(width, mlp_dim, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(mlp_dim, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the MLP along the last axis."""
        return self.down_proj(F.gelu(self.gate_proj(x), approximate="tanh") * self.up_proj(x))
