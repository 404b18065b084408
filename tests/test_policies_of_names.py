"""JAX's policies of names are an error if the model gives none of the names, like a text's selector."""

from __future__ import annotations

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


def test_the_names_of_both_forms_of_jaxs_policies_are_read() -> None:
    """JAX 0.11.2 makes the policy that offloads with a class, other versions with a function."""
    of_class = type("SaveAndOffloadOnlyTheseNames", (), {"__module__": "jax._src.ad_checkpoint", "__call__": print})()
    of_class.names_which_can_be_offloaded = frozenset({"hidden"})
    assert compat.kept_names_in(of_class) == compat.kept_names_in(offloading("hidden")) == {"hidden"}


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
