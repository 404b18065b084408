"""A model's own checkpoint that is wider than the block: a view of a parameter before the block is not kept beside it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

import remat_jax as rj

LAYERS = 4


@rj.block
def perceptron(weights: Any, x: jax.Array) -> jax.Array:
    return x + jnp.tanh(x @ weights["up"]) @ weights["down"]


def named(array: jax.Array) -> jax.Array:
    return checkpoint_name(array, "parameters")


@pytest.mark.parametrize(("prepare", "region"), [(named, lambda f: f), (lambda w: named(named(w).T), jax.checkpoint)])
def test_parameters_that_are_named_or_viewed_before_the_block_are_not_kept_again(prepare: Any, region: Any, x64: None) -> None:
    """haliax names each layer's parameters inside its own checkpoint, which is wider than the block."""

    def loss(weights: Any, x: jax.Array) -> jax.Array:
        def layer(x: jax.Array, weights: Any) -> tuple[jax.Array, None]:
            return perceptron(jax.tree.map(prepare, weights), checkpoint_name(x, "x")), None

        return jnp.sum(jax.lax.scan(region(layer), x, weights)[0] ** 2)

    up, down = jnp.ones((LAYERS, 8, 32)) / 9, jnp.linspace(0, 1, LAYERS * 256).reshape(LAYERS, 32, 8)
    weights = {"up": up, "down": down} if prepare is named else {"up": up.mT, "down": down.mT}
    x = jnp.linspace(0, 1, 16).reshape(2, 8)
    kept = rj.residuals(rj.Workload(loss, weights, (x,), perceptron), "full").device_bytes
    assert kept <= (LAYERS + 1) * x.nbytes, "the layers' inputs and the output"
    for policy in ("full", "1 x full | 3 x dots"):
        gradients = jax.grad(rj.checkpoint_blocks(loss, {perceptron: policy}))(weights, x)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12), gradients, jax.grad(loss)(weights, x))


def test_where_a_scan_is_cut_parameters_that_are_named_before_the_block_are_not_copied() -> None:
    def device_bytes(prepare: Any) -> int:
        def loss(weights: Any, x: jax.Array) -> jax.Array:
            def layer(x: jax.Array, weights: Any) -> tuple[jax.Array, None]:
                return perceptron(jax.tree.map(prepare, weights), x), None

            return jnp.sum(jax.lax.scan(layer, x, weights)[0] ** 2)

        return rj.measure(rj.Workload(loss, weights, (x,), perceptron), "2 x full | 2 x dots", "cpu").device_bytes

    weights = {"up": jnp.ones((LAYERS, 64, 256)), "down": jnp.ones((LAYERS, 256, 64))}
    x = jnp.ones((2, 64))
    assert device_bytes(named) == device_bytes(lambda array: array)
