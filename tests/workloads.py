"""Workloads that several test files trace or compile; nothing is allocated."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

import remat_jax as rj
from remat_jax import compat
from tests.small_models import Stack

needs_gpu_compiler = pytest.mark.skipif(not compat.gpu_compiler_installed(), reason="XLA's GPU compiler is not installed")


def struct(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def mean_square(model: nn.Module, x: Any, blocks: Any, **options: Any) -> rj.Workload:
    """The mean square of the model's output."""

    def loss(params: Any, x: Any) -> Any:
        return (model.apply(params, x) ** 2).mean()

    return rj.Workload(loss, jax.eval_shape(model.init, jax.random.key(0), x), (x,), blocks, **options)


class Perceptron(nn.Module):
    """One array is four times as wide as the others."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        width = x.shape[-1]
        return x + nn.Dense(width, name="down")(jnp.tanh(nn.Dense(4 * width, name="up")(x)))


def perceptrons(
    rows: int, width: int = 64, *, layers: int = 6, scanned: bool = False, block: Any = Perceptron, **options: Any
) -> rj.Workload:
    """`layers` perceptrons on `rows` rows; `block` may be a checkpointed `Perceptron`."""
    return mean_square(Stack(block, layers, scanned), struct(rows, width), Perceptron, **options)
