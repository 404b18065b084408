"""Reinforcement learning: a policy head and a value head on one network, and the advantage in both losses."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from .network import ROWS, WIDTH, Net, parameters, rows

model = Net()


@jax.jit
def train_step(params: Any, x: jax.Array, actions: jax.Array, returns: jax.Array) -> Any:
    def loss_fn(params: Any) -> Any:
        y = model.apply({"params": params["net"]}, x)
        value, chosen = y @ params["value"], jnp.take_along_axis(jax.nn.log_softmax(y), actions[:, None], 1)[:, 0]
        advantage = jax.lax.stop_gradient(returns - value)
        return ((returns - value) ** 2 - chosen * advantage).mean(), value.mean()

    grads, value = jax.grad(loss_fn, has_aux=True)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


def example_args() -> tuple[Any, ...]:
    return {"net": parameters(model), "value": jnp.ones(WIDTH)}, rows(), jnp.arange(ROWS) % WIDTH, jnp.ones(ROWS)
