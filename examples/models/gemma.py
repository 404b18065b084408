"""Gemma in Flax Linen: scaled and tied embeddings, RMS norms with 1 + weight, a feed-forward gated by GELU.

`rules.gemma` carries the weights of the PyTorch original, `GemmaForCausalLM` of `transformers`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from .transformer import attention, attention_bias, embed, rotate, rotations, run_blocks, split_heads, unembed, wide


@dataclass(frozen=True)
class GemmaConfig:
    """The hyperparameters of a Gemma; the defaults are a small model for trials.

    `padding` is PyTorch's `padding_idx`: looking this token up does not train its embedding.

    >>> GemmaConfig.gemma_2b().num_kv_heads
    1
    """

    vocab_size: int = 97
    hidden_size: int = 32
    intermediate_size: int = 56
    num_layers: int = 2
    num_heads: int = 4
    num_kv_heads: int = 1
    head_dim: int = 12
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6
    padding: int | None = 0

    @classmethod
    def gemma_2b(cls) -> GemmaConfig:
        return cls(256000, 2048, 16384, num_layers=18, num_heads=8, num_kv_heads=1, head_dim=256)

    @classmethod
    def gemma_7b(cls) -> GemmaConfig:
        return cls(256000, 3072, 24576, num_layers=28, num_heads=16, num_kv_heads=16, head_dim=256)


class RMSNorm(nn.Module):
    """x / sqrt(mean(x²) + epsilon) · (1 + scale) over the last axis, rounded to the dtype of x at the end."""

    epsilon: float = 1e-6
    param_dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        scale = self.param("scale", nn.initializers.zeros, (x.shape[-1],), self.param_dtype)
        normed = root_mean_square(x, self.epsilon)
        return (normed * (1 + scale.astype(normed.dtype))).astype(x.dtype)


def root_mean_square(x: jax.Array, epsilon: float) -> jax.Array:
    """Return x / sqrt(mean(x²) + epsilon) over the last axis, in float32 at least."""
    exact = x.astype(wide(x.dtype))
    return exact * jax.lax.rsqrt(jnp.mean(jnp.square(exact), axis=-1, keepdims=True) + epsilon)


class SelfAttention(nn.Module):
    """Causal attention with rotary positions; all query heads may share one key head, (B, T, E) → the same."""

    config: GemmaConfig
    param_dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array, rotation: tuple[jax.Array, jax.Array], bias: jax.Array) -> jax.Array:
        config = self.config

        def project(name: str, heads: int) -> jax.Array:
            return split_heads(dense(heads * config.head_dim, name, self.param_dtype)(x), heads)

        query, key = project("q_proj", config.num_heads), project("k_proj", config.num_kv_heads)
        value = project("v_proj", config.num_kv_heads)
        mixed = attention(rotate(query, rotation), rotate(key, rotation), value, bias)
        return dense(config.hidden_size, "o_proj", self.param_dtype)(mixed)


class GatedFeedForward(nn.Module):
    """down(gelu(gate(x)) · up(x)), without biases; GELU by the tanh formula."""

    config: GemmaConfig
    param_dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        gate = nn.gelu(dense(self.config.intermediate_size, "gate_proj", self.param_dtype)(x), approximate=True)
        up = dense(self.config.intermediate_size, "up_proj", self.param_dtype)(x)
        return dense(self.config.hidden_size, "down_proj", self.param_dtype)(gate * up)


class GemmaBlock(nn.Module):
    """One layer, (B, T, E) → the same: the class to checkpoint."""

    config: GemmaConfig
    param_dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array, rotation: tuple[jax.Array, jax.Array], bias: jax.Array) -> jax.Array:
        attend = SelfAttention(self.config, self.param_dtype, name="self_attn")
        x = x + attend(self._norm("input_norm")(x), rotation, bias)
        return x + GatedFeedForward(self.config, self.param_dtype, name="mlp")(self._norm("post_attention_norm")(x))

    def _norm(self, name: str) -> RMSNorm:
        return RMSNorm(self.config.rms_norm_eps, self.param_dtype, name=name)


class Gemma(nn.Module):
    """A causal language model: tokens (B, T) → logits (B, T, vocab_size).

    `mask` (B, T) is 1 for tokens and 0 for padding; without a mask nothing is padding. `positions` (B, T), by default
    0 … T − 1, are those of the rotations. `scan` stacks the layers' parameters on axis 0.

    >>> model = Gemma(GemmaConfig())
    >>> tokens = jnp.ones((2, 5), jnp.int32)
    >>> model.apply(model.init(jax.random.key(0), tokens), tokens).shape
    (2, 5, 97)
    """

    config: GemmaConfig
    scan: bool = False
    param_dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, tokens: jax.Array, mask: jax.Array | None = None, positions: jax.Array | None = None) -> jax.Array:
        config, length = self.config, tokens.shape[-1]
        table = nn.Embed(config.vocab_size, config.hidden_size, param_dtype=self.param_dtype, name="embed")
        x = embed(table, tokens, config.padding)
        # Rounded to the dtype first: the published weights were trained with a factor of 45.25 in bfloat16, not 45.2548.
        x = x * jnp.asarray(config.hidden_size**0.5, x.dtype)
        positions = jnp.arange(length)[None] if positions is None else positions
        rotation = rotations(positions, config.head_dim, config.rope_theta, x.dtype)
        bias = attention_bias(mask, length, x.dtype, causal=True)

        def block(name: str) -> GemmaBlock:
            return GemmaBlock(config, self.param_dtype, name=name)

        x = run_blocks(block, config.num_layers, x, rotation, bias, scan=self.scan)
        return unembed(table, RMSNorm(config.rms_norm_eps, self.param_dtype, name="norm")(x))


def dense(features: int, name: str | None, param_dtype: Any) -> nn.Dense:
    """Return a linear layer without biases."""
    return nn.Dense(features, use_bias=False, param_dtype=param_dtype, name=name)
