"""FSDP: parameters and batch are divided over all devices by `NamedSharding`, under `jax.set_mesh`."""

from __future__ import annotations

from typing import Any

import jax
import optax
from jax.sharding import NamedSharding, PartitionSpec

from .network import Net, parameters, rows

model, tx = Net(scanned=True), optax.adam(1e-2)


@jax.jit
def train_step(params: Any, opt_state: Any, x: jax.Array) -> Any:
    loss, grads = jax.value_and_grad(lambda params: (model.apply({"params": params}, x) ** 2).mean())(params)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


def example_args() -> tuple[Any, ...]:
    mesh = jax.make_mesh((jax.device_count(),), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))
    with jax.set_mesh(mesh):
        return jax.tree.map(
            lambda leaf: jax.device_put(leaf, NamedSharding(mesh, _spec(leaf, mesh.size))),
            (params := parameters(model), tx.init(params), rows()),
        )


def _spec(leaf: jax.Array, devices: int) -> PartitionSpec:
    return PartitionSpec("fsdp") if leaf.ndim and leaf.shape[0] % devices == 0 else PartitionSpec()
