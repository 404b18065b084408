"""Steps of a plan on four devices; run as a script, it prints as JSON the shardings before and after, and the error."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import remat_jax as rj
from tests import test_nnx, test_train_step
from tests.small_models import Mlp, make_loss, values

ADAM, DEVICES = optax.adam(1e-2, eps=1e-3), 4


def shardings(tree: Any) -> list[str]:
    """The partition and the memory of each array."""
    return [f"{leaf.sharding.spec} {leaf.sharding.memory_kind}" for leaf in jax.tree.leaves(tree) if leaf.ndim]


def first_axis(leaf: Any) -> P:
    """The first axis over the devices, where it is a multiple."""
    return P("fsdp") if leaf.shape[0] % DEVICES == 0 else P()


def error(tree: Any, expected: Any) -> float:
    pairs = zip(test_nnx.plain_values(tree), test_nnx.plain_values(expected), strict=True)
    return max(float(np.abs(a - b).max()) for a, b in pairs if a.dtype.kind == "f")


def of_arrays(place: Any, optimizer: Any) -> dict[str, Any]:
    loss, params, _ = make_loss()
    x = values(8, 3, 4)
    step_alone = test_train_step.by_hand(loss)
    expected = test_train_step.run(step_alone, params, ADAM.init(params), x)
    placed = jax.tree.map(lambda leaf: jax.device_put(leaf, place(first_axis(leaf))), params)
    x = jax.device_put(x, place(P("fsdp")))

    def divided(params: Any, x: jax.Array) -> Any:
        # A bare spec names the axes of the mesh that the arguments are on.
        return loss(params, jax.lax.with_sharding_constraint(x, P("fsdp")))

    step = test_train_step.plan_of(rj.Workload(divided, placed, (x,), Mlp)).train_step(divided, optimizer)
    state = step.init(placed)
    before = shardings((placed, state))
    params, state, losses = test_train_step.run(step, placed, state, x)
    return {
        "before": before,
        "after": shardings((params, state)),
        "error": error((params, state, losses), expected),
        "compilations": test_train_step.compilations(step),
    }


def of_modules(place: Any) -> dict[str, Any]:
    model, plain, x = test_nnx.Model(), test_nnx.Model(), values(8, 4)
    expected = test_train_step.nnx_by_hand(test_nnx.loss)
    plain_optimizer = nnx.Optimizer(plain, ADAM, wrt=nnx.Param)
    by_hand = [expected(plain, plain_optimizer, x) for _ in range(3)]
    nnx.update(model, jax.tree.map(lambda leaf: jax.device_put(leaf, place(first_axis(leaf))), nnx.state(model)))
    optimizer, x = nnx.Optimizer(model, ADAM, wrt=nnx.Param), jax.device_put(x, place(P("fsdp")))
    job = rj.Workload.from_nnx(model, test_nnx.loss, (x,), test_nnx.Layer)
    step = test_train_step.plan_of(job).train_step(test_nnx.loss, optimizer)
    before = shardings(nnx.state((model, optimizer)))
    losses = [step(model, optimizer, x) for _ in range(3)]
    results = nnx.state((model, optimizer)), losses
    return {
        "before": before,
        "after": shardings(results[0]),
        "error": error(results, (nnx.state((plain, plain_optimizer)), by_hand)),
        "compilations": test_train_step.compilations(step),
    }


def main(path: Path) -> None:
    mesh = jax.make_mesh((DEVICES,), ("fsdp",), axis_types=(AxisType.Auto,), devices=jax.devices()[:DEVICES])
    place = lambda spec: NamedSharding(mesh, spec)  # noqa: E731
    told = {"arrays": of_arrays(place, rj.offload_optimizer(ADAM)), "nnx": of_modules(place)}
    path.write_text(json.dumps(told))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
