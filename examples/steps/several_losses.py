"""Several losses of one model, weighted, by `jax.vjp` with a cotangent for each."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from .network import Net, parameters, rows

model = Net(scanned=True)


@jax.jit
def train_step(params: Any, x: jax.Array, weights: jax.Array) -> Any:
    def losses_fn(params: Any) -> jax.Array:
        y = model.apply({"params": params}, x)
        return jnp.stack([(y**2).mean(), jnp.abs(y).mean()])

    losses, pull = jax.vjp(losses_fn, params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, pull(weights)[0]), losses


def example_args() -> tuple[Any, ...]:
    return parameters(model), rows(), jnp.asarray([1.0, 0.1])
