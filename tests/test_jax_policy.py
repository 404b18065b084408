"""Policies for use by hand (`rj.jax_policy`), and policy objects of JAX, which are errors if they have no effect."""

from __future__ import annotations

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name

import remat_jax as rj
from remat_jax import compat
from remat_jax.cost.count import matmuls
from remat_jax.errors import NoEffectError, PolicyError, UnsupportedError
from tests.small_models import Attention, Linear, make_loss, offloading, to_host

NEW_AND_OLD = compat.remat3() and compat.JAX_VERSION < (0, 12, 0)
served = pytest.mark.skipif(NEW_AND_OLD, reason="refused there, as tested below")


@pytest.mark.versions
@served
@pytest.mark.parametrize(
    ("policy", "expected", "moved"),
    [
        ("full", 46, 0),
        ("dots", 36, 0),
        ("dots_with_no_batch_dims", 40, 0),
        ("offload_dot_with_no_batch_dims", 40, 6),
        ("everything", 36, 0),
        ("save: @primitive:dot_general", 36, 0),
    ],
)
def test_by_hand_it_costs_what_ours_costs(policy: str, expected: int, moved: int) -> None:
    by_hand, params, x = make_loss(nn.remat(Attention, policy=rj.jax_policy(policy)))
    gradient = jax.grad(by_hand, (0, 1))
    assert (matmuls(gradient, params, x), len(to_host(gradient, params, x))) == (expected, moved)


@served
def test_names_that_the_model_gave() -> None:
    def block(w: Any, x: Any) -> Any:
        return jnp.sin(checkpoint_name(jnp.sin(checkpoint_name(x @ w, "a") @ w), "b") @ w)

    w, x = jnp.eye(3), jnp.ones((2, 3))

    def gradient(policy: str) -> Any:
        return jax.value_and_grad(lambda w, x: jnp.sum(jax.checkpoint(block, policy=rj.jax_policy(policy))(w, x)), (0, 1))

    assert [matmuls(gradient(policy), w, x) for policy in ("full", "save: a", "save: a; offload: b")] == [12, 11, 11]
    assert to_host(gradient("save: a; offload: b"), w, x) == [(2, 3)]


@served
def test_equal_policies_are_equal_so_that_caches_hit() -> None:
    assert rj.jax_policy("dots") == rj.jax_policy("save: @dots") != rj.jax_policy("full")
    assert len({rj.jax_policy("dots"), rj.jax_policy("dots_saveable")}) == 1
    assert repr(rj.jax_policy("dots")) == "jax_policy('save: @dots')"
    assert rj.jax_policy(jax.checkpoint_policies.dots_saveable) is jax.checkpoint_policies.dots_saveable


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ("save: *ffn*", r"'\*ffn\*' selects automatic residual names.*rj|remat_jax.remat"),
        ("offload_inputs", "'@inputs' selects automatic"),
        ("save: @dots; offload: a/b", "'a/b' selects automatic"),
        ("off", "policy='off': jax.checkpoint has no policy that turns it off; leave"),
        (None, "policy=None is read differently"),
        ("everythin", "Did you mean 'everything'"),
    ],
)
def test_what_only_our_own_pass_can_serve_is_refused(policy: Any, message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        rj.jax_policy(policy)


@pytest.mark.skipif(compat.JAX_VERSION >= (0, 12, 0), reason="honoured from 0.12 on")
def test_with_remat3_before_0_12_a_policy_by_hand_is_refused(remat3: None) -> None:
    with pytest.raises(UnsupportedError, match=r"jax_remat3=True with JAX.*use JAX 0.12 or later"):
        rj.jax_policy("dots")


@pytest.mark.versions
@pytest.mark.parametrize("policy", ["dots", "offload: *exp*; save: @dots", jax.checkpoint_policies.everything_saveable])
def test_our_own_pass_keeps_what_it_should_under_remat3_too(remat3: None, policy: Any) -> None:
    loss, params, x = make_loss(Attention)
    gradient = jax.grad(rj.checkpoint_blocks(loss, {Attention: policy}), (0, 1))
    assert matmuls(gradient, params, x) == 36
    assert to_host(gradient, params, x) == ([(2, 3, 3)] * 2 if isinstance(policy, str) and "exp" in policy else [])


@pytest.mark.versions
@pytest.mark.parametrize(
    "around", [lambda fn: fn, jax.jit, lambda fn: lambda *args: jax.lax.cond(args[0][0, 0] > 2, fn, fn, *args)]
)
def test_a_policy_object_finds_the_models_names_under_remat3_too(remat3: None, around: Any) -> None:
    def block(w: Any, x: Any) -> Any:
        return jnp.sin(around(lambda w, x: jnp.sin(checkpoint_name(x @ w, "a")))(w, x) @ w)

    def products(policy: Any) -> int:
        gradient = jax.value_and_grad(lambda w, x: jnp.sum(rj.remat(block, policy)(w, x)), (0, 1))
        return matmuls(gradient, jnp.eye(3), jnp.ones((2, 3)))

    named = jax.checkpoint_policies.save_only_these_names("a")
    assert [products(policy) for policy in ("full", named, "save: a")] == [8, 7, 7]


NAMES = jax.checkpoint_policies


class Block(nn.Module):
    """`hidden` and `out` are named; the backward pass does not read the output."""

    @nn.compact
    def __call__(self, x: jax.Array, _: Any = None) -> tuple[jax.Array, None]:
        hidden = checkpoint_name(Linear(32)(x), "hidden")
        return checkpoint_name(x + Linear(8)(jnp.tanh(hidden)), "out"), None


def made(policy: Any = None) -> tuple[Any, Any, jax.Array]:
    """A scan over two blocks, checkpointed by their author under `policy`; plain if it is None."""
    cls = Block if policy is None else nn.remat(Block, policy=policy)
    model = nn.scan(cls, variable_axes={"params": 0}, split_rngs={"params": True}, length=2)(name="blocks")
    x = jnp.ones((4, 8))
    return (
        (lambda params, x: jnp.sum(model.apply(params, x, None)[0] ** 2)),
        jax.eval_shape(model.init, jax.random.key(0), x, None),
        x,
    )


@pytest.mark.parametrize("model_policy", [None, NAMES.save_only_these_names("another")], ids=["plain", "own checkpoints"])
@pytest.mark.parametrize(
    "policy",
    [NAMES.save_only_these_names("hiden", "other"), offloading("hiden"), "save: hiden"],
    ids=["save_only", "offload_only", "text"],
)
def test_names_that_the_model_does_not_give_are_an_error(policy: Any, model_policy: Any) -> None:
    loss, params, x = made(model_policy)
    with pytest.raises(NoEffectError, match=r"Block.*Did you mean '[^']*hidden'"):
        rj.residuals(rj.Workload(loss, params, (x,), Block), policy)
    changed = [rj.checkpoint_blocks(loss, {Block: policy})] + [rj.replan(loss, policy)] * (model_policy is not None)
    for fn in changed:
        with pytest.raises(NoEffectError, match="hidden"):
            jax.eval_shape(jax.grad(fn), params, x)


def test_one_name_that_is_given_is_enough_and_other_policies_are_not_judged() -> None:
    loss, params, x = made()
    policies = {
        "full": "full",
        "one of two": NAMES.save_only_these_names("hidden", "other"),
        "all but": NAMES.save_any_names_but_these("other"),
        "none": NAMES.save_only_these_names(),
    }
    counts = {n: matmuls(jax.grad(rj.checkpoint_blocks(loss, {Block: policy})), params, x) for n, policy in policies.items()}
    assert counts["one of two"] == counts["all but"] == counts["full"] - 2 and counts["none"] == counts["full"]


def of_names(prim: Any, *_: Any, names: tuple[str, ...] = ("hiden", "hidden"), **params: Any) -> bool:
    """A user's own policy of names."""
    return prim.name == "name" and params["name"] in names


class OfNames:
    def __init__(self, *names: str) -> None:
        self.settings = {"names": names}

    def __call__(self, prim: Any, *_: Any, **params: Any) -> bool:
        return prim.name == "name" and params["name"] in self.settings["names"]


@pytest.mark.versions
def test_the_names_of_every_form_of_policy_are_read() -> None:
    closure = offloading("hidden")
    named = [closure, functools.partial(closure), lambda *args, **params: closure(*args, **params)]
    assert [compat.selects(policy).offloaded for policy in named] == [{"hidden"}] * 3
    of_classes = [OfNames("hidden"), NAMES.save_only_these_names("hidden"), rj.jax_policy("save: hidden, @dots")]
    assert [compat.selects(policy).saved for policy in of_classes] == [{"hidden"}] * 3
    assert compat.selects(of_names).saved == {"hiden", "hidden"}
    assert compat.selects(NAMES.everything_saveable).everything and compat.selects(NAMES.save_any_names_but_these("a")).any_name
    assert compat.names_in(NAMES.save_any_names_but_these("a")) >= {"a"}


IDLE = {
    "save_only": NAMES.save_only_these_names("out"),
    "offload": offloading("out"),
    "partial": functools.partial(offloading("out")),
    "closure": OfNames("out").__call__,
    "both": NAMES.save_from_both_policies(NAMES.dots_saveable, NAMES.save_only_these_names("out")),
    "all but": NAMES.save_any_names_but_these("hidden"),
    "one of two lists": NAMES.save_and_offload_only_these_names(
        names_which_can_be_saved=["hidden"],
        names_which_can_be_offloaded=["out"],
        offload_src="device",
        offload_dst="pinned_host",
    ),
    "offload text": "offload: out",
    "save text": "save: out",
}


@pytest.mark.versions
@pytest.mark.parametrize("policy", IDLE.values(), ids=IDLE)
def test_a_policy_that_names_the_output_of_a_block_keeps_nothing(policy: Any) -> None:
    """The next iteration of the scan reads the output as its input, and the block's own backward pass does not read it."""
    loss, params, x = made()
    job = rj.Workload(loss, params, (x,), Block)
    checkpointed = rj.checkpoint_blocks(loss, {Block: policy})
    block = rj.remat(lambda x: checkpoint_name(checkpoint_name(x * 2.0, "hidden") ** 2, "out"), policy)
    calls = (lambda: rj.measure(job, policy), lambda: jax.eval_shape(jax.grad(checkpointed), params, x), lambda: block(x))
    for call in calls:
        with pytest.raises(NoEffectError, match=r"(keeps|offloads) nothing.*Name the input of the block.*offload_inputs"):
            call()


@pytest.mark.parametrize("policy", [NAMES.dots_saveable, NAMES.offload_dot_with_no_batch_dims("device", "pinned_host"), "dots"])
def test_a_policy_of_products_needs_a_product(policy: Any) -> None:
    with pytest.raises(NoEffectError, match="products.* has none, so it keeps nothing|'@dots' matches no residual"):
        rj.remat(lambda x: jnp.sin(jnp.sin(x)), policy)(jnp.ones(3))
    rj.remat(lambda x: jnp.sin(x @ x), policy)(jnp.ones((3, 3)))


def test_a_name_in_a_derivative_rule_counts() -> None:
    @jax.custom_vjp
    def cube(x: jax.Array) -> jax.Array:
        return x**3

    cube.defvjp(lambda x: (x**3, checkpoint_name(jnp.sin(x), "rule")), lambda kept, g: (kept * g,))

    def gradient(name: str) -> Any:
        block = rj.remat(lambda x: cube(x @ x), NAMES.save_only_these_names(name))
        return jax.grad(lambda x: jnp.sum(block(x)))(jnp.ones((4, 4)))

    gradient("rule")
    with pytest.raises(NoEffectError, match="'rule'"):
        gradient("rules")


def test_a_block_of_integers_has_no_names() -> None:
    count = rj.block(lambda weights, x: weights["offset"] + x)
    wrapped = rj.checkpoint_blocks(lambda w, x: count(w, x).sum(), {count: NAMES.save_only_these_names("hidden")})
    with pytest.raises(NoEffectError, match="no checkpoint_name in .* gives 'hidden'.*that are given: none"):
        wrapped({"offset": jnp.arange(4)}, jnp.arange(4))
