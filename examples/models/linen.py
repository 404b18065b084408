"""Flax Linen twins of the PyTorch reference models: same mathematics, same matmuls, same parameters."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from .functions import attention, check_heads, check_length, cross_entropy


class SelfAttention(nn.Module):
    """Multi-head self-attention with one fused input projection, as `torch.nn.MultiheadAttention` has it."""

    d_model: int
    nhead: int
    causal: bool = False
    dropout: float = 0.0
    param_dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array, *, deterministic: bool = True) -> jax.Array:
        qkv = nn.Dense(3 * self.d_model, param_dtype=self.param_dtype, name="in_proj")(x)
        drop = nn.Dropout(self.dropout, deterministic=deterministic, name="dropout")
        mixed = attention(qkv, self.nhead, causal=self.causal, dropout=drop)
        return nn.Dense(self.d_model, param_dtype=self.param_dtype, name="out_proj")(mixed)


class FeedForward(nn.Module):
    """Linear, ReLU, linear, four times as wide in between."""

    d_model: int
    param_dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        hidden = nn.relu(nn.Dense(4 * self.d_model, param_dtype=self.param_dtype, name="up")(x))
        return nn.Dense(self.d_model, param_dtype=self.param_dtype, name="down")(hidden)


class DecoderLayer(nn.Module):
    """One post-norm transformer layer: self-attention and feed-forward, each added to its input and then normalised.

    Shapes: x (B, T, d_model) → the same. Six matmuls. Dropout, where asked for, acts on the attention weights and on
    both branches before they are added; it draws from the RNG stream `dropout`.

    >>> layer = DecoderLayer(d_model=8, nhead=2)
    >>> x = jnp.ones((2, 3, 8))
    >>> layer.apply(layer.init(jax.random.key(0), x=x), x=x).shape
    (2, 3, 8)
    """

    d_model: int = 512
    nhead: int = 8
    causal: bool = False
    dropout: float = 0.0
    param_dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array, *, deterministic: bool = True) -> jax.Array:
        check_heads(self.d_model, self.nhead)
        attend = SelfAttention(
            self.d_model, self.nhead, self.causal, self.dropout, param_dtype=self.param_dtype, name="self_attn"
        )
        attended = attend(x, deterministic=deterministic)
        x = self._norm("norm1")(x + self._dropout("dropout1")(attended, deterministic=deterministic))
        fed = FeedForward(self.d_model, self.param_dtype, name="ffn")(x)
        return self._norm("norm2")(x + self._dropout("dropout2")(fed, deterministic=deterministic))

    def _dropout(self, name: str) -> nn.Dropout:
        return nn.Dropout(self.dropout, name=name)

    def _norm(self, name: str) -> nn.LayerNorm:
        # PyTorch's epsilon and its two-pass variance; Flax's own defaults differ in both.
        return nn.LayerNorm(epsilon=1e-5, use_fast_variance=False, param_dtype=self.param_dtype, name=name)


def run_layers(num_layers: int, x: jax.Array, *, scan: bool, deterministic: bool, **fields: Any) -> jax.Array:
    """Apply `num_layers` decoder layers inside a compact method, unrolled or under `nn.scan`.

    Unrolled, the parameters are `layers_0/…`, `layers_1/…`; scanned, `layers/…` with the layers stacked on axis 0.
    `fields` are the fields of `DecoderLayer`. In both forms the class is called once per layer and returns only x, so that
    a policy on this class applies to every layer.
    """
    if not scan:
        for index in range(num_layers):
            x = DecoderLayer(**fields, name=f"layers_{index}")(x=x, deterministic=deterministic)
        return x

    def body(layer: DecoderLayer, carry: jax.Array, _: None) -> tuple[jax.Array, None]:
        return layer(x=carry, deterministic=deterministic), None

    # `nn.scan` drops captured intermediates unless they have an axis.
    scanned = nn.scan(
        body,
        variable_axes={"params": 0, "intermediates": 0},
        split_rngs={"params": True, "dropout": True},
        length=num_layers,
    )
    return scanned(DecoderLayer(**fields, name="layers"), x, None)[0]


class DecoderStack(nn.Module):
    """A stack of decoder layers, (B, T, d_model) → the same.

    >>> stack = DecoderStack(num_layers=3, d_model=8, nhead=2, scan=True)
    >>> variables = stack.init(jax.random.key(0), jnp.ones((2, 3, 8)))
    >>> variables["params"]["layers"]["norm1"]["scale"].shape
    (3, 8)
    """

    num_layers: int
    d_model: int = 512
    nhead: int = 8
    scan: bool = False
    causal: bool = False
    dropout: float = 0.0
    param_dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array, *, deterministic: bool = True) -> jax.Array:
        return run_layers(
            self.num_layers,
            x,
            scan=self.scan,
            deterministic=deterministic,
            d_model=self.d_model,
            nhead=self.nhead,
            causal=self.causal,
            dropout=self.dropout,
            param_dtype=self.param_dtype,
        )


class ByteDecoder(nn.Module):
    """A language model of bytes: embedding plus learned positions, causal decoder layers, a linear head.

    Shapes: integer tokens (B, T) with T ≤ max_len → logits (B, T, vocab).

    >>> model = ByteDecoder(d_model=8, nhead=2, num_layers=2, max_len=16)
    >>> tokens = jnp.zeros((2, 5), jnp.int32)
    >>> model.apply(model.init(jax.random.key(0), tokens), tokens).shape
    (2, 5, 256)
    """

    vocab: int = 256
    d_model: int = 128
    nhead: int = 4
    num_layers: int = 4
    max_len: int = 128
    dropout: float = 0.0
    scan: bool = False
    param_dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, tokens: jax.Array, *, deterministic: bool = True) -> jax.Array:
        check_length(tokens.shape[-1], self.max_len)
        embed = nn.Embed(self.vocab, self.d_model, param_dtype=self.param_dtype, name="embed")
        positions = nn.Embed(self.max_len, self.d_model, param_dtype=self.param_dtype, name="positions")
        x = run_layers(
            self.num_layers,
            embed(tokens) + positions(jnp.arange(tokens.shape[-1])),
            scan=self.scan,
            deterministic=deterministic,
            d_model=self.d_model,
            nhead=self.nhead,
            causal=True,
            dropout=self.dropout,
            param_dtype=self.param_dtype,
        )
        return nn.Dense(self.vocab, param_dtype=self.param_dtype, name="head")(x)

    def loss(self, tokens: jax.Array, targets: jax.Array, *, deterministic: bool = True) -> jax.Array:
        """Return the mean cross entropy of `targets` (B, T); call it with `apply(…, method="loss")`."""
        return cross_entropy(self(tokens, deterministic=deterministic), targets)


class ToyModel(nn.Module):
    """A sigmoid: no parameters, one residual."""

    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.sigmoid(x)
