"""The cost of a step over micro-batches on eight devices; run as a script, it prints JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import remat_jax as rj
from remat_jax.errors import ArgumentError

DEVICES, ROWS, LENGTH, WIDTH, LAYERS = 8, 64, 64, 256, 4
KINDS = (AxisType.Auto, AxisType.Explicit)


def summed(weights: Any, x: jax.Array) -> tuple[jax.Array, int]:
    for weight in weights:
        x = jnp.tanh(x @ weight)
    return jnp.sum(x**2), x.shape[0] * LENGTH


def whole(weights: Any, x: jax.Array) -> Any:
    def mean(weights: Any) -> jax.Array:
        total, count = summed(weights, x)
        return total / count

    return jax.value_and_grad(mean)(weights)


def step_of(n: int) -> Any:
    return rj.accumulate_gradients(summed, n) if n > 1 else whole


def needs(mesh: Any, n: int) -> dict[str, Any]:
    """One device's temp bytes and operations (the loop body counts once), and the number of collectives."""
    weight = jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32, sharding=NamedSharding(mesh, P()))
    x = jax.ShapeDtypeStruct((ROWS, LENGTH, WIDTH), jnp.float32, sharding=NamedSharding(mesh, P("data")))
    compiled = jax.jit(step_of(n)).lower([weight] * LAYERS, x).compile()
    kinds = ("all-gather", "all-reduce", "all-to-all", "collective-permute")
    counts = {kind: compiled.as_text().count(f" {kind}(") for kind in kinds}
    return counts | {"temp": compiled.memory_analysis().temp_size_in_bytes, "flops": compiled.cost_analysis()["flops"]}


def error(mesh: Any, n: int) -> float:
    """How far a gradient on the mesh differs from that of one device."""
    random = np.random.default_rng(0)
    weights = [random.normal(size=(WIDTH, WIDTH)).astype(np.float32) / 16 for _ in range(LAYERS)]
    x = random.normal(size=(ROWS, LENGTH, WIDTH)).astype(np.float32)
    _, expected = jax.jit(whole)(weights, x)
    with jax.set_mesh(mesh):
        placed = jax.device_put(weights, NamedSharding(mesh, P())), jax.device_put(x, NamedSharding(mesh, P("data")))
        _, gradients = jax.jit(step_of(n))(*placed)
    return max(float(np.abs(np.asarray(a) - b).max() / np.abs(b).max()) for a, b in zip(gradients, expected, strict=True))


def refusal(mesh: Any, n: int) -> str:
    try:
        needs(mesh, n)
    except ArgumentError as error:
        return str(error)
    return ""


if __name__ == "__main__":
    figures: dict[str, Any] = {}
    for kind in KINDS:
        mesh = jax.make_mesh((DEVICES,), ("data",), axis_types=(kind,))
        figures[kind.name] = {"error": error(mesh, 4), "refusal": refusal(mesh, 16)}
        figures[kind.name] |= {str(n): needs(mesh, n) for n in (1, 2, 4, 8)}
    Path(sys.argv[1]).write_text(json.dumps(figures))
