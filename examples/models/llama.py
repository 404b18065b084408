"""Llama 3 and Qwen 3 in Flax Linen: grouped queries, rotary positions, RMS norms, a gated feed-forward.

`rules.llama` carries the weights of the PyTorch originals, `LlamaForCausalLM` and `Qwen3ForCausalLM` of `transformers`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from .transformer import (
    RopeScaling,
    attention,
    attention_bias,
    embed,
    rotate,
    rotations,
    run_blocks,
    split_heads,
    unembed,
    wide,
)


@dataclass(frozen=True)
class LlamaConfig:
    """The hyperparameters of a Llama or a Qwen; the defaults are a small model for trials.

    Attributes:
        rope_theta, rope_scaling: the base of the rotary frequencies, and how they are stretched.
        qk_norm: whether queries and keys are normalised per head (Qwen 3).
        attention_bias: whether the projections of the attention have biases.
        tie_embeddings: whether the output layer is the embedding's transpose.
        padding: PyTorch's `padding_idx`: looking this token up does not train its embedding.

    >>> LlamaConfig.llama3_8b().num_layers
    32
    """

    vocab_size: int = 97
    hidden_size: int = 32
    intermediate_size: int = 56
    num_layers: int = 2
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 8
    rope_theta: float = 500000.0
    rope_scaling: RopeScaling | None = None
    rms_norm_eps: float = 1e-5
    qk_norm: bool = False
    attention_bias: bool = False
    tie_embeddings: bool = False
    padding: int | None = None

    @classmethod
    def llama3_8b(cls) -> LlamaConfig:
        return cls(128256, 4096, 14336, num_layers=32, num_heads=32, num_kv_heads=8, head_dim=128)

    @classmethod
    def llama3_70b(cls) -> LlamaConfig:
        return cls(128256, 8192, 28672, num_layers=80, num_heads=64, num_kv_heads=8, head_dim=128)

    @classmethod
    def llama3_1_405b(cls) -> LlamaConfig:
        sizes = {"num_layers": 126, "num_heads": 128, "num_kv_heads": 8, "head_dim": 128}
        return cls(128256, 16384, 53248, **sizes, rope_scaling=RopeScaling(factor=8.0))

    @classmethod
    def llama3_1_8b(cls) -> LlamaConfig:
        sizes = {"num_layers": 32, "num_heads": 32, "num_kv_heads": 8, "head_dim": 128}
        return cls(128256, 4096, 14336, **sizes, rope_scaling=RopeScaling(factor=8.0))

    @classmethod
    def llama3_2_1b(cls) -> LlamaConfig:
        sizes = {"num_layers": 16, "num_heads": 32, "num_kv_heads": 8, "head_dim": 64}
        return cls(128256, 2048, 8192, **sizes, rope_scaling=RopeScaling(factor=32.0), tie_embeddings=True)

    @classmethod
    def qwen3_8b(cls) -> LlamaConfig:
        sizes = {"num_layers": 36, "num_heads": 32, "num_kv_heads": 8, "head_dim": 128}
        return cls(151936, 4096, 12288, **sizes, rope_theta=1e6, rms_norm_eps=1e-6, qk_norm=True)

    @classmethod
    def qwen3_0_6b(cls) -> LlamaConfig:
        sizes = {"num_layers": 28, "num_heads": 16, "num_kv_heads": 8, "head_dim": 128}
        return cls(151936, 1024, 3072, **sizes, rope_theta=1e6, rms_norm_eps=1e-6, qk_norm=True, tie_embeddings=True)


class RMSNorm(nn.Module):
    """x / sqrt(mean(x²) + epsilon) over the last axis, rounded to the dtype of x, then times the scale."""

    epsilon: float = 1e-5
    param_dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],), self.param_dtype)
        exact = x.astype(wide(x.dtype))
        normed = exact * jax.lax.rsqrt(jnp.mean(jnp.square(exact), axis=-1, keepdims=True) + self.epsilon)
        return scale * normed.astype(x.dtype)


class SelfAttention(nn.Module):
    """Causal attention with rotary positions, fewer key than query heads, (B, T, E) → the same."""

    config: LlamaConfig
    param_dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array, rotation: tuple[jax.Array, jax.Array], bias: jax.Array) -> jax.Array:
        config = self.config

        def project(name: str, heads: int) -> jax.Array:
            made = self._dense(heads * config.head_dim, name)(x)
            return split_heads(made, heads)

        query, key = project("q_proj", config.num_heads), project("k_proj", config.num_kv_heads)
        value = project("v_proj", config.num_kv_heads)
        if config.qk_norm:
            query = RMSNorm(config.rms_norm_eps, self.param_dtype, name="q_norm")(query)
            key = RMSNorm(config.rms_norm_eps, self.param_dtype, name="k_norm")(key)
        mixed = attention(rotate(query, rotation), rotate(key, rotation), value, bias)
        return self._dense(config.hidden_size, "o_proj")(mixed)

    def _dense(self, features: int, name: str) -> nn.Dense:
        return nn.Dense(features, use_bias=self.config.attention_bias, param_dtype=self.param_dtype, name=name)


class GatedFeedForward(nn.Module):
    """down(silu(gate(x)) · up(x)), without biases."""

    config: LlamaConfig
    param_dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        def dense(features: int, name: str) -> nn.Dense:
            return nn.Dense(features, use_bias=False, param_dtype=self.param_dtype, name=name)

        gate = nn.silu(dense(self.config.intermediate_size, "gate_proj")(x))
        return dense(self.config.hidden_size, "down_proj")(gate * dense(self.config.intermediate_size, "up_proj")(x))


class LlamaBlock(nn.Module):
    """One layer, (B, T, E) → the same: the class to checkpoint.

    `activations` is the sharding constraint of its input on the mesh of the trace; None leaves the sharding to the compiler.
    """

    config: LlamaConfig
    param_dtype: Any = jnp.float32
    activations: PartitionSpec | None = None

    @nn.compact
    def __call__(self, x: jax.Array, rotation: tuple[jax.Array, jax.Array], bias: jax.Array) -> jax.Array:
        if self.activations is not None:
            x = jax.lax.with_sharding_constraint(x, self.activations)
        attend = SelfAttention(self.config, self.param_dtype, name="self_attn")
        x = x + attend(self._norm("input_norm")(x), rotation, bias)
        return x + GatedFeedForward(self.config, self.param_dtype, name="mlp")(self._norm("post_attention_norm")(x))

    def _norm(self, name: str) -> RMSNorm:
        return RMSNorm(self.config.rms_norm_eps, self.param_dtype, name=name)


class Llama(nn.Module):
    """A causal language model: tokens (B, T) → logits (B, T, vocab_size).

    `mask` (B, T) is 1 for tokens and 0 for padding; without a mask nothing is padding. `positions` (B, T), by default
    0 … T − 1, are those of the rotations. `scan` stacks the layers' parameters on axis 0. `activations` is the sharding
    constraint of every layer's input. With `logits=False` the result is the head's input, (B, T, hidden_size).

    >>> model = Llama(LlamaConfig())
    >>> tokens = jnp.zeros((2, 5), jnp.int32)
    >>> model.apply(model.init(jax.random.key(0), tokens), tokens).shape
    (2, 5, 97)
    """

    config: LlamaConfig
    scan: bool = False
    param_dtype: Any = jnp.float32
    activations: PartitionSpec | None = None

    @nn.compact
    def __call__(
        self,
        tokens: jax.Array,
        mask: jax.Array | None = None,
        positions: jax.Array | None = None,
        *,
        logits: bool = True,
    ) -> jax.Array:
        config, length = self.config, tokens.shape[-1]
        table = nn.Embed(config.vocab_size, config.hidden_size, param_dtype=self.param_dtype, name="embed")
        x = embed(table, tokens, config.padding)
        positions = jnp.arange(length)[None] if positions is None else positions
        rotation = rotations(positions, config.head_dim, config.rope_theta, x.dtype, config.rope_scaling)
        bias = attention_bias(mask, length, x.dtype, causal=True)

        def block(name: str) -> LlamaBlock:
            return LlamaBlock(config, self.param_dtype, self.activations, name=name)

        x = run_blocks(block, config.num_layers, x, rotation, bias, scan=self.scan)
        x = RMSNorm(config.rms_norm_eps, self.param_dtype, name="norm")(x)
        if not logits:
            return x
        if config.tie_embeddings:
            return unembed(table, x)
        return nn.Dense(config.vocab_size, use_bias=False, param_dtype=self.param_dtype, name="lm_head")(x)
