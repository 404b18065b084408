"""π0 and π0.5, the policies of OpenPI: a vision tower, a language model and an action expert that attend to each other.

Images and a prompt form the prefix, which sees itself; the state and the noisy actions form the suffix, which also sees
the prefix. Each stream has its own weights, and a layer's attention runs over both. The model predicts the velocity from
actions to noise (flow matching).

Black et al., "π0: A Vision-Language-Action Flow Model for General Robot Control", 2024; π0.5, 2025.
`faithful.PI0Pytorch` checkpoints this model as OpenPI does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from torch_ref.checkpoint import gradient_checkpoint_forward
from torch_ref.errors import InvalidArgumentError

from ..pi0_sizes import Observation, Pi0Config, check_shapes
from .gemma import (
    AdaptiveRMSNorm,
    GemmaAttentionWeights,
    GemmaMlp,
    Rotation,
    gated_residual,
    rotate,
    rotations,
    wide,
)
from .siglip import SiglipTower

MIN_PERIOD, MAX_PERIOD = 4e-3, 4.0
PARTS = (
    "vision_tower",
    "projector",
    "embed_tokens",
    "layers",
    "prefix_norm",
    "suffix_norm",
    "action_in_proj",
    "action_out_proj",
)


class Shared(NamedTuple):
    """The inputs of all layers: the positions' rotations, the bias of the scores, and the condition of the expert's norms."""

    rotation: Rotation
    bias: torch.Tensor
    condition: torch.Tensor | None


class Pi0Stream(nn.Module):
    """The weights of one stream in one layer."""

    def __init__(self, config: Pi0Config, index: int) -> None:
        super().__init__()
        width, condition = config.widths[index], condition_width(config, index)
        self.input_layernorm = AdaptiveRMSNorm(width, condition)
        self.self_attn = GemmaAttentionWeights(width, config.num_heads, config.num_kv_heads, config.head_dim)
        self.post_attention_layernorm = AdaptiveRMSNorm(width, condition)
        self.mlp = GemmaMlp(width, config.mlp_dims[index])

    def finish(
        self, x: torch.Tensor, mixed: torch.Tensor, gate: torch.Tensor | None, condition: torch.Tensor | None
    ) -> torch.Tensor:
        """The part after the attention: a gated residual, then an MLP with its own gated residual."""
        x = gated_residual(x, self.self_attn.o_proj(mixed), gate)
        normed, gate = self.post_attention_layernorm(x, condition)
        return gated_residual(x, self.mlp(normed), gate)


class Pi0Layer(nn.Module):
    """A layer of both streams: the block of checkpointing. It takes and returns a list of two tensors.

    Shapes: streams (batch, time_i, width_i) → the same.

    Raises:
        InvalidArgumentError: if `streams` does not have two tensors.

    >>> config = Pi0Config(depth=1)
    >>> layer = Pi0(config).layers[0]
    >>> isinstance(layer, Pi0Layer)
    True
    """

    def __init__(self, config: Pi0Config) -> None:
        super().__init__()
        self.config = config
        self.experts = nn.ModuleList(Pi0Stream(config, index) for index in range(2))

    def forward(self, streams: Sequence[torch.Tensor], shared: Shared) -> list[torch.Tensor]:
        """Compute the layer."""
        if len(streams) != 2:
            raise InvalidArgumentError(f"streams has {len(streams)} tensors, expected two: the prefix and the suffix.")
        conditions = (None, shared.condition)
        normed, gates = zip(
            *(e.input_layernorm(x, c) for e, x, c in zip(self.experts, streams, conditions, strict=True)), strict=True
        )
        query, key, value = (
            torch.cat([self._heads(getattr(e.self_attn, name)(x)) for e, x in zip(self.experts, normed, strict=True)], dim=2)
            for name in ("q_proj", "k_proj", "v_proj")
        )
        mixed = self._attend(rotate(query, shared.rotation), rotate(key, shared.rotation), value, shared.bias)
        parts = mixed.split([x.shape[1] for x in streams], dim=1)
        return [e.finish(*rest) for e, *rest in zip(self.experts, streams, parts, gates, conditions, strict=True)]

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (-1, self.config.head_dim)).transpose(1, 2)

    def _attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        """Attention with explicit products; several query heads share one head of keys and values."""
        batch, heads = query.shape[:2]
        key, value = (x.repeat_interleave(heads // x.shape[1], dim=1).flatten(0, 1) for x in (key, value))
        scores = torch.bmm(query.flatten(0, 1), key.transpose(1, 2)) * self.config.head_dim**-0.5
        scores = scores.unflatten(0, (batch, heads)) + bias
        weights = scores.to(wide(scores.dtype)).softmax(dim=-1).to(scores.dtype)
        mixed = torch.bmm(weights.flatten(0, 1), value).unflatten(0, (batch, heads))
        return mixed.transpose(1, 2).flatten(2)


class Pi0(nn.Module):
    """The velocity (batch, horizon, action_dim) of noisy actions, given an observation and the time of the flow.

    >>> config = Pi0Config(depth=1)
    >>> seen = Observation(torch.zeros(2, 3, 3, 28, 28), torch.ones(2, 3, dtype=torch.bool),
    ...     torch.ones(2, 16, dtype=torch.long), torch.ones(2, 16, dtype=torch.bool), torch.zeros(2, 8))
    >>> Pi0(config)(seen, torch.zeros(2, 10, 8), torch.full((2,), 0.5), use_gradient_checkpointing=True).shape
    torch.Size([2, 10, 8])
    """

    def __init__(self, config: Pi0Config) -> None:
        super().__init__()
        self.config, width = config, config.widths[1]
        self.vision_tower = SiglipTower(
            config.vision_width,
            config.vision_heads,
            config.vision_mlp_dim,
            config.vision_depth,
            config.image_size,
            config.patch_size,
        )
        self.projector = nn.Linear(config.vision_width, config.widths[0])
        self.embed_tokens = nn.Embedding(config.vocab_size, config.widths[0])
        self.layers = nn.ModuleList(Pi0Layer(config) for _ in range(config.depth))
        self.prefix_norm, self.suffix_norm = (
            AdaptiveRMSNorm(config.widths[index], condition_width(config, index)) for index in range(2)
        )
        self.action_in_proj = nn.Linear(config.action_dim, width)
        if config.adaptive:
            self.time_mlp_in, self.time_mlp_out = nn.Linear(width, width), nn.Linear(width, width)
        else:
            self.state_proj = nn.Linear(config.action_dim, width)
            self.action_time_mlp_in, self.action_time_mlp_out = nn.Linear(2 * width, width), nn.Linear(width, width)
        self.action_out_proj = nn.Linear(width, config.action_dim)

    def forward(
        self,
        observation: Observation,
        noisy_actions: torch.Tensor,
        time: torch.Tensor,
        use_gradient_checkpointing: bool = False,
        use_gradient_checkpointing_offload: bool = False,
    ) -> torch.Tensor:
        """Predict; the flags are those of `gradient_checkpoint_forward`, for each layer of the transformers and the tower.

        Raises:
            InvalidArgumentError: if an argument's shape does not fit the configuration, or the model lacks a part.
        """
        check_parts(self)
        check_inputs(self.config, observation, noisy_actions, time)
        flags = (use_gradient_checkpointing, use_gradient_checkpointing_offload)
        # All cameras at once: each layer of the tower runs once.
        images = self.embed_image(observation.images.flatten(0, 1), *flags).unflatten(0, observation.images.shape[:2])
        prefix = torch.cat([images.flatten(1, 2), self.embed_prompt(observation.prompt)], dim=1)
        actions = self.action_in_proj(noisy_actions.to(prefix.dtype))
        suffix, condition = self.with_time(actions, self.time_embedding(time, prefix.dtype))
        if not self.config.adaptive:
            suffix = torch.cat([self.state_proj(observation.state.to(prefix.dtype))[:, None], suffix], dim=1)
        shared = share(self.config, *self.see(observation, prefix.dtype), condition)
        streams = [prefix, suffix]
        for layer in self.layers:
            streams = gradient_checkpoint_forward(layer, *flags, streams, shared)
        return self.action_out_proj(self.final_norms(streams, condition)[1][:, -self.config.horizon :])

    def loss(
        self, observation: Observation, actions: torch.Tensor, noise: torch.Tensor, time: torch.Tensor, **flags: bool
    ) -> torch.Tensor:
        """The flow-matching loss, a scalar: the squared error of the velocity at time · noise + (1 − time) · actions."""
        noisy, velocity = flow(actions, noise, time)
        return (self(observation, noisy, time, **flags).to(actions.dtype) - velocity).square().mean()

    def embed_image(self, images: torch.Tensor, *flags: bool) -> torch.Tensor:
        """Images (batch, 3, size, size) → tokens (batch, patches, width of the language model)."""
        return self.projector(self.vision_tower(images, *flags))

    def embed_prompt(self, prompt: torch.Tensor) -> torch.Tensor:
        """Token numbers → embeddings, times the root of their width."""
        x = self.embed_tokens(prompt)
        return x * torch.tensor(self.config.widths[0] ** 0.5, dtype=x.dtype)

    def time_embedding(self, time: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Sines and cosines of the time, (batch) → (batch, width of the expert), periods from 0.004 to 4.

        Computed in the dtype of `time`, float32 at least; OpenPI's PyTorch code takes float64 here, its JAX code float32.
        """
        fraction = torch.linspace(0, 1, self.config.widths[1] // 2, dtype=torch.float64, device=time.device)
        period = MIN_PERIOD * (MAX_PERIOD / MIN_PERIOD) ** fraction
        angle = time[:, None].to(wide(time.dtype)) * (2 * math.pi / period).to(wide(time.dtype))
        return torch.cat([angle.sin(), angle.cos()], dim=-1).to(dtype)

    def with_time(self, actions: torch.Tensor, time: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The action tokens and the condition of the norms: π0 puts the time into the tokens, π0.5 into the condition."""
        if self.config.adaptive:
            return actions, self.time_mlp(time)
        return self.action_time_mlp(beside(actions, time)), None

    def time_mlp(self, time: torch.Tensor) -> torch.Tensor:
        """The condition of π0.5's norms, (batch, width), from the embedded time."""
        return F.silu(self.time_mlp_out(F.silu(self.time_mlp_in(time))))

    def action_time_mlp(self, both: torch.Tensor) -> torch.Tensor:
        """π0's action tokens, (batch, horizon, width), from actions concatenated with the embedded time."""
        return self.action_time_mlp_out(F.silu(self.action_time_mlp_in(both)))

    def see(self, observation: Observation, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Positions (batch, time), which skip padding, and the bias of the scores (batch, 1, time, time).

        A token sees its own block and earlier blocks; padding sees nothing and is not seen. The blocks are the prefix, the
        state and the actions.
        """
        config, present = self.config, observation.image_mask
        images = present.repeat_interleave(config.image_tokens // config.num_images, dim=1)
        suffix = config.horizon + (not config.adaptive)
        valid = torch.cat([images, observation.prompt_mask, images.new_ones(len(images), suffix)], dim=1).bool()
        starts = torch.zeros(valid.shape[1], dtype=torch.long, device=valid.device)
        starts[[-suffix, -config.horizon]] = 1  # in π0.5 both are the same position
        blocks = starts.cumsum(0)
        visible = (blocks[None, :] <= blocks[:, None]) & valid[:, None, :] & valid[:, :, None]
        bias = torch.zeros_like(visible, dtype=dtype).masked_fill(~visible, torch.finfo(dtype).min)
        return valid.cumsum(1) - 1, bias[:, None]

    def final_norms(self, streams: Sequence[torch.Tensor], condition: torch.Tensor | None) -> list[torch.Tensor]:
        """Norm both streams; only the suffix is read afterwards."""
        return [self.prefix_norm(streams[0])[0], self.suffix_norm(streams[1], condition)[0]]


def check_parts(model: Pi0) -> None:
    """Check that a model has all its parts: its vision tower may have been removed to save memory.

    Raises:
        InvalidArgumentError: naming every part that is missing.
    """
    unset = [name for name, part in model._modules.items() if part is None]
    missing = unset + [name for name in PARTS if name not in unset and getattr(model, name, None) is None]
    if missing:
        raise InvalidArgumentError(f"model lacks {', '.join(missing)}, expected a Pi0 with all its parts: build a new one.")


def check_inputs(config: Pi0Config, observation: Observation, actions: torch.Tensor, time: torch.Tensor) -> None:
    """Check that the arguments have the configuration's shapes, with an image's channels first."""
    check_shapes(config, observation, actions, time, image_shape=(3, config.image_size, config.image_size))


def share(config: Pi0Config, positions: torch.Tensor, bias: torch.Tensor, condition: torch.Tensor | None) -> Shared:
    """The inputs of all layers, made from the result of `Pi0.see`."""
    return Shared(rotations(positions, config.head_dim, bias.dtype), bias, condition)


def flow(actions: torch.Tensor, noise: torch.Tensor, time: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The noisy actions at a time between 0 (the actions) and 1 (the noise), and the velocity noise − actions.

    >>> [float(x) for x in flow(torch.tensor(1.0)[None, None, None], torch.tensor(5.0)[None, None, None], torch.tensor([0.25]))]
    [2.0, 4.0]
    """
    at = time[:, None, None]
    return at * noise + (1 - at) * actions, noise - actions


def condition_width(config: Pi0Config, index: int) -> int | None:
    """The width of the condition of a stream's norms; None if they have no condition."""
    return config.widths[index] if config.adaptive and index == 1 else None


def beside(actions: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
    """Every action token, (batch, horizon, width), concatenated with the embedded time, (batch, width)."""
    return torch.cat([actions, time[:, None].expand_as(actions)], dim=-1)
