"""Policies by layer on blocks in unusual places: calls in calls, scans in scans, under axes, behind a `jit`."""

from __future__ import annotations

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import remat_jax as rj
from remat_jax.cost.count import matmuls
from remat_jax.errors import BlockError, UnsupportedError
from tests.small_models import (
    Attention,
    Linear,
    Mlp,
    NnxCounted,
    Stack,
    assert_same,
    block_by_hand,
    equations,
    make_loss,
    values,
)
from tests.test_checkpoint_layers import lengths


class Outer(nn.Module):
    """A block around a block."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        return Mlp()(jnp.sin(Linear(4)(x)))


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("scanned", [False, True])
def test_a_call_inside_sets_blocks_that_stand_in_the_blocks_of_the_call_around(scanned: bool) -> None:
    loss, params, x = make_loss(Outer, layers=3, scanned=scanned)
    for inner, outer in (("2 x full | 1 x dots", "1 x full | 2 x dots"), ("full", "2 x full | 1 x dots"), ("3 x dots", "full")):
        nested = rj.checkpoint_blocks(rj.checkpoint_blocks(loss, {Mlp: inner}), {Outer: outer})
        together = rj.checkpoint_blocks(loss, {Mlp: inner, Outer: outer})
        assert matmuls(jax.grad(nested), params, x) == matmuls(jax.grad(together), params, x)
        if "|" in inner:
            assert_same(jax.jit(jax.grad(nested))(params, x), jax.jit(jax.grad(loss))(params, x))


def nested(kernels: Any, x: Any) -> Any:
    """Three rounds of two layers, with a row for each round and another for each layer."""

    def pair(x: Any, rows: Any) -> Any:
        def layer(x: Any, kernel: Any) -> Any:
            return block_by_hand(kernel, x), x.sum()

        return jax.lax.scan(layer, x, rows)

    x, sums = jax.lax.scan(pair, x, kernels)
    return jnp.sum(jnp.sin(x)) + jnp.sum(sums * jnp.arange(6.0).reshape(3, 2))


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    ("policies", "rounds", "kept"),
    [
        ("6 x full", [3, 2], 0),
        ("2 x full | 4 x dots", [1, 2, 2, 2], 4),
        ("3 x full | 3 x dots", [1, 2, 1, 1, 1, 1, 2], 3),
        ("1 x full | 1 x dots | 1 x full | 1 x dots | 1 x full | 1 x dots", [3, 1, 1], 3),
        ("1 x off | 5 x offload_inputs", [1, 1, 1, 2, 2], 1),
    ],
)
def test_scans_in_scans_are_cut_where_policies_change(policies: str, rounds: list[int], kept: int) -> None:
    args = values(3, 2, 4, 3), values(2, 4, seed=1)
    fn, full = (rj.checkpoint_blocks(nested, {Mlp: text}) for text in (policies, "full"))
    assert lengths(fn, *args) == rounds
    assert matmuls(jax.grad(full), *args) - matmuls(jax.grad(fn), *args) == kept
    if len(rounds) > 4:
        # The rounds of the outer scan differ.
        assert_same(*(jax.jit(jax.grad(function, argnums=(0, 1)))(*args) for function in (fn, nested)))


def test_the_layers_of_a_residual_in_nested_scans_are_those_of_all_rounds() -> None:
    args = values(3, 2, 4, 3), values(2, 4, seed=1)
    job = rj.Workload(lambda kernels, x: nested(kernels, x), args[0], args[1:], blocks=Mlp)
    saved = {
        row.layers for row in rj.residuals(job, "2 x full | 4 x save: *tanh*") if "tanh" in row.name and row.action == "save"
    }
    assert saved == {(2, 6)}


@pytest.mark.usefixtures("x64")
def test_a_scan_of_no_rounds_has_no_layers() -> None:
    def layer(x: Any, kernel: Any) -> Any:
        return block_by_hand(kernel, x), x

    def loss(kernels: Any, empty: Any, x: Any) -> Any:
        x, _ = jax.lax.scan(layer, x, empty)
        x, _ = jax.lax.scan(layer, x, kernels)
        no_rounds = jnp.broadcast_to(kernels, (0, *kernels.shape))
        x, none = jax.lax.scan(lambda x, kernels: jax.lax.scan(layer, x, kernels), x, no_rounds)
        return jnp.sum(jnp.sin(x)) + jnp.sum(none)

    args = values(3, 4, 3), values(0, 4, 3), values(2, 4, seed=1)
    fn = rj.checkpoint_blocks(loss, {Mlp: "2 x full | 1 x dots"})
    assert_same(*(jax.jit(jax.grad(function, argnums=(0, 1, 2)))(*args) for function in (fn, loss)))
    with pytest.raises(BlockError, match="the block is called 0 times"):
        rj.checkpoint_blocks(lambda x: jax.lax.scan(layer, x, args[1])[0], {Mlp: "1 x full"})(args[2])


class Centred(nn.Module):
    """A block with a collective over the examples of its batch."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        y = Linear(4)(x)
        return x + jnp.tanh(y - jax.lax.pmean(y, "batch"))


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    ("policies", "scanned"), [("full", True), ("1 x full | 2 x dots", True), ("2 x off | 1 x offload_inputs", False)]
)
def test_collectives_over_the_axis_of_a_vmap_around_a_scan(policies: str, scanned: bool) -> None:
    model, x = Stack(Centred, 3, scanned), values(5, 2, 4)
    params = jax.vmap(model.init, (None, 0), None, axis_name="batch")(jax.random.key(0), x)

    def loss(params: Any, x: Any) -> Any:
        return jnp.sum(jnp.sin(jax.vmap(model.apply, (None, 0), axis_name="batch")(params, x)))

    fn = rj.checkpoint_blocks(loss, {Centred: policies})
    expected = jax.jit(jax.grad(loss))(params, x)
    assert_same(jax.jit(jax.grad(fn))(params, x), expected)
    # If it is differentiated after tracing, the axis is no longer bound.
    assert_same(jax.grad(jax.jit(fn))(params, x), expected)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("wrapped", ["call", "nested", "sharded"])
def test_stacked_parameters_behind_a_jit_are_read_in_place(wrapped: str) -> None:
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    layer = jax.jit(Mlp().apply, out_shardings=here if wrapped == "sharded" else None)
    again = jax.jit(lambda params, x: layer(params, x)) if wrapped == "nested" else layer

    def loss(params: Any, x: Any) -> Any:
        return jnp.sum(jnp.sin(jax.lax.scan(lambda x, params: (again(params, x), None), x, params)[0]))

    x = values(2, 4, seed=1)
    shapes = jax.eval_shape(Mlp().init, jax.random.key(0), x)
    args = jax.tree.map(lambda leaf: values(4, *leaf.shape), shapes), x
    fn = rj.checkpoint_blocks(loss, {Mlp: "3 x full | 1 x dots"})
    assert_same(*(jax.jit(jax.grad(function))(*args) for function in (fn, loss)))
    reads = sum(eqn.primitive.name == "read_row" for eqn, _ in equations(jax.grad(fn), *args))
    assert (reads > 0) == (wrapped != "sharded"), "what a jit asks for of its own is kept"


@pytest.mark.usefixtures("x64")
def test_a_cond_whose_branches_call_different_blocks() -> None:
    attention, x = Attention(), values(2, 3, 4, seed=1)
    variables = jax.tree.map(lambda leaf: values(*leaf.shape), jax.eval_shape(attention.init, jax.random.key(0), x))

    def loss(kernels: Any, variables: Any, x: Any, turn: Any) -> Any:
        def layer(x: Any, row: Any) -> Any:
            branches = functools.partial(block_by_hand, row[0]), functools.partial(attention.apply, variables)
            return jax.lax.cond(row[1] % 2 == turn, *branches, x), None

        return jnp.sum(jnp.sin(jax.lax.scan(layer, x, (kernels, jnp.arange(4)))[0]))

    fn = rj.checkpoint_blocks(loss, {Mlp: "3 x full | 1 x dots", Attention: "1 x dots | 3 x full"})
    gradients = [jax.jit(jax.grad(function, argnums=(0, 1, 2))) for function in (fn, loss)]
    for turn in (0, 1):
        assert_same(*(gradient(values(4, 4, 3), variables, x, turn) for gradient in gradients))


def test_an_nnx_model_that_is_closed_over_and_written_to_is_refused_with_the_remedy() -> None:
    (model, plain), x = (NnxCounted(nnx.Rngs(0)) for _ in range(2)), values(2, 4)
    with pytest.raises(UnsupportedError, match=r"that it closes over, .* pass it in the call"):
        rj.checkpoint_blocks(lambda x: model(model(x)).sum(), {NnxCounted: "1 x full | 1 x dots"})(x)
    as_argument = rj.checkpoint_blocks(lambda model, x: model(model(x)).sum(), {NnxCounted: "1 x full | 1 x dots"})
    np.testing.assert_allclose(as_argument(model, x), plain(plain(x)).sum(), rtol=1e-5)
    assert model.calls[...] == 2
