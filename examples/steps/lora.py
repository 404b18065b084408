"""Adapters: the optimizer trains some parameters and knows them by their labels. The step donates both."""

from __future__ import annotations

import functools
from typing import Any

import jax
import optax

from .network import Net, parameters, rows

model = Net()


def labels(params: Any) -> Any:
    return jax.tree.map_with_path(lambda path, _: "on" if "down" in jax.tree_util.keystr(path) else "off", params)


tx = optax.multi_transform({"on": optax.adam(1e-2), "off": optax.set_to_zero()}, labels)


@functools.partial(jax.jit, donate_argnums=(0, 1))
def train_step(params: Any, opt_state: Any, x: jax.Array) -> Any:
    grads = jax.grad(lambda params: (model.apply({"params": params}, x) ** 2).mean())(params)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state


def example_args() -> tuple[Any, ...]:
    params = parameters(model)
    return params, tx.init(params), rows()
