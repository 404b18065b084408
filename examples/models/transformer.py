"""Shared parts of the well-known transformers' ports. Dtypes derive from the inputs: float64 stays float64.

A norm, a softmax or a rotation is computed in float32 at least and rounded to the dtype of its input afterwards, as in
the PyTorch originals; `jax.nn.dot_product_attention` would turn even float64 into float32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

Dtype = Any


def wide(dtype: Dtype) -> Dtype:
    """Return the dtype of precision-critical sums: `dtype`, at least float32.

    >>> wide(jnp.bfloat16).__name__, wide(jnp.float64).__name__
    ('float32', 'float64')
    """
    return jnp.promote_types(dtype, jnp.float32).type


def run_blocks(make: Callable[..., nn.Module], num_layers: int, x: Any, *shared: Any, scan: bool = False) -> Any:
    """Apply `num_layers` blocks inside a compact method, unrolled or under `nn.scan`.

    `make(name=…)` returns a block, which is called as `block(x, *shared)`; all blocks read `shared`, such as a mask. `x` is an
    array, or a tuple of arrays.
    Unrolled, the parameters are `layers_0/…`, `layers_1/…`; scanned, `layers/…` with the layers stacked on axis 0.
    """
    if scan:
        return scan_block(make(name="layers"), num_layers, x, *shared)
    for index in range(num_layers):
        x = make(name=f"layers_{index}")(x, *shared)
    return x


def scan_block(block: nn.Module, num_layers: int, x: Any, *shared: Any, spread: bool = False) -> Any:
    """Apply a bound block `num_layers` times, each time with its own parameters, which are stacked on axis 0.

    The block is called as `block(x, *shared)`; with `spread` as `block(*x, *shared)`, where `x` is a tuple of streams.
    """

    def body(block: nn.Module, carry: Any, *shared: Any) -> tuple[Any, None]:
        return block(*carry, *shared) if spread else block(carry, *shared), None

    scanned = nn.scan(
        body,
        variable_axes={"params": 0, "intermediates": 0},
        split_rngs={"params": True},
        in_axes=nn.broadcast,
        length=num_layers,
    )
    return scanned(block, x, *shared)[0]


def embed(table: nn.Embed, tokens: jax.Array, padding: int | None) -> jax.Array:
    """Look tokens up, (B, T) → (B, T, E); the token `padding` gets no gradient, as with PyTorch's `padding_idx`."""
    x = table(tokens)
    if padding is None:
        return x
    # Multiplied, not selected: the backward pass of `where` keeps arrays of the size of x, that of a product keeps (B, T, 1).
    trained = (tokens != padding)[..., None].astype(x.dtype)
    return x * trained + jax.lax.stop_gradient(x * (1 - trained))


def unembed(table: nn.Embed, x: jax.Array) -> jax.Array:
    """Return logits of tied embeddings, (B, T, E) → (B, T, V); `nn.Embed.attend` keeps a transposed table for backward."""
    return jnp.einsum("bte,ve->btv", x, table.embedding)


def attention_bias(mask: jax.Array | None, length: int, dtype: Dtype, *, causal: bool) -> jax.Array | None:
    """Return the bias of attention scores, (B or 1, 1, T, T): 0 for visible keys, else the least number of `dtype`.

    `mask` (B, T) is true, or 1, for tokens and false for padding. With the least number, a query that may attend to no
    key attends to all keys equally; minus infinity would give NaN. The result is None if nothing is hidden.

    >>> attention_bias(jnp.array([[1, 1, 0]]), 3, jnp.float32, causal=True)[0, 0] == 0
    Array([[ True, False, False],
           [ True,  True, False],
           [ True,  True, False]], dtype=bool)
    """
    if mask is None and not causal:
        return None
    visible = jnp.ones((1, 1, length, length), bool)
    if mask is not None:
        visible = jnp.broadcast_to(mask.astype(bool)[:, None, None, :], (mask.shape[0], 1, length, length))
    if causal:
        visible = visible & jnp.tril(jnp.ones((length, length), bool))
    return jnp.where(visible, 0, jnp.finfo(dtype).min).astype(dtype)


def attention(query: jax.Array, key: jax.Array, value: jax.Array, bias: jax.Array | None = None) -> jax.Array:
    """Return scaled dot-product attention; several query heads share a key head if there are fewer key heads.

    Shapes: `query` (B, T, H, D), `key` and `value` (B, S, K, D) with K dividing H: heads 0 … H/K − 1 read key head 0;
    `bias` broadcasts to (B, 1, T, S). The result is (B, T, H·D).

    Raises:
        ValueError: when K does not divide H.

    >>> attention(jnp.ones((2, 5, 4, 8)), jnp.ones((2, 7, 2, 8)), jnp.ones((2, 7, 2, 8))).shape
    (2, 5, 32)
    """
    batch, length, heads, width = query.shape
    groups = key.shape[2]
    if heads % groups:
        raise ValueError(f"key has {groups} heads, which do not divide the {heads} of query: choose a divisor")
    query = query.reshape(batch, length, groups, heads // groups, width)
    with jax.named_scope("scores"):
        scores = jnp.einsum("btkgd,bskd->bkgts", query, key) * width**-0.5
    if bias is not None:
        scores = scores + bias[:, :, None]
    with jax.named_scope("softmax"):
        weights = jax.nn.softmax(scores.astype(wide(scores.dtype)), axis=-1).astype(query.dtype)
    with jax.named_scope("mixed"):
        mixed = jnp.einsum("bkgts,bskd->btkgd", weights, value)
    return mixed.reshape(batch, length, heads * width)


class Attention(nn.Module):
    """Multi-head attention with four projections; `x` attends to `to`, by default to itself, (B, T, E) → the same."""

    num_heads: int
    param_dtype: Dtype = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array, bias: jax.Array | None = None, *, to: jax.Array | None = None) -> jax.Array:
        width = x.shape[-1]
        to = x if to is None else to

        def heads(name: str, x: jax.Array) -> jax.Array:
            return split_heads(nn.Dense(width, param_dtype=self.param_dtype, name=name)(x), self.num_heads)

        mixed = attention(heads("query", x), heads("key", to), heads("value", to), bias)
        return nn.Dense(width, param_dtype=self.param_dtype, name="out")(mixed)


def split_heads(x: jax.Array, heads: int) -> jax.Array:
    """Return (B, T, H·D) as (B, T, H, D).

    Raises:
        ValueError: when `heads` does not divide the width.
    """
    if heads < 1 or x.shape[-1] % heads:
        raise ValueError(f"heads={heads} does not divide the width {x.shape[-1]}: choose a divisor")
    return x.reshape(*x.shape[:-1], heads, -1)


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3.1's stretched rotations of slow frequencies, for texts longer than those of its first training.

    Attributes:
        factor: how many times longer the texts may be.
        low, high: a frequency that turns less than `low` times in `length` tokens is divided by `factor`. A frequency that
            turns more than `high` times is unchanged. A frequency in between is a mixture of both.
        length: the number of tokens in the first training.
    """

    factor: float = 8.0
    low: float = 1.0
    high: float = 4.0
    length: int = 8192

    def apply(self, frequencies: np.ndarray) -> np.ndarray:
        """Return the stretched frequencies, in radians per token."""
        turns = self.length * frequencies / (2 * np.pi)
        kept = np.clip((turns - self.low) / (self.high - self.low), 0, 1)
        return kept * frequencies + (1 - kept) * frequencies / self.factor


def rotations(
    positions: jax.Array, head_dim: int, theta: float, dtype: Dtype, scaling: RopeScaling | None = None
) -> tuple[jax.Array, jax.Array]:
    """Return cosine and sine of rotary positions, (B, T) → twice (B, T, 1, head_dim / 2) in `dtype`.

    Su et al., RoFormer, 2021. The frequencies are exact to float64 and the angles in float32 at least: in bfloat16 a
    position beyond 256 would be rounded.

    >>> cos, sin = rotations(jnp.arange(3)[None], 8, 10000.0, jnp.float32)
    >>> cos.shape, float(cos[0, 0, 0, 0])
    ((1, 3, 1, 4), 1.0)
    """
    frequencies = theta ** -(np.arange(0, head_dim, 2) / head_dim)
    if scaling is not None:
        frequencies = scaling.apply(frequencies)
    angles = positions[..., None, None].astype(wide(dtype)) * jnp.asarray(frequencies, wide(dtype))
    return jnp.cos(angles).astype(dtype), jnp.sin(angles).astype(dtype)


def rotate(x: jax.Array, rotation: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotate each pair (x[i], x[i + D/2]) of (B, T, H, D) by its angle; the paper's pairs are (x[2i], x[2i + 1])."""
    cos, sin = rotation
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
