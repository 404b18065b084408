"""`optax.MultiSteps`: the optimizer sums the gradients of several steps. The loss is jitted itself; the step is not."""

from __future__ import annotations

from typing import Any

import jax
import optax
from flax.training.train_state import TrainState

from .network import Net, parameters, rows

model = Net(scanned=True)


@jax.jit
def loss_fn(params: Any, x: jax.Array) -> jax.Array:
    return (model.apply({"params": params}, x) ** 2).mean()


def train_step(state: TrainState, x: jax.Array) -> TrainState:
    return state.apply_gradients(grads=jax.grad(loss_fn)(state.params, x))


def example_args() -> tuple[Any, ...]:
    tx = optax.MultiSteps(optax.sgd(0.1), 2)
    return TrainState.create(apply_fn=model.apply, params=parameters(model), tx=tx), rows()
