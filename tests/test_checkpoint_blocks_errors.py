"""`rj.checkpoint_blocks`: wrong use is an error with the remedy."""

from __future__ import annotations

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

import remat_jax as rj
from remat_jax.cost.count import matmuls
from remat_jax.errors import ArgumentError, BlockError, PolicyError
from tests.small_models import Mlp, Stack, make_loss

# Matmuls of value and gradient of two `Mlp`s, plain and under `full`.
PLAIN, FULL = 11, 13


def test_wrong_keys_and_values_are_refused_at_once() -> None:
    loss, _, _ = make_loss()
    with pytest.raises(PolicyError, match="policy='fulll'.*Did you mean 'full'"):
        rj.checkpoint_blocks(loss, "fulll")
    for wrong in ({}, Mlp, (Mlp, "full"), Mlp.__call__, rj.block(lambda x: x)):
        with pytest.raises(ArgumentError, match="policies=.*: expected a mapping.*at least one entry"):
            rj.checkpoint_blocks(loss, wrong)
    with pytest.raises(ArgumentError, match="block=3: expected a class whose instances are called"):
        rj.checkpoint_blocks(loss, {3: "full"})
    with pytest.raises(ArgumentError, match=r"make a plain function a block, mark it, layer = remat_jax.block\(layer\)"):
        rj.checkpoint_blocks(loss, {loss: "full"})
    with pytest.raises(ArgumentError, match=r"put a functools.partial into a lambda"):
        rj.block(functools.partial(loss))
    with pytest.raises(PolicyError, match="policy=None is read differently"):
        rj.checkpoint_blocks(loss, {Mlp: None})
    with pytest.raises(ArgumentError, match="fn=3: expected a function"):
        rj.checkpoint_blocks(3, {Mlp: "full"})


def test_a_class_that_is_defined_again_is_not_the_class_of_the_same_name_that_the_model_uses() -> None:
    """A cell of a notebook was run again, and the model is older."""
    loss, params, x = make_loss()
    again = type("Mlp", (Mlp,), {})
    with pytest.raises(BlockError, match=r"block=Mlp: this class was never called.* Another class Mlp was called: a") as caught:
        rj.checkpoint_blocks(loss, {again: "full"})(params, x)
    assert "Did you mean" not in str(caught.value)


def test_a_block_that_is_not_there_names_those_that_are() -> None:
    loss, params, x = make_loss()

    class Mlpp(nn.Module):
        pass

    with pytest.raises(BlockError, match=r"block=Mlpp: this class was never called.* Did you mean 'Mlp'\?.*layer_0: Mlp"):
        rj.checkpoint_blocks(loss, {Mlpp: "full"})(params, x)
    with pytest.raises(
        BlockError, match=r"block='layers_\*': the glob matches no path of a called module.*Did you mean 'layer_\d'"
    ):
        rj.checkpoint_blocks(loss, {"layers_*": "full"})(params, x)
    with pytest.raises(BlockError, match="To select a function, mark it with .* and pass the function, not its name"):
        rj.checkpoint_blocks(lambda x: rj.block(jnp.sin)(x), {"sin": "full"})(x)
    with pytest.raises(BlockError, match="No module of this kind was called at all"):
        rj.checkpoint_blocks(lambda x: x, {Mlp: "full"})(x)


def test_an_error_of_the_model_leaves_nothing_behind() -> None:
    class Failing(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            raise ValueError("the model's own")

    loss, params, x = make_loss()
    with pytest.raises(ValueError, match="the model's own"):
        rj.checkpoint_blocks(lambda x: Failing().apply({}, x), {Failing: "full", Stack: "full"})(x)
    assert (
        matmuls(jax.value_and_grad(loss), params, x) == PLAIN
        and matmuls(jax.value_and_grad(rj.checkpoint_blocks(loss, {Mlp: "full"})), params, x) == FULL
    )


def test_a_glob_does_not_select_a_marked_function() -> None:
    layer = rj.block(lambda w, x: x * w)
    with pytest.raises(BlockError, match="A glob selects modules. To select a function, mark it with @remat_jax.block"):
        rj.checkpoint_blocks(lambda w, x: layer(w, x).sum(), {"layer": "full"})(jnp.ones(3), jnp.ones(3))


@pytest.mark.versions
def test_policies_by_layer_may_be_set_around_a_step_or_around_the_loss_inside() -> None:
    loss, params, x = make_loss()
    policies = {Mlp: "1 x full | 1 x dots"}

    def train_step(params: Any, x: Any, around: Any = lambda loss_fn: loss_fn) -> Any:
        return jax.value_and_grad(around(lambda params: loss(params, x)))(params)

    assert matmuls(rj.checkpoint_blocks(train_step, policies), params, x) == PLAIN + 1
    inside = functools.partial(train_step, around=lambda loss_fn: rj.checkpoint_blocks(loss_fn, policies))
    assert matmuls(inside, params, x) == PLAIN + 1
