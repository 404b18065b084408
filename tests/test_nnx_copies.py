"""The names of residuals where NNX runs copies of a block's modules: inside its transforms and after `nnx.merge`."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import remat_jax as rj
from remat_jax.errors import NoEffectError
from tests.test_nnx import FeedForward, Model, inputs, loss


class OwnCheckpoint(FeedForward):
    """`nnx.remat` runs a copy of the module."""

    def __init__(self, width: int, rngs: nnx.Rngs, *, rate: float) -> None:
        super().__init__(width, rngs)

    @functools.partial(nnx.remat, static_argnums=(2,))
    def run(self, x: jax.Array, scale: float) -> jax.Array:
        return scale * super().__call__(x)

    def __call__(self, x: jax.Array, *, scale: float) -> jax.Array:
        return self.run(x, scale)


def test_module_paths_lead_the_names_inside_flaxs_transforms():
    job = rj.Workload.from_nnx(Model(layers=3, block=OwnCheckpoint), loss, (inputs(),), OwnCheckpoint)
    names = {row.name for row in rj.residuals(job, "save: */up:dot_general#0")}
    assert {f"layers/{index}/up:dot_general#0" for index in range(3)} <= names


class Merged(nnx.Module):
    """Runs a copy of `ffn`, and two modules of equal class and shapes in a copy of itself."""

    def __init__(self, width: int, rngs: nnx.Rngs, *, rate: float) -> None:
        self.ffn, self.left, self.right = FeedForward(width, rngs), *(nnx.Linear(width, width, rngs=rngs) for _ in range(2))

    @nnx.remat
    def sides(self, x: jax.Array) -> jax.Array:
        return jnp.tanh(self.left(x)) + jnp.tanh(self.right(x))

    def __call__(self, x: jax.Array, *, scale: float) -> jax.Array:
        graphdef, state = nnx.split(self.ffn)
        return scale * jax.checkpoint(lambda state, x: nnx.merge(graphdef, state)(x))(state, self.sides(x))


def test_a_copy_of_a_module_has_its_name_if_no_other_module_is_alike():
    model = Model(layers=1, block=Merged)
    names = {
        row.name for row in rj.residuals(rj.Workload.from_nnx(model, loss, (inputs(),), Merged), "save: *:dot_general#*").rows
    }
    assert {"layers/0/ffn/up:dot_general#0", "layers/0:dot_general#0", "layers/0:dot_general#1"} <= names


def test_a_block_in_a_block_names_its_own_copies():
    job = rj.Workload.from_nnx(Model(layers=2, block=OwnCheckpoint), loss, (inputs(),), (Model, OwnCheckpoint))
    rj.residuals(job, {Model: "full", OwnCheckpoint: "save: Model/layers/1/up:dot_general#0"})
    with pytest.raises(NoEffectError, match="Did you mean 'Model/layers/1/up:dot_general#0'"):
        rj.residuals(job, {Model: "full", OwnCheckpoint: "save: Model/layers/1/up/up:dot_general#0"})
