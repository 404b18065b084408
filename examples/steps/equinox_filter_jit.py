"""Equinox: `eqx.filter_jit` and `eqx.filter_value_and_grad` of a vmapped model with an activation among its leaves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

from .network import LAYERS, WIDTH, rows


class Layer(eqx.Module):
    up: eqx.nn.Linear
    down: eqx.nn.Linear
    activation: Callable[[jax.Array], jax.Array]

    def __init__(self, key: jax.Array) -> None:
        first, second = jax.random.split(key)
        self.up, self.down = eqx.nn.Linear(WIDTH, 24, key=first), eqx.nn.Linear(24, WIDTH, key=second)
        self.activation = jnp.sin

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.down(self.activation(self.up(x)))


tx = optax.adam(1e-2)


@eqx.filter_jit
def train_step(model: eqx.nn.Sequential, opt_state: Any, x: jax.Array) -> Any:
    loss, grads = eqx.filter_value_and_grad(lambda model: (jax.vmap(model)(x) ** 2).mean())(model)
    updates, opt_state = tx.update(grads, opt_state, eqx.filter(model, eqx.is_inexact_array))
    return eqx.apply_updates(model, updates), opt_state, loss


def example_args() -> tuple[Any, ...]:
    layers = [eqx.nn.Lambda(Layer(key)) for key in jax.random.split(jax.random.key(0), LAYERS)]
    model = eqx.nn.Sequential(layers)
    return model, tx.init(eqx.filter(model, eqx.is_inexact_array)), rows()
