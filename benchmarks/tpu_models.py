"""The models of `benchmarks.tpu`: real layers of Linen, NNX and Equinox, narrow, so that a step compiles soon.

The time that libtpu takes depends on the kinds of kernels and their widths, not on the number of scanned layers and rows.
With few rows the residuals would stay in the memory of the core, where no policy changes anything.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax import nnx

import remat_jax as rj
from benchmarks.predict_memory import DTYPE, MlpBlock, Stack
from examples.models import nnx as nnx_models
from examples.others import equinox_decoder

WIDTH, HEADS, TEXTS, LENGTH = 256, 4, 256, 128
ROWS = 2 * TEXTS * LENGTH
SCANNED, UNROLLED = 8, 4


class Unrolled(nn.Module):
    """Perceptron blocks, one after another."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for _ in range(UNROLLED):
            x = MlpBlock(WIDTH)(x)
        return x


def perceptron(model: nn.Module, name: str) -> rj.Workload:
    """A training step of a Linen model of `MlpBlock`."""
    x = jax.ShapeDtypeStruct((ROWS, WIDTH), DTYPE)
    params = jax.eval_shape(model.init, jax.random.key(0), x)

    def loss(params: Any, x: jax.Array) -> jax.Array:
        return jnp.mean(jnp.asarray(model.apply(params, x), jnp.float32) ** 2)

    return rj.Workload(loss, params, (x,), MlpBlock, optimizer=optax.adam(1e-3), name=name)


def linen_scanned() -> rj.Workload:
    """Eight perceptron blocks under `nn.scan`."""
    return perceptron(Stack(functools.partial(MlpBlock, WIDTH), SCANNED, WIDTH), "Linen, scanned")


def linen_unrolled() -> rj.Workload:
    """Four perceptron blocks, unrolled."""
    return perceptron(Unrolled(), "Linen, unrolled")


def nnx_decoder() -> rj.Workload:
    """A language model of bytes with eight transformer layers under `nnx.scan`."""
    sizes = {"d_model": WIDTH, "nhead": HEADS, "num_layers": SCANNED, "max_len": LENGTH}
    make = functools.partial(nnx_models.ByteDecoder, **sizes, scan=True, param_dtype=DTYPE)
    model = nnx.eval_shape(lambda: make(rngs=nnx.Rngs(0)))
    tokens = jax.ShapeDtypeStruct((TEXTS, LENGTH), jnp.int32)

    def loss(model: nnx_models.ByteDecoder, tokens: jax.Array, targets: jax.Array) -> jax.Array:
        return model.loss(tokens, targets)

    return rj.Workload(loss, model, (tokens, tokens), nnx_models.DecoderLayer, optimizer=optax.adam(1e-4), name="NNX")


def equinox() -> rj.Workload:
    """The decoder of `examples.others.equinox_decoder`, its layers scanned, in float32."""
    return equinox_decoder.job(SCANNED, WIDTH, 256, (TEXTS, LENGTH + 1))


MODELS: dict[str, Callable[[], rj.Workload]] = {
    "Linen, scanned": linen_scanned,
    "Linen, unrolled": linen_unrolled,
    "NNX": nnx_decoder,
    "Equinox": equinox,
}
