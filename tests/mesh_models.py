"""A small Llama on a mesh of 4 × 2 and on one device; run as a script, it prints gradients on eight devices and on one."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import remat_jax as rj
from examples.llama_70b import by_features
from examples.models import llama
from examples.models.functions import cross_entropy
from tests.small_models import Mlp

BATCH, LENGTH, LAYERS = 8, 16, 2
CONFIG = llama.LlamaConfig(96, 32, 64, num_layers=LAYERS)
MESH = {"fsdp": 4, "tensor": 2}
BY_BATCH = P("fsdp")
POLICIES: dict[str, Any] = {
    "full": "full",
    "offload_inputs": "offload_inputs",
    "dots": "dots",
    "offload_dots": "offload_dot_with_no_batch_dims",
    "layers": rj.LayerPolicies.of(["offload_inputs", "save: *mlp*"]),
}
BY_SEQUENCE: dict[str, Any] = {"mesh": {"data": 2, "sequence": 4}, "over": P("data", "sequence"), "of_params": P()}
"""Partitions the positions of a sequence over four devices and the batch over two; parameters are replicated."""
OF_SEQUENCE = ("offload_inputs", "dots")


def small_llama(
    mesh: Any = None,
    *,
    over: Any = BY_BATCH,
    of_params: Any = by_features,
    dtype: Any = jnp.float32,
    scan: bool = True,
    **options: Any,
) -> rj.Workload:
    """The workload; without a mesh for one device. `over` partitions the tokens and the arrays between layers."""
    model = llama.Llama(CONFIG, scan, dtype, over if mesh is not None else None)
    tokens = jax.ShapeDtypeStruct((BATCH, LENGTH), jnp.int32)
    params = jax.eval_shape(llama.Llama(CONFIG, scan, dtype).init, jax.random.key(0), tokens)["params"]

    def loss(params: Any, tokens: jax.Array, targets: jax.Array) -> jax.Array:
        return cross_entropy(model.apply({"params": params}, tokens), targets)

    if mesh is not None:
        options |= {"mesh": mesh, "shardings": (of_params, over, over)}
    return rj.Workload(loss, params, (tokens, tokens), llama.LlamaBlock, **options)


X = jax.ShapeDtypeStruct((8, 16), jnp.float32)


def mlp(batch: Any = (X,), **options: Any) -> rj.Workload:
    """A perceptron on the sum of the arrays of its batch."""
    params = jax.eval_shape(Mlp().init, jax.random.key(0), X)

    def loss(params: Any, *batch: Any) -> Any:
        return (Mlp().apply(params, sum(jax.tree.leaves(batch))) ** 2).sum()

    return rj.Workload(loss, params, batch, Mlp, **options)


def numbers(job: rj.Workload) -> tuple[Any, ...]:
    """Arguments of a step: random weights, tokens."""
    random = np.random.default_rng(0)

    def filled(leaf: Any) -> Any:
        if jnp.issubdtype(leaf.dtype, jnp.integer):
            return random.integers(0, CONFIG.vocab_size if leaf.shape else 1, leaf.shape).astype(leaf.dtype)
        # Adam's second moments are not negative.
        return np.abs(random.normal(size=leaf.shape) * 0.1).astype(leaf.dtype)

    return jax.tree.map(filled, job.step("off").arguments)


def main(path: str) -> None:
    """Write the updated parameters of a step on one device and on eight, for each case, and each gradient's placement."""
    settings = {"dtype": jnp.float64, "optimizer": optax.sgd(1.0)}
    arrays: dict[str, Any] = {}
    alone = small_llama(**settings)
    given = numbers(alone)
    for place, leaf in enumerate(jax.tree.leaves(jax.jit(alone.step("off").function)(*given))):
        arrays[f"alone/{place}"] = leaf
    divided, by_sequence = small_llama(MESH, **settings), small_llama(**BY_SEQUENCE, **settings)
    cases = {name: (divided, name) for name in POLICIES} | {f"sequence {name}": (by_sequence, name) for name in OF_SEQUENCE}
    for name, (job, policy) in cases.items():
        step = job.step(POLICIES[policy])
        mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(job.mesh.axis_sizes), job.mesh.axis_names)
        places = jax.tree.map(lambda sharding, mesh=mesh: NamedSharding(mesh, sharding.spec), step.shardings)
        results = jax.jit(step.function)(*jax.device_put(given, places))
        kept = jax.tree.map(lambda new, old: new.sharding.is_equivalent_to(old, new.ndim), results[0], places[0])
        assert all(jax.tree.leaves(kept)), "new parameters lie where the old ones did"
        for place, leaf in enumerate(jax.tree.leaves(results)):
            arrays[f"{name}/{place}"] = np.asarray(leaf)
    arrays |= offloaded_optimizer(given)
    np.savez(Path(path), **arrays)


def offloaded_optimizer(given: Any) -> dict[str, Any]:
    """A step of Adam on one device, and one on eight with its state in host memory, partitioned like the parameters.

    The state is computed op by op from partitioned parameters, as a training loop does before its first step.
    """
    arrays: dict[str, Any] = {}
    tx = optax.adam(1e-3)
    alone = small_llama(dtype=jnp.float64, optimizer=tx)
    params, tokens = given[0], given[3:]
    results = jax.jit(alone.step("full").function)(params, tx.init(params), {}, *tokens)
    arrays |= {f"adam alone/{place}": np.asarray(leaf) for place, leaf in enumerate(jax.tree.leaves(results))}

    offloaded = rj.offload_optimizer(tx)
    step = small_llama(MESH, dtype=jnp.float64, optimizer=offloaded).step("full")
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(4, 2), tuple(MESH))
    places = jax.tree.map(lambda sharding: NamedSharding(mesh, sharding.spec, memory_kind=sharding.memory_kind), step.shardings)
    divided, *tokens = jax.device_put((params, *tokens), (places[0], *places[3:]))
    state = offloaded.init(divided)
    assert jax.tree.all(jax.tree.map(lambda array, place: array.sharding.is_equivalent_to(place, array.ndim), state, places[1]))
    results = jax.jit(step.function, donate_argnums=(0, 1))(divided, state, {}, *tokens)
    lies = jax.tree.map(lambda array, place: array.sharding.is_equivalent_to(place, array.ndim), results[:2], places[:2])
    assert jax.tree.all(lies), "the state is where it was"
    kinds = {leaf.sharding.memory_kind for leaf in jax.tree.leaves(results[1]) if leaf.ndim}
    assert kinds == {"pinned_host"}, kinds
    return arrays | {f"adam offloaded/{place}": np.asarray(leaf) for place, leaf in enumerate(jax.tree.leaves(results))}


if __name__ == "__main__":
    main(sys.argv[1])
