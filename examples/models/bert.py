"""BERT in Flax Linen: an encoder with a norm after each branch, and both heads of its pre-training.

`rules.bert` carries the weights of the PyTorch original, `BertForPreTraining` of `transformers`. Dropout is left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from .functions import check_length
from .transformer import Attention, attention_bias, embed, run_blocks, unembed


@dataclass(frozen=True)
class BertConfig:
    """The hyperparameters of a BERT; the defaults are a small model for trials.

    `padding` is PyTorch's `padding_idx`: looking this token up does not train its embedding.

    >>> BertConfig.bert_base().intermediate_size
    3072
    """

    vocab_size: int = 97
    hidden_size: int = 32
    intermediate_size: int = 56
    num_layers: int = 2
    num_heads: int = 4
    max_len: int = 48
    num_segments: int = 2
    layer_norm_eps: float = 1e-12
    padding: int | None = 0

    @classmethod
    def bert_base(cls) -> BertConfig:
        return cls(30522, 768, 3072, num_layers=12, num_heads=12, max_len=512)

    @classmethod
    def bert_large(cls) -> BertConfig:
        return cls(30522, 1024, 4096, num_layers=24, num_heads=16, max_len=512)


class BertBlock(nn.Module):
    """One layer, (B, T, E) → the same: the class to checkpoint."""

    config: BertConfig
    param_dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array, bias: jax.Array | None) -> jax.Array:
        config = self.config
        attended = Attention(config.num_heads, self.param_dtype, name="attention")(x, bias)
        x = layer_norm(config, self.param_dtype, "attention_norm")(x + attended)
        hidden = nn.gelu(nn.Dense(config.intermediate_size, param_dtype=self.param_dtype, name="up")(x), approximate=False)
        fed = nn.Dense(config.hidden_size, param_dtype=self.param_dtype, name="down")(hidden)
        return layer_norm(config, self.param_dtype, "output_norm")(x + fed)


class Bert(nn.Module):
    """Tokens (B, T) with T ≤ max_len → logits of the masked words (B, T, vocab_size) and of the next sentence (B, 2).

    `mask` (B, T) is 1 for tokens and 0 for padding; without a mask nothing is padding. `segments` (B, T) are by default 0.
    `scan` stacks the layers' parameters on axis 0.

    >>> model = Bert(BertConfig())
    >>> tokens = jnp.ones((2, 5), jnp.int32)
    >>> words, following = model.apply(model.init(jax.random.key(0), tokens), tokens)
    >>> words.shape, following.shape
    ((2, 5, 97), (2, 2))
    """

    config: BertConfig
    scan: bool = False
    param_dtype: Any = jnp.float32

    @nn.compact
    def __call__(
        self, tokens: jax.Array, mask: jax.Array | None = None, segments: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array]:
        config, length = self.config, tokens.shape[-1]
        check_length(length, config.max_len)
        words = self._embed(config.vocab_size, "words")
        x = embed(words, tokens, config.padding)
        x = x + self._embed(config.num_segments, "segments")(jnp.zeros_like(tokens) if segments is None else segments)
        x = x + self._embed(config.max_len, "positions")(jnp.arange(length)[None])
        x = layer_norm(config, self.param_dtype, "embed_norm")(x)
        bias = attention_bias(mask, length, x.dtype, causal=False)

        def block(name: str) -> BertBlock:
            return BertBlock(config, self.param_dtype, name=name)

        x = run_blocks(block, config.num_layers, x, bias, scan=self.scan)
        hidden = nn.gelu(self._dense(config.hidden_size, "transform")(x), approximate=False)
        masked_words = unembed(words, layer_norm(config, self.param_dtype, "transform_norm")(hidden))
        masked_words = masked_words + self.param("bias", nn.initializers.zeros, (config.vocab_size,), self.param_dtype)
        pooled = jnp.tanh(self._dense(config.hidden_size, "pooler")(x[:, 0]))
        return masked_words, self._dense(2, "next_sentence")(pooled)

    def _embed(self, size: int, name: str) -> nn.Embed:
        return nn.Embed(size, self.config.hidden_size, param_dtype=self.param_dtype, name=name)

    def _dense(self, features: int, name: str) -> nn.Dense:
        return nn.Dense(features, param_dtype=self.param_dtype, name=name)


def layer_norm(config: BertConfig, param_dtype: Any, name: str) -> nn.LayerNorm:
    """Return a layer norm with PyTorch's two-pass variance; Flax's own default subtracts two large numbers."""
    return nn.LayerNorm(epsilon=config.layer_norm_eps, use_fast_variance=False, param_dtype=param_dtype, name=name)
