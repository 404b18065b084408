"""`rj.jax_policy`: policies for use by hand, and the policies that it refuses."""

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
from remat_jax.errors import PolicyError, UnknownPolicyError, UnsupportedError
from tests.small_models import Attention, make_loss, to_host

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


def test_equal_policies_are_equal_so_that_caches_hit() -> None:
    if NEW_AND_OLD:
        return
    assert rj.jax_policy("dots") == rj.jax_policy("save: @dots") != rj.jax_policy("full")
    assert len({rj.jax_policy("dots"), rj.jax_policy("dots_saveable")}) == 1
    assert repr(rj.jax_policy("dots")) == "jax_policy('save: @dots')"


def test_what_only_our_own_pass_can_serve_is_refused() -> None:
    for policy, selector in (("save: *ffn*", r"\*ffn\*"), ("offload_inputs", "@inputs"), ("save: @dots; offload: a/b", "a/b")):
        with pytest.raises(PolicyError, match=f"'{selector}' selects automatic residual names.*rj|remat_jax.remat"):
            rj.jax_policy(policy)
    with pytest.raises(PolicyError, match="policy='off': jax.checkpoint has no policy that turns it off; leave"):
        rj.jax_policy("off")
    with pytest.raises(PolicyError, match="policy=None is read differently"):
        rj.jax_policy(None)
    with pytest.raises(UnknownPolicyError, match="Did you mean 'everything'"):
        rj.jax_policy("everythin")


def test_a_policy_of_jax_is_given_back() -> None:
    assert rj.jax_policy(jax.checkpoint_policies.dots_saveable) is jax.checkpoint_policies.dots_saveable


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


@pytest.mark.versions
def test_doctor_knows_the_models_names_under_remat3(remat3: None) -> None:
    """An output that is offloaded by name stays on the device as the next round's input."""
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["out"],
        offload_src="device",
        offload_dst="pinned_host",
    )

    class Layers(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            w = self.param("w", nn.initializers.lecun_normal(), (3, 8, 8))
            block = jax.checkpoint(lambda x, w: (checkpoint_name(jnp.sin(x @ w), "out"), None), policy=policy)
            return jax.lax.scan(block, x, w)[0]

    model, x = Layers(), jax.ShapeDtypeStruct((4, 8), jnp.float32)
    params = jax.eval_shape(model.init, jax.random.key(0), x)
    diagnosis = rj.doctor(rj.Workload(lambda p, x: jnp.sum(model.apply(p, x)), params, (x,), Layers), "off")
    assert [finding.trap for finding in diagnosis.findings] == ["named_output"]
