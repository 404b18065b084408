"""Workloads that several test files of planning describe."""

from __future__ import annotations

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

import remat_jax as rj
from examples.models import linen
from remat_jax.cost.count import flops
from remat_jax.hardware.rates import Rates
from tests.small_models import in_a_scan

RATES = Rates({"tensorfloat32": 1e9, "float32": 1e8}, 1e8, 1e6, 2e6, 0.5)
WIDTH, ROWS = 8, 4


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        return x + nn.Dense(WIDTH, use_bias=False, name="down")(jnp.sin(nn.Dense(4 * WIDTH, use_bias=False, name="up")(x)))


class Model(nn.Module):
    layers: int = 3
    scan: bool = False

    @nn.compact
    def __call__(self, x: Any) -> Any:
        x = nn.Dense(WIDTH, name="first")(x)
        if self.scan:
            return in_a_scan(Layer(name="layers"), x, self.layers)
        for index in range(self.layers):
            x = Layer(name=f"layers_{index}")(x)
        return x


@functools.cache
def parameters(model: nn.Module, x: jax.ShapeDtypeStruct) -> Any:
    """The shapes of a model's parameters."""
    return jax.eval_shape(model.init, jax.random.key(0), x)


def workload(model: nn.Module, block: Any, **options: Any) -> rj.Workload:
    """The sum of squares of a model of `ROWS` × `WIDTH` as a workload."""
    x = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)
    return rj.Workload(lambda p, x: (model.apply(p, x) ** 2).sum(), parameters(model, x), (x,), block, **options)


def mlp(*, scan: bool = False, **options: Any) -> rj.Workload:
    return workload(Model(scan=scan), Layer, **options)


def decoder(*, scan: bool, layers: int = 2) -> rj.Workload:
    model = linen.ByteDecoder(d_model=32, nhead=2, num_layers=layers, max_len=16, scan=scan, param_dtype=jnp.bfloat16)
    tokens = jax.ShapeDtypeStruct((2, 16), jnp.int32)
    params = parameters(model, tokens)["params"]

    def loss(params: Any, *batch: Any) -> Any:
        return model.apply({"params": params}, *batch, method="loss")

    return rj.Workload(loss, params, (tokens, tokens), linen.DecoderLayer)


def step_flops(job: rj.Workload, policy: Any) -> int:
    step = job.step(policy)
    return flops(step.function, *step.arguments)
