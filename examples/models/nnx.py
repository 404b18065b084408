"""Flax NNX twins of the PyTorch reference models: same mathematics, same matmuls, same parameters."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from .functions import attention, check_heads, check_length, cross_entropy


def make_dropout(rate: float, rngs: nnx.Rngs) -> nnx.Dropout:
    """Return a dropout, without RNG state at rate 0, so that such a model is a function of its parameters alone."""
    return nnx.Dropout(rate, rngs=rngs if rate else None)


class SelfAttention(nnx.Module):
    """Multi-head self-attention with one fused input projection, as `torch.nn.MultiheadAttention` has it."""

    def __init__(
        self,
        d_model: int,
        nhead: int,
        *,
        causal: bool = False,
        dropout: float = 0.0,
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ) -> None:
        self.nhead = nhead
        self.causal = causal
        self.in_proj = nnx.Linear(d_model, 3 * d_model, param_dtype=param_dtype, rngs=rngs)
        self.out_proj = nnx.Linear(d_model, d_model, param_dtype=param_dtype, rngs=rngs)
        self.dropout = make_dropout(dropout, rngs)

    def __call__(self, x: jax.Array, *, deterministic: bool = True) -> jax.Array:
        drop = functools.partial(self.dropout, deterministic=deterministic)
        return self.out_proj(attention(self.in_proj(x), self.nhead, causal=self.causal, dropout=drop))


class Embedding(nnx.Module):
    """A lookup table in the dtype of its parameter: `nnx.Embed` keeps the dtype of its construction."""

    def __init__(self, size: int, features: int, *, param_dtype: Any = jnp.float32, rngs: nnx.Rngs) -> None:
        self.embedding = nnx.Embed(size, features, param_dtype=param_dtype, rngs=rngs).embedding

    def __call__(self, indices: jax.Array) -> jax.Array:
        return jnp.take(self.embedding[...], indices, axis=0)


class FeedForward(nnx.Module):
    """Linear, ReLU, linear, four times as wide in between."""

    def __init__(self, d_model: int, *, param_dtype: Any = jnp.float32, rngs: nnx.Rngs) -> None:
        self.up = nnx.Linear(d_model, 4 * d_model, param_dtype=param_dtype, rngs=rngs)
        self.down = nnx.Linear(4 * d_model, d_model, param_dtype=param_dtype, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(nnx.relu(self.up(x)))


class DecoderLayer(nnx.Module):
    """One post-norm transformer layer: self-attention and feed-forward, each added to its input and then normalised.

    Shapes: x (B, T, d_model) → the same. Six matmuls. Dropout, where asked for, acts on the attention weights and on
    both branches before they are added; it draws from the RNG stream `dropout`.

    >>> DecoderLayer(d_model=8, nhead=2, rngs=nnx.Rngs(0))(x=jnp.ones((2, 3, 8))).shape
    (2, 3, 8)
    """

    def __init__(
        self,
        d_model: int = 512,
        nhead: int = 8,
        *,
        causal: bool = False,
        dropout: float = 0.0,
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ) -> None:
        check_heads(d_model, nhead)
        # PyTorch's epsilon and its two-pass variance; Flax's own defaults differ in both.
        norm: dict[str, Any] = {"epsilon": 1e-5, "use_fast_variance": False, "param_dtype": param_dtype, "rngs": rngs}
        self.self_attn = SelfAttention(d_model, nhead, causal=causal, dropout=dropout, param_dtype=param_dtype, rngs=rngs)
        self.ffn = FeedForward(d_model, param_dtype=param_dtype, rngs=rngs)
        self.norm1 = nnx.LayerNorm(d_model, **norm)
        self.norm2 = nnx.LayerNorm(d_model, **norm)
        self.dropout1 = make_dropout(dropout, rngs)
        self.dropout2 = make_dropout(dropout, rngs)

    def __call__(self, x: jax.Array, *, deterministic: bool = True) -> jax.Array:
        x = self.norm1(x + self.dropout1(self.self_attn(x, deterministic=deterministic), deterministic=deterministic))
        return self.norm2(x + self.dropout2(self.ffn(x), deterministic=deterministic))


def make_layers(num_layers: int, *, scan: bool, rngs: nnx.Rngs, **fields: Any) -> Any:
    """Return `num_layers` decoder layers: an `nnx.List`, or for `scan` one layer with every array stacked on axis 0."""
    if not scan:
        return nnx.List([DecoderLayer(**fields, rngs=rngs) for _ in range(num_layers)])

    @nnx.split_rngs(splits=num_layers)
    @nnx.vmap
    def stacked(rngs: nnx.Rngs) -> DecoderLayer:
        return DecoderLayer(**fields, rngs=rngs)

    return stacked(rngs)


def run_layers(layers: Any, x: jax.Array, *, scan: bool, deterministic: bool) -> jax.Array:
    """Apply the layers of `make_layers`. `DecoderLayer` is called once per layer in both forms."""
    if not scan:
        for layer in layers:
            x = layer(x=x, deterministic=deterministic)
        return x

    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    def body(carry: jax.Array, layer: DecoderLayer) -> jax.Array:
        return layer(x=carry, deterministic=deterministic)

    return body(x, layers)


class DecoderStack(nnx.Module):
    """A stack of decoder layers, (B, T, d_model) → the same.

    >>> stack = DecoderStack(num_layers=3, d_model=8, nhead=2, scan=True, rngs=nnx.Rngs(0))
    >>> stack.layers.norm1.scale.shape
    (3, 8)
    """

    def __init__(
        self,
        num_layers: int,
        d_model: int = 512,
        nhead: int = 8,
        *,
        scan: bool = False,
        causal: bool = False,
        dropout: float = 0.0,
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ) -> None:
        self.scan = scan
        fields: dict[str, Any] = {"d_model": d_model, "nhead": nhead, "dropout": dropout, "param_dtype": param_dtype}
        self.layers = make_layers(num_layers, scan=scan, rngs=rngs, causal=causal, **fields)

    def __call__(self, x: jax.Array, *, deterministic: bool = True) -> jax.Array:
        return run_layers(self.layers, x, scan=self.scan, deterministic=deterministic)


class ByteDecoder(nnx.Module):
    """A language model of bytes: embedding plus learned positions, causal decoder layers, a linear head.

    Shapes: integer tokens (B, T) with T ≤ max_len → logits (B, T, vocab).

    >>> model = ByteDecoder(d_model=8, nhead=2, num_layers=2, max_len=16, rngs=nnx.Rngs(0))
    >>> model(jnp.zeros((2, 5), jnp.int32)).shape
    (2, 5, 256)
    """

    def __init__(
        self,
        vocab: int = 256,
        d_model: int = 128,
        nhead: int = 4,
        num_layers: int = 4,
        max_len: int = 128,
        dropout: float = 0.0,
        *,
        scan: bool = False,
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ) -> None:
        self.scan = scan
        self.max_len = max_len
        self.embed = Embedding(vocab, d_model, param_dtype=param_dtype, rngs=rngs)
        self.positions = Embedding(max_len, d_model, param_dtype=param_dtype, rngs=rngs)
        fields: dict[str, Any] = {"d_model": d_model, "nhead": nhead, "dropout": dropout, "param_dtype": param_dtype}
        self.layers = make_layers(num_layers, scan=scan, rngs=rngs, causal=True, **fields)
        self.head = nnx.Linear(d_model, vocab, param_dtype=param_dtype, rngs=rngs)

    def __call__(self, tokens: jax.Array, *, deterministic: bool = True) -> jax.Array:
        check_length(tokens.shape[-1], self.max_len)
        x = self.embed(tokens) + self.positions(jnp.arange(tokens.shape[-1]))
        return self.head(run_layers(self.layers, x, scan=self.scan, deterministic=deterministic))

    def loss(self, tokens: jax.Array, targets: jax.Array, *, deterministic: bool = True) -> jax.Array:
        """Return the mean cross entropy of `targets` (B, T)."""
        return cross_entropy(self(tokens, deterministic=deterministic), targets)


class ToyModel(nnx.Module):
    """A sigmoid: no parameters, one residual."""

    def __call__(self, x: jax.Array) -> jax.Array:
        return nnx.sigmoid(x)
