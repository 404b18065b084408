"""A decoder of any published shape, with an attention kernel, sharded over GPUs as in the published step."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from jax.sharding import PartitionSpec

import remat_jax as rj
from examples.llama_70b import EVERYWHERE, dividing
from remat_jax import compat

DTYPE = jnp.bfloat16


@dataclass(frozen=True)
class Shape:
    """A decoder.

    Attributes:
      layers, width, hidden, heads, vocab: the numbers of layers, features, feed-forward features, attention heads and tokens.
      kv_heads: the number of heads of keys and values; 0 for as many as `heads`.
      gated: whether the feed-forward has a gate, as in Llama; otherwise it is GELU between two dense layers, as in GPT.
      tied: whether the head multiplies by the embedding table.
      whole: whether recomputing a layer runs all of it, as in PyTorch's compiler and in Megatron's checkpoint; otherwise JAX
        skips the layer's last matmul, whose result no gradient reads.
      pairs: whether every second layer is a `Kept`, for another policy.
      unrolled: whether layers are unrolled, as in PyTorch; otherwise they are under a scan, which stacks their residuals.
    """

    layers: int
    width: int
    hidden: int
    heads: int
    vocab: int
    kv_heads: int = 0
    gated: bool = True
    tied: bool = False
    whole: bool = False
    pairs: bool = False
    unrolled: bool = False


@jax.custom_vjp
def read_backward(y: jax.Array) -> jax.Array:
    """Return `y`. The gradient reads `y`, which is therefore recomputed if it is not saved."""
    return y


# An optimization barrier would not do: it loses each operand whose result is not read.
read_backward.defvjp(lambda y: (y, y), lambda y, gradient: (gradient + 0 * y,))


class DecoderLayer(nn.Module):
    """One layer, (batch, positions, width) → the same shape."""

    shape: Shape

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = _by_sequence(x)
        shape, size = self.shape, self.shape.width // self.shape.heads

        def dense(features: int, name: str) -> nn.Dense:
            return nn.Dense(features, use_bias=not shape.gated, dtype=DTYPE, name=name)

        def norm(name: str) -> nn.Module:
            return nn.RMSNorm(dtype=DTYPE, name=name) if shape.gated else nn.LayerNorm(dtype=DTYPE, name=name)

        normed = norm("norm1")(x)
        heads = {"query": shape.heads, "key": shape.kv_heads or shape.heads, "value": shape.kv_heads or shape.heads}
        q, k, v = (dense(count * size, name)(normed).reshape(*x.shape[:2], count, size) for name, count in heads.items())
        q, k = (_rotated(each) if shape.gated else each for each in (q, k))
        k, v = (jnp.repeat(each, shape.heads // each.shape[2], axis=2) for each in (k, v))
        x = x + dense(shape.width, "out")(self._attention(q, k, v).reshape(x.shape))
        normed = norm("norm2")(x)
        up = dense(shape.hidden, "up")(normed)
        hidden = nn.silu(dense(shape.hidden, "gate")(normed)) * up if shape.gated else nn.gelu(up)
        x = x + dense(shape.width, "down")(hidden)
        return read_backward(x) if shape.whole else x

    def _attention(self, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        run = partial(compat.attention_kernel(), segment_ids=None, sm_scale=q.shape[-1] ** -0.5, causal=True)
        if jax.sharding.get_abstract_mesh().empty:
            return run(q, k, v)
        spec = PartitionSpec(EVERYWHERE)
        return jax.shard_map(run, in_specs=(spec, spec, spec), out_specs=spec, check_vma=False)(q, k, v)


class Block(DecoderLayer):
    """A layer, as a block."""


class Kept(DecoderLayer):
    """A layer, as a block that has another policy: every second layer of a shape with `pairs`."""


class Pair(nn.Module):
    """Two layers, a `Block` and a `Kept`."""

    shape: Shape

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return Kept(self.shape, name="second")(Block(self.shape, name="first")(x))


class Layers(nn.Module):
    """`count` layers of `kind`, scanned or unrolled, (batch, positions, width) → the same shape."""

    shape: Shape
    kind: Callable[..., nn.Module]
    count: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        if self.shape.unrolled:
            for index in range(self.count):
                x = self.kind(self.shape, name=f"layer_{index}")(x)
            return x
        scan = nn.scan(
            lambda layer, x, _: (layer(x), None),
            variable_axes={"params": 0},
            split_rngs={"params": True, "dropout": True},
            length=self.count,
        )
        return scan(self.kind(self.shape, name="layer"), x, None)[0]


def _by_sequence(x: jax.Array) -> jax.Array:
    """`x` with sequences sharded over the mesh, so that the compiler gathers parameters and does not reshard activations."""
    return x if jax.sharding.get_abstract_mesh().empty else jax.lax.with_sharding_constraint(x, PartitionSpec(EVERYWHERE))


def _rotated(x: jax.Array) -> jax.Array:
    half = x.shape[-1] // 2
    angles = jnp.arange(x.shape[1])[:, None] * 10000.0 ** -(jnp.arange(half) / half)
    cos, sin = (fn(angles)[:, None].astype(x.dtype) for fn in (jnp.cos, jnp.sin))
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


class Decoder(nn.Module):
    """A decoder of `shape`, tokens (batch, positions) → logits (batch, positions, vocab)."""

    shape: Shape

    def setup(self) -> None:
        self.embed = nn.Embed(self.shape.vocab, self.shape.width, dtype=DTYPE)
        pairs = self.shape.pairs
        self.layers = Layers(self.shape, Pair if pairs else Block, self.shape.layers // (2 if pairs else 1))
        self.norm = nn.RMSNorm(dtype=DTYPE)
        if not self.shape.tied:
            self.unembed = nn.Dense(self.shape.vocab, use_bias=False, dtype=DTYPE)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        return self.head(self.hidden(tokens))

    def hidden(self, tokens: jax.Array) -> jax.Array:
        """The last layer's output, (batch, positions, width)."""
        return self.layers(self.embed(tokens))

    def head(self, x: jax.Array) -> jax.Array:
        """The logits of the last layer's output `x`."""
        x = self.norm(x)
        return self.embed.attend(x) if self.shape.tied else self.unembed(x)


def workload(
    shape: Shape,
    batch: int,
    length: int,
    *,
    mesh: dict[str, int] | None = None,
    name: str = "",
    bfloat16: bool = False,
    chunks: int = 0,
) -> rj.Workload:
    """One step of `batch` sequences of `length` tokens on each GPU; parameters, Adam's state and the batch are sharded.

    Computation is in bfloat16, parameters in float32 unless `bfloat16`. The head runs in `chunks`. Nothing is allocated.

    >>> work = workload(Shape(2, 128, 256, 2, 512), 2, 128)
    >>> sum(leaf.size for leaf in jax.tree.leaves(work.params))
    459392
    """
    model, gpus = Decoder(shape), math.prod((mesh or {}).values())
    tokens = jax.ShapeDtypeStruct((batch * gpus, length), jnp.int32)
    params = jax.eval_shape(model.init, jax.random.key(0), tokens)["params"]
    if bfloat16:
        params = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, DTYPE), params)

    def head_loss(params: Any, x: jax.Array, targets: jax.Array) -> jax.Array:
        logits = model.apply({"params": params}, x, method="head").astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets).sum()

    def loss(params: Any, tokens: jax.Array, targets: jax.Array) -> jax.Array:
        x = model.apply({"params": params}, tokens, method="hidden")
        ends = rj.in_chunks(head_loss, chunks, axis=(None, 1, 1)) if chunks else head_loss
        return ends(params, x, targets) / tokens.size

    divided: dict[str, Any] = {}
    if mesh is not None:
        spec = PartitionSpec(EVERYWHERE)
        divided = {"mesh": mesh, "shardings": (dividing(gpus), spec, spec)}
    blocks = (Block, Kept) if shape.pairs else Block
    return rj.Workload(loss, params, (tokens, tokens), blocks, optimizer=optax.adam(1e-4), name=name or None, **divided)
