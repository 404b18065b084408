"""JAX's policies of names are an error if the model gives none of the names, like a text's selector."""

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
from remat_jax.errors import NoEffectError
from tests.test_own_checkpoints import MODELS

NAMES = jax.checkpoint_policies


def offloading(name: str) -> Any:
    return NAMES.save_and_offload_only_these_names(
        names_which_can_be_saved=[], names_which_can_be_offloaded=[name], offload_src="device", offload_dst="pinned_host"
    )


class Block(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return x + nn.Dense(8)(jnp.tanh(checkpoint_name(nn.Dense(32)(x), "hidden")))


class Model(nn.Module):
    """Two blocks, checkpointed by their author under `policy`; plain if it is None."""

    policy: Any = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        cls = Block if self.policy is None else nn.remat(Block, policy=self.policy)
        for index in range(2):
            x = cls(name=f"block_{index}")(x)
        return x


def made(policy: Any = None) -> tuple[Any, Any, jax.Array]:
    model, x = Model(policy), jnp.ones((4, 8))

    def loss(params: Any, x: jax.Array) -> jax.Array:
        return jnp.sum(model.apply(params, x) ** 2)

    return loss, model.init(jax.random.key(0), x), x


@pytest.mark.parametrize("model_policy", [None, NAMES.save_only_these_names("another")], ids=["plain", "own checkpoints"])
@pytest.mark.parametrize(
    "policy",
    [NAMES.save_only_these_names("hiden", "other"), offloading("hiden"), "save: hiden"],
    ids=["save_only", "offload_only", "text"],
)
def test_names_that_the_model_does_not_give_are_an_error(policy: Any, model_policy: Any) -> None:
    loss, params, x = made(model_policy)
    with pytest.raises(NoEffectError, match=r"block_0.*Did you mean '[^']*hidden'"):
        rj.residuals(rj.Workload(loss, params, (x,), Block), policy)
    with pytest.raises(NoEffectError, match="hidden"):
        jax.grad(rj.checkpoint_blocks(loss, {Block: policy}))(params, x)
    if model_policy is not None:
        with pytest.raises(NoEffectError, match="hidden"):
            jax.grad(rj.replan(loss, policy))(params, x)


def test_one_name_that_is_given_is_enough_and_other_policies_are_not_judged() -> None:
    loss, params, x = made()
    count = {
        name: matmuls(jax.grad(rj.checkpoint_blocks(loss, {Block: policy})), params, x)
        for name, policy in {
            "full": "full",
            "one of two": NAMES.save_only_these_names("hidden", "other"),
            "all but": NAMES.save_any_names_but_these("other"),
            "none": NAMES.save_only_these_names(),
        }.items()
    }
    assert count["one of two"] == count["all but"] == count["full"] - 2 and count["none"] == count["full"]


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


class NamedOutput(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, _: Any = None) -> tuple[jax.Array, None]:
        hidden = checkpoint_name(nn.Dense(32)(x), "hidden")
        return checkpoint_name(x + nn.Dense(8)(jnp.tanh(hidden)), "out"), None


Scanned = nn.scan(NamedOutput, variable_axes={"params": 0}, split_rngs={"params": True}, length=2)


@pytest.mark.versions
@pytest.mark.parametrize("policy", IDLE.values(), ids=IDLE)
def test_a_policy_that_names_the_output_of_a_block_keeps_nothing(policy: Any) -> None:
    """The next iteration of the scan reads the output as its input, and the block's own backward pass does not read it."""
    model, x = Scanned(), jnp.ones((4, 8))
    params = model.init(jax.random.key(0), x, None)

    def loss(params: Any, x: jax.Array) -> jax.Array:
        return jnp.sum(model.apply(params, x, None)[0] ** 2)

    job = rj.Workload(loss, params, (x,), NamedOutput)
    checkpointed = rj.checkpoint_blocks(loss, {NamedOutput: policy})
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

    class Ruled(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            return cube(nn.Dense(8)(x))

    model, x = Ruled(), jnp.ones((4, 8))
    params = model.init(jax.random.key(0), x)

    def loss(params: Any, x: jax.Array) -> jax.Array:
        return jnp.sum(model.apply(params, x))

    jax.grad(rj.checkpoint_blocks(loss, {Ruled: NAMES.save_only_these_names("rule")}))(params, x)
    with pytest.raises(NoEffectError, match="'rule'"):
        jax.grad(rj.checkpoint_blocks(loss, {Ruled: NAMES.save_only_these_names("rules")}))(params, x)


def test_a_block_of_integers_has_no_names() -> None:
    @rj.block
    def count(weights: Any, x: jax.Array) -> jax.Array:
        return weights["offset"] + x

    wrapped = rj.checkpoint_blocks(lambda w, x: count(w, x).sum(), {count: NAMES.save_only_these_names("hidden")})
    with pytest.raises(NoEffectError, match="no checkpoint_name in count gives 'hidden'.*that are given: none"):
        wrapped({"offset": jnp.arange(4)}, jnp.arange(4))


@pytest.mark.parametrize("choice", ["replace", "keep"])
@pytest.mark.parametrize("name", ["unrolled", "scanned", "nnx", "bridged"])
@pytest.mark.filterwarnings("ignore:own_checkpoints='keep'")
def test_names_that_a_model_with_own_checkpoints_does_not_give_are_refused(name: str, choice: str) -> None:
    loss, block, params = MODELS[name][0]()
    for policy in ("save: attention_out", jax.checkpoint_policies.save_only_these_names("attention_out")):
        policed = rj.checkpoint_blocks(loss, {block: policy}, own_checkpoints=choice)
        with pytest.raises(NoEffectError, match=r"attention_out' matches no residual|gives 'attention_out'"):
            jax.eval_shape(jax.grad(policed), params, jnp.ones((2, 8)))
