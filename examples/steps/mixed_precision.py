"""Parameters in float32, computation in bfloat16."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState

from .network import Net, parameters, rows

model = Net()


@jax.jit
def train_step(state: TrainState, x: jax.Array) -> Any:
    def loss_fn(params: Any) -> jax.Array:
        half = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
        return jnp.mean(model.apply({"params": half}, x.astype(jnp.bfloat16)).astype(jnp.float32) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), loss


def example_args() -> tuple[Any, ...]:
    return TrainState.create(apply_fn=model.apply, params=parameters(model), tx=optax.adam(1e-2)), rows()
