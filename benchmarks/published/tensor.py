"""Layers of GPT sharded over the GPUs of a host by heads and hidden features, as in Megatron's tensor parallelism.

There is no embedding and no head, because the published figures are of one layer. The attention scores are in memory, as in
Megatron of 2022. Dropout acts on the attention weights, with a mask on each GPU for its own heads, and on both outputs, with
the same mask on all GPUs. Masks that are not saved are drawn again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.sharding import PartitionSpec as P

import remat_jax as rj
from benchmarks.published.model import DTYPE, Layers, Shape, read_backward

AXIS = "tensor"
DROPOUT_RATE = 0.1
"""Megatron's default, in attention and after it."""


class Layer(nn.Module):
    """One layer, as a block, (batch, positions, width) → the same shape."""

    shape: Shape

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        shape, size = self.shape, self.shape.width // self.shape.heads
        split, names = P(None, None, AXIS), ("query", "key", "value")

        def dense(features: int, name: str) -> nn.Dense:
            return nn.Dense(features, dtype=DTYPE, param_dtype=DTYPE, name=name)

        def normed(x: jax.Array, name: str) -> jax.Array:
            return nn.LayerNorm(dtype=DTYPE, param_dtype=DTYPE, name=name)(x)

        keys = [self.make_rng("dropout") for _ in range(3)]
        x = _placed(x, P())
        y = _placed(normed(x, "norm1"), P())
        heads = (*x.shape[:2], shape.heads, size)
        q, k, v = (_placed(dense(shape.width, name)(y).reshape(heads), split) for name in names)
        attended = _attention(q, k, v, keys[0]).reshape(x.shape)
        x = x + _dropped(_placed(dense(shape.width, "out")(attended), P()), keys[1])
        hidden = _placed(dense(shape.hidden, "up")(_placed(normed(x, "norm2"), P())), split)
        x = x + _dropped(_placed(dense(shape.width, "down")(nn.gelu(hidden)), P()), keys[2])
        return read_backward(x) if shape.whole else x


@jax.named_scope("attention")
def _attention(q: jax.Array, k: jax.Array, v: jax.Array, key: jax.Array) -> jax.Array:
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
    causal = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    weights = jax.nn.softmax(jnp.where(causal, scores, -1e4).astype(jnp.float32)).astype(scores.dtype)
    return jnp.einsum("bhqk,bkhd->bqhd", _dropped(weights, key, split=1), v)


def _dropped(x: jax.Array, key: jax.Array, split: int | None = None) -> jax.Array:
    """Dropout of `x`. With `split`, each GPU has a part of `x` along this axis, and draws only the mask of this part."""

    def bits(key: jax.Array, shape: Sequence[int]) -> jax.Array:
        return jax.random.bits(key, shape, jnp.uint8)

    def own_bits(key: jax.Array) -> jax.Array:
        shape = [size // (gpus if axis == split else 1) for axis, size in enumerate(x.shape)]
        return bits(key if split is None else jax.random.fold_in(key, jax.lax.axis_index(AXIS)), shape)

    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        drawn = bits(key, x.shape)
    else:
        # Without `shard_map`, XLA draws the numbers of all GPUs on each GPU.
        gpus = mesh.shape[AXIS]
        spec = P(*(AXIS if axis == split else None for axis in range(x.ndim)))
        drawn = jax.shard_map(own_bits, in_specs=P(), out_specs=spec, check_vma=False)(key)
    return jnp.where(drawn >= round(256 * DROPOUT_RATE), x / (1 - DROPOUT_RATE), 0).astype(x.dtype)


def _placed(x: jax.Array, spec: P) -> jax.Array:
    return x if jax.sharding.get_abstract_mesh().empty else jax.lax.with_sharding_constraint(x, spec)


def workload(shape: Shape, batch: int, length: int, *, gpus: int, name: str = "") -> rj.Workload:
    """The step that computes the layers' gradients for `batch` sequences, without an update; nothing is allocated.

    The first layer's input is among the parameters, so that the first layer, too, computes the gradient of its input.

    >>> work = workload(Shape(2, 64, 256, 8, 0, gated=False, unrolled=True), 2, 32, gpus=8)
    >>> sum(leaf.size for leaf in jax.tree.leaves(work.params))
    104064
    """
    stack, x = Layers(shape, Layer, shape.layers), jax.ShapeDtypeStruct((batch, length, shape.width), DTYPE)
    # Philox, as in PyTorch; threefry would take longer than attention.
    key = jax.eval_shape(lambda: jax.random.key(0, impl="rbg"))
    params = {"x": x, **jax.eval_shape(lambda key, x: stack.init({"params": key, "dropout": key}, x), key, x)}

    def loss(params: Any, key: jax.Array) -> jax.Array:
        y = stack.apply({"params": params["params"]}, params["x"], rngs={"dropout": key})
        return y.astype(jnp.float32).sum()

    return rj.Workload(loss, params, (key,), Layer, mesh={AXIS: gpus}, shardings=(by_features, P()), name=name or None)


def by_features(path: str, leaf: Any) -> P:
    """Shards matrices along heads or hidden features. The input, norms, and biases of `out` and `down` are replicated."""
    sums = "out/" in path or "down/" in path
    if path == "x" or "norm" in path or (sums and leaf.ndim == 1):
        return P()
    return P(AXIS, None) if sums else P(*[None] * (leaf.ndim - 1), AXIS)
