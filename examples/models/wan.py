"""Wan's video transformer in Flax Linen, text to video: attention of all frames to each other, then to the prompt.

`rules.wan` carries the weights of the PyTorch originals, `WanTransformer3DModel` of `diffusers` and `WanModel` of
DiffSynth-Studio.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import flax.linen as nn
import jax
import jax.numpy as jnp

from .diffusion import (
    FeedForward,
    Grid,
    Rotation,
    TimeEmbedding,
    axis_rotations,
    check_conditions,
    check_patches,
    check_sizes,
    grid_positions,
    long_attention,
    plain_norm,
    rotate_pairs,
    time_features,
)
from .llama import RMSNorm
from .transformer import Dtype, scan_block, split_heads, wide

THETA = 10000.0  # the base of the rotary frequencies


@dataclass(frozen=True)
class WanConfig:
    """The hyperparameters of a Wan transformer; the defaults are a small model for trials.

    Attributes:
        channels: the channels of a video's latents, in the input and in the output.
        patch: frames, rows and columns of latents that make one token.
        text_width: the width of the prompt's embeddings.
        time_features: the number of cosines and sines of the time.
        query_chunk: how many queries attend at a time; None: all at once.

    Raises:
        ValueError: when a size is less than 1, the heads do not divide the width, or a head's width is odd.

    >>> WanConfig.t2v_14b().rope_axes
    (44, 42, 42)
    """

    hidden_size: int = 32
    intermediate_size: int = 56
    num_layers: int = 2
    num_heads: int = 2
    channels: int = 3
    patch: tuple[int, int, int] = (1, 2, 2)
    text_width: int = 20
    time_features: int = 16
    norm_eps: float = 1e-6
    query_chunk: int | None = None

    def __post_init__(self) -> None:
        check_sizes(self, "num_layers", "intermediate_size", "channels", "text_width", "time_features")
        if self.time_features % 2:
            raise ValueError(f"time_features={self.time_features}: expected an even number, half of them cosines")
        if len(self.patch) != 3 or min(self.patch) < 1:
            raise ValueError(f"patch={self.patch}: expected frames, rows and columns, at least 1 each")
        if min(self.num_heads, self.hidden_size) < 1 or self.hidden_size % self.num_heads:
            raise ValueError(f"num_heads={self.num_heads} does not divide hidden_size={self.hidden_size}: choose a divisor")
        if self.head_dim % 2:
            raise ValueError(
                f"hidden_size={self.hidden_size}, num_heads={self.num_heads}: heads {self.head_dim} wide, expected even"
            )

    @property
    def head_dim(self) -> int:
        """The width of one head."""
        return self.hidden_size // self.num_heads

    @property
    def rope_axes(self) -> Grid:
        """The number of a head's dimensions that rotate with frame, row and column."""
        third = 2 * (self.head_dim // 6)
        return (self.head_dim - 2 * third, third, third)

    @classmethod
    def t2v_1_3b(cls, query_chunk: int | None = None) -> WanConfig:
        return cls(1536, 8960, 30, 12, 16, (1, 2, 2), 4096, 256, query_chunk=query_chunk)

    @classmethod
    def t2v_14b(cls, query_chunk: int | None = None) -> WanConfig:
        return cls(5120, 13824, 40, 40, 16, (1, 2, 2), 4096, 256, query_chunk=query_chunk)


class WanAttention(nn.Module):
    """Attention of `x` (B, T, E) to itself, rotated by `rotation`, or to the prompt `to`; queries and keys are normalised."""

    config: WanConfig
    param_dtype: Dtype = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array, to: jax.Array | None = None, rotation: Rotation | None = None) -> jax.Array:
        seen = x if to is None else to
        query = self._heads(self._normed("query", x), rotation)
        key = self._heads(self._normed("key", seen), rotation)
        mixed = long_attention(query, key, self._heads(self._dense("value")(seen)), chunk=self.config.query_chunk)
        return self._dense("out")(mixed)

    def _normed(self, name: str, x: jax.Array) -> jax.Array:
        """A norm over all heads together."""
        return RMSNorm(self.config.norm_eps, self.param_dtype, name=f"{name}_norm")(self._dense(name)(x))

    def _heads(self, x: jax.Array, rotation: Rotation | None = None) -> jax.Array:
        heads = split_heads(x, self.config.num_heads)
        return heads if rotation is None else rotate_pairs(heads, rotation)

    def _dense(self, name: str) -> nn.Dense:
        return nn.Dense(self.config.hidden_size, param_dtype=self.param_dtype, name=name)


class WanBlock(nn.Module):
    """One layer, (B, T, E) → the same: the class to checkpoint.

    `time` (B, 6, E) plus the layer's own table gives shift, scale and gate of the attention and of the feed-forward, computed
    in float32 at least.
    """

    config: WanConfig
    param_dtype: Dtype = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array, text: jax.Array, time: jax.Array, rotation: Rotation) -> jax.Array:
        config, dtype, exact = self.config, x.dtype, wide(x.dtype)
        table = self.param(
            "modulation", nn.initializers.normal(config.hidden_size**-0.5), (6, config.hidden_size), self.param_dtype
        )
        mod = jnp.split(table.astype(exact) + time.astype(exact), 6, axis=1)
        attend = WanAttention(config, self.param_dtype, name="self_attention")
        mixed = attend(_modulated(x, mod[:2], config.norm_eps), rotation=rotation)
        x = (x.astype(exact) + mixed * mod[2]).astype(dtype)
        norm = nn.LayerNorm(config.norm_eps, use_fast_variance=False, param_dtype=self.param_dtype, name="cross_norm")
        x = x + WanAttention(config, self.param_dtype, name="cross_attention")(norm(x).astype(dtype), text)
        feed = FeedForward(config.intermediate_size, param_dtype=self.param_dtype, name="mlp")
        fed = feed(_modulated(x, mod[3:5], config.norm_eps))
        return (x.astype(exact) + fed * mod[5]).astype(dtype)


def _modulated(x: jax.Array, modulation: Sequence[jax.Array], epsilon: float) -> jax.Array:
    """The norm of x, shifted and scaled in the dtype of `modulation`; the result has the dtype of x."""
    shift, scale = modulation
    return (plain_norm(x.astype(shift.dtype), epsilon) * (1 + scale) + shift).astype(x.dtype)


class Wan(nn.Module):
    """The velocity of a noisy video: latents (B, frames, height, width, channels) → the same.

    The channels come last, as everywhere in Flax; PyTorch has them first. `text` (B, T, text_width) are the prompt's
    embeddings, `time` (B,) the noise's share in thousandths. `scan` stacks the layers' parameters on axis 0.

    Raises:
        ValueError: when a shape does not fit the configuration or the other arguments, or patches do not fill a video.

    >>> model = Wan(WanConfig())
    >>> inputs = jnp.ones((1, 2, 4, 6, 3)), jnp.ones((1, 5, 20)), jnp.ones(1)
    >>> variables = jax.eval_shape(lambda: model.init(jax.random.key(0), *inputs))
    >>> jax.eval_shape(lambda variables: model.apply(variables, *inputs), variables).shape
    (1, 2, 4, 6, 3)
    """

    config: WanConfig
    scan: bool = False
    param_dtype: Dtype = jnp.float32

    def setup(self) -> None:
        config, dtype = self.config, self.param_dtype
        self.patches = nn.Conv(config.hidden_size, config.patch, config.patch, padding="VALID", param_dtype=dtype)
        self.time_in = TimeEmbedding(config.hidden_size, dtype)
        self.time_modulation = nn.Dense(6 * config.hidden_size, param_dtype=dtype)
        self.text_in = FeedForward(config.hidden_size, config.hidden_size, param_dtype=dtype)
        blocks = [WanBlock(config, dtype) for _ in range(1 if self.scan else config.num_layers)]
        self.layers = blocks[0] if self.scan else blocks
        spread = nn.initializers.normal(config.hidden_size**-0.5)
        self.modulation = self.param("modulation", spread, (2, config.hidden_size), dtype)
        rows, columns, depth = config.patch
        self.out = nn.Dense(rows * columns * depth * config.channels, param_dtype=dtype)

    def __call__(self, latents: jax.Array, text: jax.Array, time: jax.Array) -> jax.Array:
        x, text, time, modulation, rotation = self.embed(latents, text, time)
        if self.scan:
            x = scan_block(self.layers, self.config.num_layers, x, text, modulation, rotation)
        else:
            for block in self.layers:
                x = block(x, text, modulation, rotation)
        return self.velocity(x, time, latents.shape)

    def embed(
        self, latents: jax.Array, text: jax.Array, time: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array, Rotation]:
        """Return tokens and text, the time (B, E) for the output and (B, 6, E) for all blocks, and the rotation."""
        self.check(latents, text, time)
        cut = self.patches(latents)
        features = time_features(time, self.config.time_features, exact=True).astype(cut.dtype)
        conditioning = self.time_in(features)
        modulation = self.time_modulation(nn.silu(conditioning)).reshape(len(time), 6, -1)
        rotation = axis_rotations(grid_positions(cut.shape[1:4]), self.config.rope_axes, THETA, cut.dtype)
        return cut.reshape(len(cut), -1, cut.shape[-1]), self.text_in(text), conditioning, modulation, rotation

    def velocity(self, x: jax.Array, time: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """Return the output, of the latents' `shape`, from the last block's result."""
        shift, scale = jnp.split((self.modulation + time[:, None]).astype(wide(x.dtype)), 2, axis=1)
        tokens = self.out(_modulated(x, (shift, scale), self.config.norm_eps))
        counts = [size // patch for size, patch in zip(shape[1:4], self.config.patch, strict=True)]
        cut = tokens.reshape(shape[0], *counts, *self.config.patch, self.config.channels)
        return cut.transpose(0, 1, 4, 2, 5, 3, 6, 7).reshape(shape)

    def check(self, latents: jax.Array, text: jax.Array, time: jax.Array) -> None:
        """Raise `ValueError` where shapes do not fit."""
        channels = self.config.channels
        if latents.ndim != 5 or latents.shape[-1] != channels:
            expected = f"(batch, frames, height, width, {channels})"
            raise ValueError(f"latents have shape {latents.shape}, expected {expected}: move the channels last")
        check_patches(latents.shape[1:4], self.config.patch)
        check_conditions(len(latents), self.config.text_width, text, time)
