"""`checkpoint_blocks` with policies by layer: the results do not change, and each layer has its own policy."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import remat_jax as rj
from remat_jax.cost.count import matmuls
from remat_jax.errors import BlockError
from tests.small_models import (
    Attention,
    Both,
    First,
    Mlp,
    NnxCounted,
    Second,
    Stack,
    assert_bit_equal,
    assert_same,
    block_by_hand,
    equations,
    make_loss,
    times,
    values,
)

MIXED = "1 x full | 1 x everything | 2 x save: *tanh*"
GROUPED = "1 x dots | 3 x off in groups of 2"


def lengths(fn: Any, *args: Any) -> list[int]:
    """The rounds of every scan of `fn`, in the order of the program."""
    return [eqn.params["length"] for eqn, _ in equations(fn, *args) if eqn.primitive.name == "scan"]


def test_unrolled_gradients_are_bit_equal_run_op_by_op() -> None:
    loss, params, x = make_loss(layers=4)
    expected = jax.grad(loss)(params, x)
    for policies in (MIXED, "1 x off | 1 x offload_inputs | 2 x dots", "2 x offload_inputs | 2 x full in groups of 2"):
        assert_bit_equal(jax.grad(rj.checkpoint_blocks(loss, {Mlp: policies}))(params, x), expected)


@pytest.mark.versions
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("scanned", [False, True])
def test_gradients_in_every_mode(scanned: bool) -> None:
    loss, params, x = make_loss(layers=4, scanned=scanned)
    along, batch = jax.tree.map(jnp.ones_like, (params, x)), jnp.stack([x, x / 2])
    several = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf / 2]), params)

    @functools.partial(jax.jit, static_argnums=0)
    def modes(fn: Any, params: Any, x: Any) -> Any:
        def of_input(params: Any) -> Any:
            return jnp.sum(jnp.sin(jax.grad(fn, argnums=1)(params, x)))

        first = jax.value_and_grad(jax.jit(fn), argnums=(0, 1))(params, x), jax.jvp(jax.grad(fn), (params, x), along)[1]
        if not scanned:
            return first
        return (
            *first,
            jax.vmap(jax.grad(fn), in_axes=(None, 0))(params, batch),
            jax.vmap(jax.grad(fn), in_axes=(0, None))(several, x),
            jax.grad(of_input)(params),
        )

    expected = modes(loss, params, x)
    for policies in (MIXED, GROUPED):
        results = modes(rj.checkpoint_blocks(loss, {Mlp: policies}), params, x)
        for got, wanted in zip(results, expected, strict=True):
            assert_same(got, wanted)


@pytest.mark.parametrize("scanned", [False, True])
def test_each_layer_computes_again_what_its_policy_says(scanned: bool) -> None:
    loss, params, x = make_loss(Attention, layers=5, scanned=scanned)

    def run(policy: str) -> int:
        return matmuls(jax.grad(rj.checkpoint_blocks(loss, {Attention: policy})), params, x)

    full, dots = run("full"), run("dots")
    assert full - dots == 5 * 5, "the five products of each of five layers that backward reads"
    assert [run(f"{n} x full | {5 - n} x dots") - dots for n in (1, 4)] == [5, 20]
    assert run("1 x dots | 2 x full | 2 x dots") - dots == 10


@pytest.mark.parametrize(("scanned", "policy"), [(False, "dots"), (True, "full")])
def test_one_run_is_the_same_program_as_one_policy(scanned: bool, policy: str) -> None:
    loss, params, x = make_loss(layers=3, scanned=scanned)
    by_block, by_layer = (rj.checkpoint_blocks(loss, {Mlp: text}) for text in (policy, f"3 x {policy}"))
    assert str(jax.make_jaxpr(jax.grad(by_block))(params, x)) == str(jax.make_jaxpr(jax.grad(by_layer))(params, x))


def test_parameters_are_made_as_without_policies() -> None:
    model, x = Stack(Mlp, 3, scanned=True), values(2, 4)
    init = rj.checkpoint_blocks(model.init, {Mlp: "1 x full | 2 x dots"})
    assert_bit_equal(*(jax.jit(function)(jax.random.key(0), x) for function in (init, model.init)))


def test_a_scan_is_cut_between_layers_under_one_policy() -> None:
    loss, params, x = make_loss(layers=4, scanned=True)
    assert lengths(rj.checkpoint_blocks(loss, {Mlp: "2 x full || 1 x full || 1 x full"}), params, x) == [2, 1, 1]
    rows = rj.residuals(rj.Workload(loss, params, (x,), Mlp), rj.LayerPolicies.parse("2 x full || 2 x full")).rows
    assert {row.layers for row in rows if row.action == "save" and "#" in row.name} == {(0, 2), (2, 4)}


@pytest.mark.parametrize("reverse", [False, True])
def test_the_first_layer_in_forward_order_is_the_last_row_of_a_scan_that_runs_backwards(reverse: bool) -> None:
    def loss(kernels: Any, x: Any) -> Any:
        return jax.lax.scan(lambda x, kernel: (block_by_hand(kernel, x), None), x, kernels, reverse=reverse)[0].sum()

    args = values(5, 4, 3), values(2, 4, seed=1)
    fn = rj.checkpoint_blocks(loss, {Mlp: "2 x full | 3 x everything"})
    assert lengths(fn, *args) == [2, 3]
    first = [eqn for eqn, _ in equations(fn, *args) if eqn.primitive.name == "slice" and eqn.outvars[0].aval.shape == (2, 4, 3)]
    assert [eqn.params["start_indices"][0] for eqn in first] == [3 if reverse else 0]


@pytest.mark.usefixtures("x64")
def test_several_blocks_in_a_round_are_counted_one_by_one() -> None:
    def loss(kernels: Any, x: Any) -> Any:
        def body(x: Any, row: Any) -> Any:
            return block_by_hand(row[1], Attention().apply(row[2], block_by_hand(row[0], x))), None

        return jnp.sum(jnp.sin(jax.lax.scan(body, x, kernels)[0]))

    x = values(2, 3, 4)
    inner = jax.tree.map(lambda leaf: values(4, *leaf.shape), jax.eval_shape(Attention().init, jax.random.key(0), x))
    args = (values(4, 4, 3), values(4, 4, 3, seed=1), inner), x
    full = rj.checkpoint_blocks(loss, {Mlp: "full", Attention: "full"})
    # Two calls of Mlp per round: one scan for rounds 0 and 1, one for round 2, one for round 3.
    fn = rj.checkpoint_blocks(loss, {Mlp: "5 x full | 3 x dots", Attention: "3 x full | 1 x dots"})
    assert lengths(fn, *args) == [2, 1, 1]
    assert matmuls(jax.grad(full), *args) - matmuls(jax.grad(fn), *args) == 3 * 1 + 5
    assert_same(jax.jit(jax.grad(fn))(*args), jax.jit(jax.grad(loss))(*args))


@pytest.mark.usefixtures("x64")
def test_one_policy_for_blocks_around_those_with_policies_by_layer() -> None:
    loss, params, x = make_loss(Both, layers=3, scanned=True)
    fn = rj.checkpoint_blocks(loss, {Both: "full", First: "2 x full | 1 x dots", Second: "1 x dots | 2 x full"})
    assert_same(jax.jit(jax.grad(fn))(params, x), jax.jit(jax.grad(loss))(params, x))
    assert lengths(fn, params, x) == [1, 1, 1]

    def products(policy: str) -> int:
        return matmuls(jax.grad(rj.checkpoint_blocks(loss, {Both: "full", First: policy, Second: policy})), params, x)

    # The outer checkpoint recomputes everything; in the second forward pass the inner ones keep their residuals.
    assert [products("full") - products(policy) for policy in ("dots", "2 x full | 1 x dots")] == [3, 1]


def test_a_jit_that_was_traced_before_has_each_layer_under_its_own_policy() -> None:
    layer = jax.jit(block_by_hand)

    def loss(kernel: Any, x: Any) -> Any:
        for _ in range(4):
            x = layer(kernel, x)
        return jnp.sum(jnp.sin(x))

    args = values(4, 3), values(2, 4, seed=1)
    expected = jax.jit(jax.grad(loss))(*args)
    policies = ("4 x full", "3 x full | 1 x dots", "1 x full | 3 x dots")
    gradients = [jax.grad(rj.checkpoint_blocks(loss, {Mlp: text})) for text in policies]
    counts = [matmuls(gradient, *args) for gradient in gradients]
    assert [counts[0] - count for count in counts] == [0, 1, 3]
    assert_same(jax.jit(gradients[1])(*args), expected, 1e-6)
    assert times("custom_jvp_call", loss, *args) == 0, "nothing is left behind"


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("scanned", [False, True])
def test_each_call_counts_where_a_model_runs_twice(scanned: bool) -> None:
    loss, params, x = make_loss(layers=2, scanned=scanned)

    def twice(params: Any, x: Any) -> Any:
        return loss(params, x) + loss(params, 2 * x)

    full, fn = (jax.grad(rj.checkpoint_blocks(twice, {Mlp: policy})) for policy in ("full", "3 x full | 1 x dots"))
    assert matmuls(full, params, x) - matmuls(fn, params, x) == 1
    if scanned:
        assert_same(jax.jit(fn)(params, x), jax.jit(jax.grad(twice))(params, x))
    with pytest.raises(BlockError, match="has policies for 2 layers, but the block is called 4 times"):
        rj.checkpoint_blocks(twice, {Mlp: "1 x full | 1 x dots"})(params, x)


@pytest.mark.usefixtures("x64")
def test_blocks_under_vmap_branches_and_checkpoints_inside_the_function() -> None:
    def loss(kernel: Any, x: Any) -> Any:
        x = jax.vmap(block_by_hand, in_axes=(None, 0))(kernel, x)
        x = jax.lax.cond(x[0, 0, 0] > 9, lambda x: x, functools.partial(block_by_hand, kernel), x)
        return jnp.sum(jnp.sin(jax.checkpoint(functools.partial(block_by_hand, kernel))(x)))

    args = values(4, 3), values(5, 2, 4, seed=1)
    fn = rj.checkpoint_blocks(loss, {Mlp: "1 x dots | 2 x full"})
    assert_same(*(jax.jit(jax.grad(function, argnums=(0, 1)))(*args) for function in (fn, loss)))
    alternating = rj.checkpoint_blocks(loss, {Mlp: "1 x full | 1 x dots | 1 x full"})
    full = rj.checkpoint_blocks(loss, {Mlp: "full"})
    counts = [matmuls(jax.grad(function), *args) for function in (full, fn, alternating)]
    assert [counts[0] - count for count in counts] == [0, 1, 1]


def run_scanned(layers: NnxCounted, x: Any) -> Any:
    out = nnx.scan(lambda x, layer: layer(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, layers)
    return jnp.sum(jnp.sin(out))


@pytest.mark.usefixtures("x64")
def test_scanned_nnx_layers_with_state_that_every_call_writes() -> None:
    def make() -> NnxCounted:
        return nnx.vmap(NnxCounted)(nnx.Rngs(0).split(4))

    plain, x = make(), values(3, 4)
    gradient, calls = nnx.grad(run_scanned)(plain, x), nnx.state(plain, nnx.BatchStat)
    assert all(np.all(leaf == 1) for leaf in jax.tree.leaves(calls))
    for policy in ("3 x full | 1 x dots", "4 x full in groups of 2"):
        layers = make()
        assert_same(nnx.grad(rj.checkpoint_blocks(run_scanned, {NnxCounted: policy}))(layers, x), gradient)
        assert_bit_equal(nnx.state(layers, nnx.BatchStat), calls)
    job = rj.Workload.from_nnx(plain, run_scanned, (x,), NnxCounted)

    def products(policy: str) -> int:
        loss, params, rest = job.split_loss(policy)
        return matmuls(jax.grad(loss), params, rest, *job.batch)

    assert products("full") - products("3 x full | 1 x dots") == 1
