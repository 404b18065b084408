"""Haiku: `hk.transform`, with random keys that the layers take from the transform."""

from __future__ import annotations

from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp

from .network import LAYERS, WIDTH, rows


class Layer(hk.Module):
    def __call__(self, x: jax.Array) -> jax.Array:
        y = hk.Linear(WIDTH, name="down")(jnp.sin(hk.Linear(24, name="up")(x)))
        return x + y * jax.random.bernoulli(hk.next_rng_key(), 0.8, y.shape)


@hk.transform
def model(x: jax.Array) -> jax.Array:
    for _ in range(LAYERS):
        x = Layer()(x)
    return x


@jax.jit
def train_step(params: Any, key: jax.Array, x: jax.Array) -> Any:
    loss, grads = jax.value_and_grad(lambda params: (model.apply(params, key, x) ** 2).mean())(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss


def example_args() -> tuple[Any, ...]:
    return model.init(jax.random.key(0), rows()), jax.random.key(3), rows()
