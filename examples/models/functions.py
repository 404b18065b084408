"""The mathematics that the Linen and NNX models share. Dtypes derive from the inputs: float64 stays float64."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp


def attention(
    qkv: jax.Array, nhead: int, *, causal: bool = False, dropout: Callable[[jax.Array], jax.Array] | None = None
) -> jax.Array:
    """Return multi-head self-attention of one fused projection, before the output projection.

    Shapes: `qkv` is (B, T, 3·E) in the order of PyTorch's `in_proj` (all queries, all keys, all values); the result is
    (B, T, E). Two matmuls, in the named scopes `scores` and `mixed`. The softmax stays in the dtype of `qkv`, where
    `jax.nn.dot_product_attention` would fall to float32. `dropout` acts on the softmax's result, (B, nhead, T, T).

    Raises:
        ValueError: when `nhead` does not divide E.

    >>> attention(jnp.ones((2, 5, 24)), 4).shape
    (2, 5, 8)
    """
    batch, length, width = qkv.shape
    check_heads(width // 3, nhead)
    head_dim = width // (3 * nhead)
    query, key, value = jnp.transpose(qkv.reshape(batch, length, 3, nhead, head_dim), (2, 0, 3, 1, 4))
    with jax.named_scope("scores"):
        scores = jnp.matmul(query * head_dim**-0.5, jnp.swapaxes(key, -1, -2))
    if causal:
        # The mask is added, not selected: the backward pass of an addition keeps nothing, that of `where` keeps the mask.
        visible = jnp.tril(jnp.ones((length, length), bool))
        scores = scores + jnp.where(visible, 0.0, -jnp.inf).astype(scores.dtype)
    with jax.named_scope("softmax"):
        weights = jax.nn.softmax(scores, axis=-1)
    if dropout is not None:
        weights = dropout(weights)
    with jax.named_scope("mixed"):
        mixed = jnp.matmul(weights, value)
    return jnp.swapaxes(mixed, 1, 2).reshape(batch, length, width // 3)


def check_heads(d_model: int, nhead: int) -> None:
    """Raise `ValueError` unless `nhead` heads share `d_model` evenly."""
    if nhead < 1 or d_model % nhead:
        raise ValueError(f"nhead={nhead} does not divide d_model={d_model}: choose a divisor of d_model")


def check_length(length: int, max_len: int) -> None:
    """Raise `ValueError` when a sequence is longer than the table of positions (a lookup beyond it gives NaN)."""
    if length > max_len:
        raise ValueError(f"tokens have length {length}, expected at most max_len={max_len}: shorten them or raise max_len")


def check_depth(num_layers: int) -> None:
    """Raise `ValueError` unless a deep perceptron has an input layer, at least one hidden layer, and a head."""
    if num_layers < 3:
        raise ValueError(f"num_layers={num_layers}, expected at least 3: an input layer, a hidden layer and a head")


def check_cut(layers: int, segments: int) -> None:
    """Raise `ValueError` unless `layers` layers can be cut into `segments` equal segments."""
    if segments < 1 or layers % segments:
        raise ValueError(f"segments={segments} does not divide the {layers} hidden layers: choose a divisor")


def check_width(x: jax.Array, features: int) -> None:
    """Raise `ValueError` if an input has another width than the model: Linen would create parameters of that width."""
    if x.shape[-1] != features:
        raise ValueError(f"x has {x.shape[-1]} features, expected in_features={features}")


def cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Return the mean cross entropy of integer targets, a scalar in the dtype of the logits, at least float32.

    Shapes: `logits` (..., V), `targets` (...). The loss is log-sum-exp minus the target's logit. So the backward pass needs
    one array of the logits' shape and O(number of targets) more numbers, but no one-hot array and no second (..., V).

    >>> float(cross_entropy(jnp.zeros((3, 4)), jnp.array([0, 1, 2])) - jnp.log(4.0))
    0.0
    """
    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    picked = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - picked)
