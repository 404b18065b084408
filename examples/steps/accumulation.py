"""The gradient is summed in a scan over micro-batches. The step donates its state."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState

from .network import WIDTH, Net, parameters, rows

model = Net(scanned=True)


@functools.partial(jax.jit, donate_argnums=0)
def train_step(state: TrainState, x: jax.Array) -> TrainState:
    def loss_fn(params: Any, part: jax.Array) -> jax.Array:
        return (model.apply({"params": params}, part) ** 2).sum()

    def add(total: Any, part: jax.Array) -> Any:
        return jax.tree.map(jnp.add, total, jax.grad(loss_fn)(state.params, part)), None

    zeros = jax.tree.map(jnp.zeros_like, state.params)
    return state.apply_gradients(grads=jax.lax.scan(add, zeros, x.reshape(4, 2, WIDTH))[0])


def example_args() -> tuple[Any, ...]:
    return TrainState.create(apply_fn=model.apply, params=parameters(model), tx=optax.adam(1e-2)), rows()
