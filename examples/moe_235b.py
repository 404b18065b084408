"""A decoder of 235 billion parameters, 22 of them active, with 128 experts a layer, over hosts with eight H200 each.

    remat-jax measure examples/moe_235b.py:job --target 8x8xh200 --policy full

The shapes are those of Qwen3-235B-A22B. The experts are partitioned over the GPUs of a host, so that tokens stay within the
host, and their matrices also over the hosts. Other parameters and the batch are partitioned over all GPUs. The optimizer's
state is partitioned like the parameters. Nothing is allocated.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P

from remat_jax import Workload

from .llama_70b import EVERYWHERE, LENGTH, dividing
from .models import moe
from .models.functions import cross_entropy

GPUS = 8


def job() -> Workload:
    """Return the workload on eight hosts: 64 sequences of 4096 tokens, Adam, bfloat16.

    >>> sum(leaf.size for leaf in jax.tree.leaves(job().params)) // 10**9
    235
    """
    return job_on(8)


def job_on(hosts: int, config: moe.MoeConfig | None = None, length: int = LENGTH, dtype: Any = jnp.bfloat16) -> Workload:
    """Return the same workload on a number of hosts, with one sequence per GPU."""
    config = moe.MoeConfig.qwen3_235b() if config is None else config
    model = moe.Moe(config, True, dtype, P(EVERYWHERE), P("data", "fsdp"))
    tokens = jax.ShapeDtypeStruct((hosts * GPUS, length), jnp.int32)
    params = jax.eval_shape(moe.Moe(config, True, dtype).init, jax.random.key(0), tokens)["params"]

    def loss(params: Any, tokens: jax.Array, targets: jax.Array) -> jax.Array:
        logits, balance = model.apply({"params": params}, tokens)
        return cross_entropy(logits, targets) + moe.BALANCE * balance

    return Workload(
        loss,
        params,
        (tokens, tokens),
        moe.MoeBlock,
        optimizer=optax.adam(1e-4),
        mesh={"data": hosts, "fsdp": GPUS},
        shardings=(by_expert(hosts * GPUS), P(EVERYWHERE), P(EVERYWHERE)),
        name=f"Qwen 3 235B A22B, {hosts * GPUS} GPUs",
    )


def by_expert(devices: int) -> Callable[[str, Any], P]:
    """Partition experts over the GPUs of a host and their last dimension over the hosts; others over all devices."""
    others = dividing(devices)

    def spec(path: str, leaf: Any) -> P:
        if leaf.ndim >= 3 and "mlp" in path and "router" not in path:
            return P(*[None] * (leaf.ndim - 3), "fsdp", None, "data")
        return others(path, leaf)

    return spec
