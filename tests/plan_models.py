"""A stack of perceptrons as a workload; most of its memory is what the blocks keep."""

from __future__ import annotations

import functools
from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

import remat_jax as rj
from tests.small_models import in_a_scan

LAYERS, WIDTH = 6, 32


class MlpLayer(nn.Module):
    """Up, activation, down, added to the input. JAX 0.12 keeps one array less for a tanh than earlier versions."""

    activation: Callable = jnp.tanh

    @nn.compact
    def __call__(self, x):
        hidden = self.activation(nn.Dense(4 * WIDTH, use_bias=False, name="up")(x))
        return x + nn.Dense(WIDTH, use_bias=False, name="down")(hidden)


class MlpStack(nn.Module):
    """A number of such blocks, unrolled or scanned."""

    scanned: bool = False
    layers: int = LAYERS
    activation: Callable = jnp.tanh

    @nn.compact
    def __call__(self, x):
        if self.scanned:
            return in_a_scan(MlpLayer(self.activation, name="layers"), x, self.layers)
        for index in range(self.layers):
            x = MlpLayer(self.activation, name=f"layers_{index}")(x)
        return x


@functools.cache
def parameters(model):
    """The shapes of a stack's parameters."""
    return jax.eval_shape(model.init, jax.random.key(0), jax.ShapeDtypeStruct((1, WIDTH), jnp.float32))


def job(rows=2048, *, scanned=False, layers=LAYERS, activation=jnp.tanh, **options):
    """The workload; nothing is allocated."""
    model, x = MlpStack(scanned, layers, activation), jax.ShapeDtypeStruct((rows, WIDTH), jnp.float32)
    options = {"optimizer": optax.sgd(0.1), "name": "perceptrons", **options}
    return rj.Workload(lambda params, x: jnp.mean(model.apply(params, x) ** 2), parameters(model), (x,), MlpLayer, **options)
