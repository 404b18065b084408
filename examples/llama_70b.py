"""Llama 3 of 70 billion parameters over eight hosts with eight H200 each: what does one device need?

    remat-jax measure examples/llama_70b.py:job --target 8x8xh200 --policy full
    remat-jax plan    examples/llama_70b.py:job --target 8x8xh200 --budget 100GiB
    remat-jax measure examples/llama_70b.py:job --target 4x8xh200 --mesh data=4,fsdp=8
    remat-jax measure examples/llama_70b.py:job --target v5p-128 --policy full          64 TPUs in place of the GPUs
    remat-jax plan    examples/llama_70b.py:job --target v5p-128 --budget 80% --timeout 900

`job` partitions parameters, optimizer state and batch over all 64 GPUs (FSDP). `tensor_job` partitions the batch over the
hosts, and the heads and the feed-forward's hidden layer over the GPUs of a host (tensor parallelism). Nothing is allocated.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P

from remat_jax import Workload

from .models import llama
from .models.functions import cross_entropy

BATCH, LENGTH = 64, 4096
EVERYWHERE = ("data", "fsdp")


def job() -> Workload:
    """Return the workload: 64 sequences of 4096 tokens, Adam, bfloat16, all partitioned over 64 GPUs.

    >>> sum(leaf.size for leaf in jax.tree.leaves(job().params)) // 10**9
    70
    """
    mesh = {"data": 8, "fsdp": 8}
    return decoder_job(llama.LlamaConfig.llama3_70b(), mesh, dividing(64), P(EVERYWHERE), "Llama 3 70B, FSDP")


def tensor_job() -> Workload:
    """Return the same workload on a mesh of 8 × 8, with the layers' matrices partitioned by heads and hidden features.

    >>> tensor_job().mesh.axis_names
    ('fsdp', 'tensor')
    """
    config = llama.LlamaConfig.llama3_70b()
    return decoder_job(config, {"fsdp": 8, "tensor": 8}, by_features, P("fsdp"), "Llama 3 70B, tensor parallel")


def decoder_job(
    config: llama.LlamaConfig,
    mesh: dict[str, int],
    of_params: Callable[[str, Any], P],
    of_batch: P,
    name: str,
    batch: int = BATCH,
) -> Workload:
    """Return a training step of a decoder with Adam in bfloat16: `batch` sequences of 4096 tokens, layers scanned."""
    model = llama.Llama(config, scan=True, param_dtype=jnp.bfloat16, activations=of_batch)
    tokens = jax.ShapeDtypeStruct((batch, LENGTH), jnp.int32)
    alone = llama.Llama(config, scan=True, param_dtype=jnp.bfloat16)
    params = jax.eval_shape(alone.init, jax.random.key(0), tokens)["params"]

    def loss(params: Any, tokens: jax.Array, targets: jax.Array) -> jax.Array:
        return cross_entropy(model.apply({"params": params}, tokens), targets)

    return Workload(
        loss,
        params,
        (tokens, tokens),
        llama.LlamaBlock,
        optimizer=optax.adam(1e-4),
        mesh=mesh,
        shardings=(of_params, of_batch, of_batch),
        name=name,
    )


def dividing(devices: int) -> Callable[[str, Any], P]:
    """Partition every parameter over `devices`: a matrix along its contracted dimension, other arrays along their last.

    If `devices` does not divide this dimension, the last dimension that it divides is partitioned. A matrix partitioned
    along its output dimension would be gathered in another order than its memory order. XLA would copy the whole stack
    into that order, and keep both copies until the step ends.

    >>> head = jax.ShapeDtypeStruct((8192, 128256), jnp.bfloat16)
    >>> [tuple(dividing(devices)(name, head)) for devices, name in [(64, "lm_head/kernel"), (64, "embed"), (512, "embed")]]
    [(('data', 'fsdp'), None), (None, ('data', 'fsdp')), (('data', 'fsdp'), None)]
    """

    def spec(path: str, leaf: Any) -> P:
        axes = [axis for axis, size in enumerate(leaf.shape) if size % devices == 0]
        summed = leaf.ndim - 2
        chosen = summed if path.endswith("kernel") and summed in axes else axes[-1] if axes else None
        return P(*(EVERYWHERE if axis == chosen else None for axis in range(leaf.ndim))) if axes else P()

    return spec


def by_features(path: str, leaf: Any) -> P:
    """Partition a projection's output or contracted dimension over `tensor`, and the other dimension over `fsdp`."""
    if len(leaf.shape) < 2 or "norm" in path:
        return P()
    sums = any(name in path for name in ("o_proj", "down_proj", "embed"))
    return P(*[None] * (len(leaf.shape) - 2), *(("tensor", "fsdp") if sums else ("fsdp", "tensor")))
