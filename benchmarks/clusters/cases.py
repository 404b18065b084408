"""The models at their published sizes, partitioned over hosts of eight GPUs each; shapes only, nothing is allocated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import optax
from jax.sharding import PartitionSpec as P

import remat_jax as rj
from examples import moe_235b
from examples.llama_70b import EVERYWHERE, decoder_job, dividing
from examples.models.llama import LlamaConfig

GPUS_PER_HOST = 8


@dataclass(frozen=True)
class Case:
    """A decoder: `make(hosts)` returns the workload with one sequence per GPU; `hosts` lists the measured numbers of hosts."""

    make: Callable[[int], rj.Workload]
    hosts: tuple[int, ...]


def dense(config: LlamaConfig, name: str) -> Callable[[int], rj.Workload]:
    """Returns `make` of a `Case`: parameters, optimizer state and batch are sharded over all GPUs (FSDP)."""
    return lambda hosts: decoder_job(
        config,
        {"data": hosts, "fsdp": GPUS_PER_HOST},
        dividing(hosts * GPUS_PER_HOST),
        P(EVERYWHERE),
        f"{name}, {hosts * GPUS_PER_HOST} GPUs",
        batch=hosts * GPUS_PER_HOST,
    )


CASES = {
    "8b": Case(dense(LlamaConfig.llama3_8b(), "Llama 3 8B"), (1, 8)),
    "70b": Case(dense(LlamaConfig.llama3_70b(), "Llama 3 70B"), (1, 8, 64)),
    "405b": Case(dense(LlamaConfig.llama3_1_405b(), "Llama 3.1 405B"), (8, 64)),
    "moe": Case(moe_235b.job_on, (8, 64)),
}


def with_state_on_hosts(work: rj.Workload) -> rj.Workload:
    """The same step with the optimizer's state in host memory."""
    options = {name: getattr(work, name) for name in ("trainable", "has_aux", "donate", "mesh", "shardings", "name")}
    return rj.Workload(
        work.loss, work.params, work.batch, work.blocks, optimizer=rj.offload_optimizer(optax.adam(1e-4)), **options
    )


def on_gpus(name: str, hosts: int) -> str:
    """The target with this number of hosts: `on_gpus("h200", 8)` is `8x8xh200`."""
    return f"{GPUS_PER_HOST}x{name}" if hosts == 1 else f"{hosts}x{GPUS_PER_HOST}x{name}"
