"""A decoder of any published shape, with an attention kernel, sharded over devices as in the published step."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from jax.sharding import PartitionSpec

import remat_jax as rj
from examples.llama_70b import EVERYWHERE, dividing
from remat_jax import compat

DTYPE = jnp.bfloat16
TENSOR = "tensor"
"""The mesh axis over which heads and hidden features are sharded, if the mesh has it."""
Attention = Literal["pallas", "splash", "splash_512", "dense"]


SPLASH_BLOCK, SPLASH_TILE = 2048, 512
"""In splash attention, the keys of a block, and the queries and keys that are computed at once.

MaxText computes 2048 x 2048 at once, which a compiler takes many minutes for. The backward pass writes one gradient of the
queries for each block of keys, so that these blocks must be as large as MaxText's.
"""


@dataclass(frozen=True)
class Shape:
    """A decoder.

    Attributes:
      layers, width, hidden, heads, vocab: the numbers of layers, features, feed-forward features, attention heads and tokens.
      kv_heads: the number of heads of keys and values; 0 for as many as `heads`.
      head_size: the features of a head; 0 for `width` divided by `heads`.
      gated: whether the feed-forward has a gate, as in Llama; otherwise it is GELU between two dense layers, as in GPT.
      parallel: whether the layer is MaxText's of 2023: attention and the feed-forward, ReLU between two dense layers, read the
        same norm and their results are added; queries, keys and values are normalised. `gated` is then False.
      tied: whether the head multiplies by the embedding table.
      whole: whether recomputing a layer runs all of it, as in PyTorch's compiler and in Megatron's checkpoint; otherwise JAX
        skips the layer's last matmul, whose result no gradient reads.
      pairs: whether every second layer is a `Kept`, for another policy.
      unrolled: whether layers are unrolled, as in PyTorch; otherwise they are under a scan, which stacks their residuals.
      attention: JAX's Pallas kernel for GPUs; JAX's splash attention for TPUs; the same with blocks of 512 and two backward
        kernels, like JAX's older kernel, which MaxText used in 2023; or scores in memory.
    """

    layers: int
    width: int
    hidden: int
    heads: int
    vocab: int
    kv_heads: int = 0
    head_size: int = 0
    gated: bool = True
    parallel: bool = False
    tied: bool = False
    whole: bool = False
    pairs: bool = False
    unrolled: bool = False
    attention: Attention = "pallas"

    @property
    def size(self) -> int:
        """The features of a head."""
        return self.head_size or self.width // self.heads

    @property
    def is_gpt(self) -> bool:
        """Whether the layer has biases and LayerNorm, and does not rotate its queries and keys."""
        return not (self.gated or self.parallel)

    @property
    def matrices(self) -> int:
        """The number of elements of all matrices, that is of all parameters except norms and biases.

        >>> Shape(32, 4096, 11008, 32, 32000).matrices  # Llama 2 7B
        6738149376
        """
        projections = 2 * self.heads + 2 * (self.kv_heads or self.heads)
        layer = self.width * (projections * self.size + (3 if self.gated else 2) * self.hidden)
        return self.layers * layer + (1 if self.tied else 2) * self.vocab * self.width


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
        shape, size = self.shape, self.shape.size

        def dense(features: int, name: str) -> nn.Dense:
            return nn.Dense(features, use_bias=shape.is_gpt, dtype=DTYPE, name=name)

        def norm(name: str) -> nn.Module:
            return nn.LayerNorm(dtype=DTYPE, name=name) if shape.is_gpt else nn.RMSNorm(dtype=DTYPE, name=name)

        normed = norm("norm1")(x)
        heads = {"query": shape.heads, "key": shape.kv_heads or shape.heads, "value": shape.kv_heads or shape.heads}
        q, k, v = (dense(count * size, name)(normed).reshape(*x.shape[:2], count, size) for name, count in heads.items())
        q, k, v = (_split(each, TENSOR, None) for each in (q, k, v))
        q, k = (each if shape.is_gpt else _rotated(each) for each in (q, k))
        if shape.parallel:
            q, k, v = (norm(f"{name}_norm")(each) for name, each in zip(heads, (q, k, v), strict=True))
        if shape.attention in ("pallas", "dense"):
            k, v = (jnp.repeat(each, shape.heads // each.shape[2], axis=2) for each in (k, v))
        attended = self._attention(q, k, v).reshape(*x.shape[:2], shape.heads * size)
        attended = _split(dense(shape.width, "out")(attended), TENSOR)
        if not shape.parallel:
            x = x + attended
            normed = norm("norm2")(x)
        up = _split(dense(shape.hidden, "up")(normed), TENSOR)
        if shape.gated:
            hidden = nn.silu(_split(dense(shape.hidden, "gate")(normed), TENSOR)) * up
        else:
            hidden = nn.relu(up) if shape.parallel else nn.gelu(up)
        fed_forward = _split(dense(shape.width, "down")(hidden), TENSOR)
        x = x + (attended + fed_forward if shape.parallel else fed_forward)
        return read_backward(x) if shape.whole else x

    def _attention(self, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        if self.shape.attention == "dense":
            return _dense_attention(q, k, v)
        if self.shape.attention != "pallas":
            run: Callable[..., jax.Array] = partial(_splash_attention, fused=self.shape.attention == "splash")
        else:
            run = partial(compat.attention_kernel(), segment_ids=None, sm_scale=q.shape[-1] ** -0.5, causal=True)
        if jax.sharding.get_abstract_mesh().empty:
            return run(q, k, v)
        spec = _spec(TENSOR, None)
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


def _spec(*features: str | None) -> PartitionSpec:
    """Shards sequences over the mesh, and the last axes over `features` if the mesh has a tensor axis."""
    has_tensor = TENSOR in jax.sharding.get_abstract_mesh().axis_names
    return PartitionSpec(EVERYWHERE, None, *features) if has_tensor else PartitionSpec(EVERYWHERE)


def _by_sequence(x: jax.Array) -> jax.Array:
    """`x` with sequences sharded over the mesh, so that the compiler gathers parameters and does not reshard activations."""
    return x if jax.sharding.get_abstract_mesh().empty else jax.lax.with_sharding_constraint(x, _spec(TENSOR))


def _split(x: jax.Array, *features: str | None) -> jax.Array:
    """`x` sharded by `_spec` if the mesh has a tensor axis; otherwise `x`."""
    has_tensor = TENSOR in jax.sharding.get_abstract_mesh().axis_names
    return jax.lax.with_sharding_constraint(x, _spec(*features)) if has_tensor else x


@jax.named_scope("attention")
def _dense_attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Attention whose scores are in memory, as in MaxText without a kernel: scores in bfloat16, softmax in float32."""
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
    causal = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    weights = jax.nn.softmax(jnp.where(causal, scores.astype(jnp.float32), -1e30)).astype(scores.dtype)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v)


def _splash_attention(q: jax.Array, k: jax.Array, v: jax.Array, fused: bool = True) -> jax.Array:
    """JAX's attention kernel for TPUs; the backward pass is one kernel if `fused`, and otherwise two, with smaller blocks."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernel
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    length, heads = q.shape[1], q.shape[2]
    tile, block = min(SPLASH_TILE, length), min(SPLASH_BLOCK if fused else SPLASH_TILE, length)
    sizes = {f"block_{name}": tile for name in ("q", "kv_compute", "q_dkv", "kv_dkv_compute")}
    sizes |= {} if fused else {"block_q_dq": tile, "block_kv_dq": tile}
    run = kernel.make_splash_mha(
        mask=masks.MultiHeadMask([masks.CausalMask((length, length))] * heads),
        head_shards=1,
        q_seq_shards=1,
        block_sizes=kernel.BlockSizes(**sizes, block_kv=block, block_kv_dkv=block, use_fused_bwd_kernel=fused),
    )
    q, k, v = (each.transpose(0, 2, 1, 3) for each in (q * q.shape[-1] ** -0.5, k, v))
    return jax.vmap(run)(q, k, v).transpose(0, 2, 1, 3)


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
    """One step of `batch` sequences of `length` tokens on each device; parameters, Adam's state and the batch are sharded.

    Computation is in bfloat16, parameters in float32 unless `bfloat16`. The head runs in `chunks`. Nothing is allocated.

    >>> work = workload(Shape(2, 128, 256, 2, 512), 2, 128)
    >>> sum(leaf.size for leaf in jax.tree.leaves(work.params))
    459392
    """
    model, devices = Decoder(shape), math.prod((mesh or {}).values())
    tokens = jax.ShapeDtypeStruct((batch * devices, length), jnp.int32)
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
        of_params = by_features if TENSOR in mesh else dividing(devices)
        divided = {"mesh": mesh, "shardings": (of_params, spec, spec)}
    blocks = (Block, Kept) if shape.pairs else Block
    return rj.Workload(loss, params, (tokens, tokens), blocks, optimizer=optax.adam(1e-4), name=name or None, **divided)


def by_features(path: str, leaf: Any) -> PartitionSpec:
    """Shards a matrix's axis of heads, hidden features or tokens over `TENSOR`, and its other axis over all other axes."""
    if leaf.ndim < 2 or "norm" in path or path.endswith("bias"):
        return PartitionSpec()
    sums = any(name in path for name in ("out/", "down/", "embed/embedding"))
    return PartitionSpec(*[None] * (leaf.ndim - 2), *((TENSOR, EVERYWHERE) if sums else (EVERYWHERE, TENSOR)))
