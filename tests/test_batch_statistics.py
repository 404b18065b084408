"""Blocks under a named `vmap` that return one statistic for the whole batch (`out_axes=None`)."""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import remat_jax as rj

WIDTH, LAYERS, ROWS = 8, 3, 4


@rj.block
def centred(weights, x):
    y = x @ weights
    mean = jax.lax.pmean(y, "batch")
    return jnp.tanh(y - mean), mean


def function_loss(layers, x):
    def run_row(x):
        means = []
        for weights in layers:
            x, mean = centred(weights, x)
            means.append(mean)
        return x, means

    y, means = jax.vmap(run_row, axis_name="batch", out_axes=(0, None))(x)
    return (y**2).mean() + sum((mean**3).sum() for mean in means)


class Normed(eqx.Module):
    linear: eqx.nn.Linear
    norm: eqx.nn.BatchNorm

    def __init__(self, key):
        self.linear = eqx.nn.Linear(WIDTH, WIDTH, key=key)
        self.norm = eqx.nn.BatchNorm(WIDTH, axis_name="batch", mode="batch", dtype=jnp.float64)

    def __call__(self, x, state):
        y, state = self.norm(self.linear(x), state)
        return jnp.tanh(y) + x, state


class Model(eqx.Module):
    layers: list

    def __init__(self, key):
        self.layers = [Normed(layer_key) for layer_key in jax.random.split(key, LAYERS)]

    def __call__(self, x, state):
        for layer in self.layers:
            x, state = layer(x, state)
        return x, state


def model_loss(model, x, state):
    y, state = jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(x, state)
    return (y**2).mean(), state


def case(kind):
    keys, x = jax.random.split(jax.random.key(0), LAYERS), jax.random.normal(jax.random.key(1), (ROWS, WIDTH))
    if kind == "function":
        layers = [jax.random.normal(key, (WIDTH, WIDTH)) for key in keys]
        return function_loss, layers, (x,), centred, False
    model, state = eqx.nn.make_with_state(Model)(keys[0])
    return model_loss, model, (x, state), Normed, True


@pytest.mark.parametrize(
    ("kind", "policy"),
    [
        ("function", "full"),
        ("function", "offload_dot_with_no_batch_dims"),
        ("function", "1 x full | 2 x offload_inputs"),
        ("equinox", "dots"),
        ("equinox", "1 x full | 2 x offload_inputs"),
    ],
)
def test_gradients_with_a_statistic_of_the_batch(kind, policy, x64):
    loss, params, batch, block, has_aux = case(kind)
    changed = rj.checkpoint_blocks(loss, {block: policy})
    both = eqx.filter_jit(lambda *args: [eqx.filter_value_and_grad(fn, has_aux=has_aux)(*args) for fn in (loss, changed)])
    wanted, results = both(params, *batch)
    pairs = list(zip(jax.tree.leaves(wanted), jax.tree.leaves(results), strict=True))
    assert any(wanted_leaf.dtype == jnp.float64 for wanted_leaf, _ in pairs)
    for wanted_leaf, leaf in pairs:
        np.testing.assert_allclose(np.asarray(leaf), np.asarray(wanted_leaf), rtol=1e-12, atol=1e-14)


def test_what_is_offloaded_inside_the_batch_is_offloaded():
    loss, params, batch, block, _ = case("function")
    report = rj.residuals(rj.Workload(loss, params, batch, block), "offload_dot_with_no_batch_dims")
    gradient = jax.grad(rj.checkpoint_blocks(loss, {block: "offload_dot_with_no_batch_dims"}))
    program = str(jax.make_jaxpr(gradient)(params, *batch))
    assert report.host_bytes == LAYERS * ROWS * WIDTH * 4
    assert "<host>" in program
