"""One of two processes with four devices each: a small Llama partitioned over all eight; `test_processes` runs it as a
script.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding

from tests.mesh_models import MESH, POLICIES, numbers, small_llama

MODES = ("full", "offload_inputs")


def main(address: str, rank: int, path: str) -> None:
    """Write this process's part of each result: for every policy the loss and the parameters after a step of size 1."""
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(address, num_processes=2, process_id=rank, initialization_timeout=120)
    assert (jax.process_count(), jax.local_device_count(), jax.device_count()) == (2, 4, 8)
    settings: dict[str, Any] = {"dtype": jnp.float64, "optimizer": optax.sgd(1.0)}
    given = numbers(small_llama(**settings))
    job = small_llama(MESH, **settings)
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(job.mesh.axis_sizes), job.mesh.axis_names)
    gathered: dict[str, Any] = {}
    for name in MODES:
        step = job.step(POLICIES[name])
        places = jax.tree.map(lambda sharding: NamedSharding(mesh, sharding.spec), step.shardings)
        arrays = jax.tree.map(
            lambda array, place: jax.make_array_from_callback(array.shape, place, array.__getitem__), given, places
        )
        results = jax.jit(step.function)(*arrays)
        for place, leaf in enumerate(jax.tree.leaves(results)):
            gathered[f"{name}/{place}"] = multihost_utils.process_allgather(leaf, tiled=True)
            gathered[f"{name}/{place}/here"] = sum(shard.data.nbytes for shard in leaf.addressable_shards)
    if rank == 0:
        alone = jax.jit(small_llama(**settings).step("off").function)(*given)
        gathered.update({f"alone/{place}": np.asarray(leaf) for place, leaf in enumerate(jax.tree.leaves(alone))})
    np.savez(Path(path), **gathered)
    jax.distributed.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
