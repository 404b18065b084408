"""GPT-2 in Flax Linen: learned positions, layer norms before each branch, fused projections, tied embeddings.

`rules.gpt2` carries the weights of the PyTorch original, `GPT2LMHeadModel` of `transformers`. Dropout is left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from .functions import check_length
from .transformer import attention, attention_bias, run_blocks, split_heads, unembed


@dataclass(frozen=True)
class GPT2Config:
    """The hyperparameters of a GPT-2; the defaults are a small model for trials.

    >>> GPT2Config.gpt2().hidden_size
    768
    """

    vocab_size: int = 97
    hidden_size: int = 32
    num_layers: int = 2
    num_heads: int = 4
    max_len: int = 48
    layer_norm_eps: float = 1e-5

    @classmethod
    def gpt2(cls) -> GPT2Config:
        return cls(50257, 768, num_layers=12, num_heads=12, max_len=1024)

    @classmethod
    def gpt2_xl(cls) -> GPT2Config:
        return cls(50257, 1600, num_layers=48, num_heads=25, max_len=1024)


class SelfAttention(nn.Module):
    """Causal attention with one fused projection to queries, keys and values, (B, T, E) → the same."""

    config: GPT2Config
    param_dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array, bias: jax.Array) -> jax.Array:
        width, heads = self.config.hidden_size, self.config.num_heads
        fused = nn.Dense(3 * width, param_dtype=self.param_dtype, name="c_attn")(x)
        query, key, value = (split_heads(part, heads) for part in jnp.split(fused, 3, axis=-1))
        return nn.Dense(width, param_dtype=self.param_dtype, name="c_proj")(attention(query, key, value, bias))


class FeedForward(nn.Module):
    """Linear, GELU by the tanh formula, linear, four times as wide in between."""

    config: GPT2Config
    param_dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        hidden = nn.Dense(4 * self.config.hidden_size, param_dtype=self.param_dtype, name="c_fc")(x)
        return nn.Dense(self.config.hidden_size, param_dtype=self.param_dtype, name="c_proj")(nn.gelu(hidden, approximate=True))


class GPT2Block(nn.Module):
    """One layer, (B, T, E) → the same: the class to checkpoint."""

    config: GPT2Config
    param_dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array, bias: jax.Array) -> jax.Array:
        norm1, norm2 = (layer_norm(self.config, self.param_dtype, name) for name in ("ln_1", "ln_2"))
        x = x + SelfAttention(self.config, self.param_dtype, name="attn")(norm1(x), bias)
        return x + FeedForward(self.config, self.param_dtype, name="mlp")(norm2(x))


class GPT2(nn.Module):
    """A causal language model: tokens (B, T) with T ≤ max_len → logits (B, T, vocab_size).

    `mask` (B, T) is 1 for tokens and 0 for padding; without a mask nothing is padding. `positions` (B, T) are by default
    0 … T − 1. `scan` stacks the layers' parameters on axis 0.

    >>> model = GPT2(GPT2Config())
    >>> tokens = jnp.zeros((2, 5), jnp.int32)
    >>> model.apply(model.init(jax.random.key(0), tokens), tokens).shape
    (2, 5, 97)
    """

    config: GPT2Config
    scan: bool = False
    param_dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, tokens: jax.Array, mask: jax.Array | None = None, positions: jax.Array | None = None) -> jax.Array:
        config, length = self.config, tokens.shape[-1]
        check_length(length, config.max_len)
        words = nn.Embed(config.vocab_size, config.hidden_size, param_dtype=self.param_dtype, name="wte")
        places = nn.Embed(config.max_len, config.hidden_size, param_dtype=self.param_dtype, name="wpe")
        x = words(tokens) + places(jnp.arange(length)[None] if positions is None else positions)
        bias = attention_bias(mask, length, x.dtype, causal=True)

        def block(name: str) -> GPT2Block:
            return GPT2Block(config, self.param_dtype, name=name)

        x = run_blocks(block, config.num_layers, x, bias, scan=self.scan)
        return unembed(words, layer_norm(config, self.param_dtype, "ln_f")(x))


def layer_norm(config: GPT2Config, param_dtype: Any, name: str) -> nn.LayerNorm:
    """Return a layer norm with PyTorch's two-pass variance; Flax's own default subtracts two large numbers."""
    return nn.LayerNorm(epsilon=config.layer_norm_eps, use_fast_variance=False, param_dtype=param_dtype, name=name)
