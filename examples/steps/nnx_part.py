"""NNX: only a part of the parameters is trained (`nnx.DiffState`)."""

from __future__ import annotations

from typing import Any

import jax
import optax
from flax import nnx

from .network import rows
from .nnx_optimizer import Net

PART = nnx.All(nnx.Param, nnx.PathContains("down"))


@nnx.jit
def train_step(model: Net, optimizer: nnx.Optimizer, x: jax.Array) -> jax.Array:
    loss, grads = nnx.value_and_grad(lambda model: (model(x) ** 2).mean(), argnums=nnx.DiffState(0, PART))(model)
    optimizer.update(model, grads)
    return loss


def example_args() -> tuple[Any, ...]:
    model = Net(nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.adam(1e-2), wrt=PART), rows()
