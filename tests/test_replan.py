"""`rj.replan`: another policy on a model's existing checkpoints."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

import remat_jax as rj
from remat_jax import compat
from remat_jax.core.rewrite import count_regions
from remat_jax.cost.count import matmuls
from remat_jax.errors import ArgumentError, BlockError, NoEffectError, PolicyError, UnsupportedError
from tests.small_models import Attention, Mlp, assert_same, make_loss, times, to_host

# Matmuls of the gradient of two layers of attention: 12 forward and 24 backward; those that `full` recomputes; with products
# without batch dimensions kept.
PLAIN, FULL, NO_BATCH = 36, 46, 40


def gradient(loss: Callable[..., Any]) -> Callable[..., Any]:
    return jax.grad(loss, (0, 1))


@pytest.mark.parametrize(
    ("made_by", "scanned"), [("nn.remat", False), ("nn.remat", True), ("rj.remat", True), ("rj.remat, tied", False)]
)
def test_counts_copies_and_gradients_are_as_asked(x64: None, made_by: str, scanned: bool) -> None:
    make = {
        "nn.remat": nn.remat,
        "rj.remat": functools.partial(rj.remat, policy="dots"),
        "rj.remat, tied": functools.partial(rj.remat, policy="offload_inputs"),
    }
    loss, params, x = make_loss(make[made_by](Attention), scanned=scanned)
    plain, _, _ = make_loss(Attention, scanned=scanned)
    layers = 1 if scanned else 2
    expected = jax.jit(gradient(plain))(params, x)
    for policy, count, moved in (
        ("full", FULL, []),
        ("dots_with_no_batch_dims", NO_BATCH, []),
        ("save: @dots; offload: *exp*", PLAIN, [(2, 3, 3)]),
        ("everything", PLAIN, []),
        ("off", PLAIN, []),
    ):
        ours = gradient(rj.replan(loss, policy))
        assert matmuls(ours, params, x) == count, policy
        assert to_host(ours, params, x) == moved * layers, policy
        assert (times("optimization_barrier", ours, params, x) > 0) == (bool(moved) and not scanned), policy
        if "exp" in policy:
            assert_same(jax.jit(ours)(params, x), expected)
    assert matmuls(rj.replan(loss, "full"), params, x) == 12


def test_off_takes_the_checkpoints_away() -> None:
    loss, params, x = make_loss(nn.remat(Mlp), scanned=True)
    assert count_regions(jax.make_jaxpr(loss)(params, x)) == 1
    assert count_regions(jax.make_jaxpr(rj.replan(loss, "off"))(params, x)) == 0
    assert count_regions(jax.make_jaxpr(rj.replan(loss, "dots"))(params, x)) == 1


@pytest.mark.parametrize("around", ["none", "jit", "scan", "cond", "vmap", "custom_jvp function", "shard_map"])
def test_regions_are_found_wherever_they_are(x64: None, around: str) -> None:
    def layer(w: Any, x: Any) -> Any:
        return jnp.sin(jnp.exp(x @ w) @ w)

    def build(block: Any) -> Callable[..., Any]:
        mesh = jax.make_mesh((1,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
        spec = jax.sharding.PartitionSpec
        return {
            "none": block,
            "jit": jax.jit(lambda w, x: jax.jit(block)(w, x)),
            "scan": lambda w, x: jax.lax.scan(lambda x, _: (block(w, x), None), x, None, length=3)[0],
            "cond": lambda w, x: jax.lax.cond(x[0, 0] > 0, block, lambda w, x: x @ w, w, x),
            "vmap": lambda w, x: jax.vmap(block, (None, 0))(w, x),
            "custom_jvp function": lambda w, x: jax.nn.relu(block(w, jax.nn.relu(x))),
            "shard_map": jax.shard_map(block, mesh=mesh, in_specs=(spec(), spec("i")), out_specs=spec("i"), check_vma=False),
        }[around]

    w, x = jnp.eye(3) / 2 + 0.1, jnp.ones((2, 3)) / 3
    rounds = 3 if around == "scan" else 1
    loss = lambda w, x: jnp.sum(build(jax.checkpoint(layer))(w, x) ** 2)  # noqa: E731
    plain = lambda w, x: jnp.sum(build(layer)(w, x) ** 2)  # noqa: E731
    assert matmuls(gradient(loss), w, x) - matmuls(gradient(plain), w, x) == 2 * rounds
    for policy, again in (("dots", 0), ("offload: *exp*", 1)):
        ours = gradient(rj.replan(loss, policy))
        assert matmuls(ours, w, x) - matmuls(gradient(plain), w, x) == again * rounds, policy
        assert len(to_host(ours, w, x)) == ("offload" in policy), policy
        if "offload" in policy:
            assert_same(*jax.jit(lambda *args, ours=ours: (ours(*args), gradient(plain)(*args)))(w, x))


def test_inputs_are_what_was_computed_and_not_parameters() -> None:
    layer = jax.checkpoint(lambda w, b, x: jnp.tanh(jnp.sin(x) @ w + b))

    def loss(params: Any, x: Any) -> Any:
        h = x * 2
        h = layer(params["first"].T, params["b"][0], h)
        h, _ = jax.lax.scan(lambda h, w: (layer(w, params["b"][1], h), None), h, params["stack"])
        return jnp.sum(h)

    params = {"first": jnp.eye(3), "b": jnp.ones((2, 3)), "stack": jnp.ones((4, 3, 3))}
    x = jnp.ones((2, 3))
    # One array of a block outside the loop, and one of each round: never a weight, transposed, sliced or scanned.
    assert to_host(jax.grad(rj.replan(loss, "offload_inputs")), params, x) == [(2, 3), (2, 3)]
    with pytest.raises(NoEffectError, match="offloads nothing"):
        # The function's own arguments are no inputs of its first block.
        jax.grad(rj.replan(lambda w, x: jnp.sum(layer(w, x[0], x)), "offload_inputs"))(jnp.eye(3), x)


def test_arguments_outputs_and_inner_regions_are_kept() -> None:
    inner = jax.checkpoint(lambda w, x: jnp.sin(x @ w), policy=jax.checkpoint_policies.dots_saveable)
    outer = jax.checkpoint(lambda w, x: inner(w, jnp.exp(x @ w)))

    def loss(w: Any, x: Any, *, mode: str, ids: Any) -> Any:
        assert mode == "m"
        return jnp.sum(outer(w, x)), {"ids": ids + 1, "none": None}

    w, x, options = jnp.eye(3), jnp.ones((2, 3)), {"mode": "m", "ids": jnp.arange(3)}
    (value, aux), grads = jax.value_and_grad(rj.replan(loss, "dots"), (0, 1), has_aux=True)(w, x, **options)
    (plain_value, plain_aux), plain_grads = jax.value_and_grad(loss, (0, 1), has_aux=True)(w, x, **options)
    assert_same((value, grads), (plain_value, plain_grads), 1e-6)
    assert aux["ids"].tolist() == plain_aux["ids"].tolist() and aux["none"] is None and aux["ids"].dtype == jnp.int32


def test_replanned_twice_the_last_one_holds() -> None:
    loss, params, x = make_loss(nn.remat(Attention))
    assert matmuls(gradient(rj.replan(rj.replan(loss, "everything"), "full")), params, x) == FULL
    assert matmuls(gradient(rj.replan(rj.replan(loss, "offload_inputs"), "dots")), params, x) == PLAIN
    assert matmuls(gradient(rj.replan(jax.jit(loss), "dots")), params, x) == PLAIN
    assert matmuls(gradient(loss), params, x) == FULL


def test_wrong_use() -> None:
    loss, params, x = make_loss(nn.remat(Mlp))
    plain, _, _ = make_loss(Mlp)
    with pytest.raises(BlockError, match=r"it has no jax.checkpoint region to replan.*use checkpoint_blocks"):
        rj.replan(plain, "full")(params, x)
    # In JAX 0.10 the new rematerialisation leaves no region behind; in 0.11.2 and 0.12 it does.
    gone = jax.config.jax_remat3 and compat.JAX_VERSION < (0, 11, 0)
    spent = "no jax.checkpoint region" if gone else "already differentiated.*Give replan the loss function"
    with pytest.raises(BlockError if gone else UnsupportedError, match=spent):
        rj.replan(jax.value_and_grad(loss), "dots")(params, x)
    with pytest.raises(ArgumentError, match="fn=3: expected a function, usually the loss"):
        rj.replan(3, "dots")
    with pytest.raises(PolicyError, match="policy=None is read differently"):
        rj.replan(loss, None)
    with pytest.raises(NoEffectError, match=r"the selector '\*tanhh\*' matches no residual of .*Did you mean '.*tanh#0'"):
        rj.replan(loss, "save: *tanhh*")(params, x)
    assert not compat.in_loop()
