"""Layers of GPT divided over the GPUs of a host as Megatron divides them: by heads and hidden features.

There is no embedding and no head: the published figures are those of a layer. The scores of the attention are in memory, as
they were in Megatron of 2022.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.sharding import PartitionSpec as P

import remat_jax as rj
from benchmarks.published.model import DTYPE, Layers, Shape, read_backward

AXIS = "tensor"


class Layer(nn.Module):
    """One layer, (batch, positions, width) → the same: the block of checkpointing."""

    shape: Shape

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        shape, size = self.shape, self.shape.width // self.shape.heads
        split, names = P(None, None, AXIS), ("query", "key", "value")

        def dense(features: int, name: str) -> nn.Dense:
            return nn.Dense(features, dtype=DTYPE, param_dtype=DTYPE, name=name)

        def normed(x: jax.Array, name: str) -> jax.Array:
            return nn.LayerNorm(dtype=DTYPE, param_dtype=DTYPE, name=name)(x)

        x = _placed(x, P())
        y = _placed(normed(x, "norm1"), P())
        heads = (*x.shape[:2], shape.heads, size)
        q, k, v = (_placed(dense(shape.width, name)(y).reshape(heads), split) for name in names)
        found = _attention(q, k, v).reshape(x.shape)
        x = x + _placed(dense(shape.width, "out")(found), P())
        hidden = _placed(dense(shape.hidden, "up")(_placed(normed(x, "norm2"), P())), split)
        x = x + _placed(dense(shape.width, "down")(nn.gelu(hidden)), P())
        return read_backward(x) if shape.whole else x


@jax.named_scope("attention")
def _attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
    causal = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    weights = jax.nn.softmax(jnp.where(causal, scores, -1e4).astype(jnp.float32)).astype(scores.dtype)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v)


def _placed(x: jax.Array, spec: P) -> jax.Array:
    return x if jax.sharding.get_abstract_mesh().empty else jax.lax.with_sharding_constraint(x, spec)


def workload(shape: Shape, batch: int, length: int, *, gpus: int, name: str = "") -> rj.Workload:
    """The gradients of the layers' parameters for `batch` sequences, without an update; nothing is allocated.

    The first layer's input is among the parameters, so that every layer has all of its backward pass.

    >>> work = workload(Shape(2, 64, 256, 4, 0, gated=False), 2, 32, gpus=8)
    >>> sum(leaf.size for leaf in jax.tree.leaves(work.params))
    99968
    """
    stack, x = Layers(shape, Layer, shape.layers), jax.ShapeDtypeStruct((batch, length, shape.width), DTYPE)
    params = {"x": x, **jax.eval_shape(stack.init, jax.random.key(0), x)}

    def loss(params: Any) -> jax.Array:
        return stack.apply({"params": params["params"]}, params["x"]).astype(jnp.float32).sum()

    return rj.Workload(loss, params, (), Layer, mesh={AXIS: gpus}, shardings=(by_features,), name=name or None)


def by_features(path: str, leaf: Any) -> P:
    """The input is whole; a matrix is divided by its heads or hidden features: by what it makes, or by what it sums over."""
    sums = "out/" in path or "down/" in path
    if path == "x" or "norm" in path or (sums and leaf.ndim == 1):
        return P()
    return P(AXIS, None) if sums else P(*[None] * (leaf.ndim - 1), AXIS)
