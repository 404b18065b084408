"""Plain functions: a dict of stacked parameters and `lax.scan` over the layers."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from .network import LAYERS, WIDTH, rows


def layer(x: jax.Array, params: Any) -> Any:
    return x + jnp.sin(x @ params["up"]) @ params["down"], None


@jax.jit
def train_step(params: Any, x: jax.Array) -> Any:
    def loss_fn(params: Any) -> jax.Array:
        return (jax.lax.scan(layer, x, params)[0] ** 2).mean()

    loss, grads = jax.value_and_grad(loss_fn)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss


def example_args() -> tuple[Any, ...]:
    up, down = (0.3 * jax.random.normal(jax.random.key(seed), (LAYERS, WIDTH, 24)) for seed in (1, 2))
    return {"up": up, "down": down.swapaxes(1, 2)}, rows()
