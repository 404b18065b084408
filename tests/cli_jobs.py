"""Workloads for tests of the command line, which loads this file as a user's own."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import optax
from jax.sharding import PartitionSpec as P

import remat_jax as rj
from tests import plan_models
from tests.workloads import mean_square, struct


class Block(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        return x + nn.Dense(8, name="down")(nn.gelu(nn.Dense(32, name="up")(x)))


class Constrained(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        return Block()(jax.lax.with_sharding_constraint(x, P("fsdp")))


def job(model: Any = None, layers: int = 2, rows: int = 64, name: str = "two blocks", **options: Any) -> rj.Workload:
    model = model or nn.Sequential([Block() for _ in range(layers)])
    return mean_square(model, struct(rows, 8), Block, optimizer=optax.sgd(0.1), name=name, **options)


def by_batch() -> rj.Workload:
    return job(mesh="batch=2", shardings=(P(), P("batch")))


def constrained() -> rj.Workload:
    return mean_square(nn.Sequential([Constrained() for _ in range(4)]), struct(64, 8), Constrained)


def unchecked() -> rj.Workload:
    return job(nn.remat_scan(Block, lengths=(3,))())


def planned() -> rj.Workload:
    return plan_models.job(scanned=True)


def planned_unrolled() -> rj.Workload:
    return plan_models.job()


def step() -> rj.Workload:
    return rj.Workload.from_step(lambda x: x, 1.0, blocks="layers")
