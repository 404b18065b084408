"""Flax's tutorials: a TrainState, a loss that closes over the batch, metrics as aux, a dropout key for each step."""

from __future__ import annotations

from typing import Any

import jax
import optax
from flax.training.train_state import TrainState

from .network import Net, parameters, rows

model = Net(dropout=0.3)


@jax.jit
def train_step(state: TrainState, x: jax.Array, key: jax.Array) -> tuple[TrainState, dict[str, jax.Array]]:
    key = jax.random.fold_in(key, state.step)

    def loss_fn(params: Any) -> Any:
        y = state.apply_fn({"params": params}, x, rngs={"dropout": key})
        return (y**2).mean(), {"largest": y.max()}

    (loss, metrics), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
    return state.apply_gradients(grads=grads), {"loss": loss, **metrics}


def example_args() -> tuple[Any, ...]:
    state = TrainState.create(apply_fn=model.apply, params=parameters(model), tx=optax.adam(1e-2))
    return state, rows(), jax.random.key(2)
