"""The names of residuals where copies of a block's modules run: inside transforms and after `nnx.merge`."""

from __future__ import annotations

import functools

import equinox as eqx
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


class CopiesUp(FeedForward):
    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(jnp.tanh(nnx.remat(lambda up, x: up(x))(self.up, x)))


class Sides(nnx.Module):
    """`left/up` and `right/up` have equal shapes; `left` runs a copy of its own."""

    def __init__(self, width: int, rngs: nnx.Rngs, *, rate: float) -> None:
        self.left, self.right = CopiesUp(width, rngs), FeedForward(width, rngs)

    def __call__(self, x: jax.Array, *, scale: float) -> jax.Array:
        return scale * self.right(self.left(x))


@pytest.mark.parametrize(
    ("block", "names"),
    [
        (OwnCheckpoint, ["layers/0/up:dot_general#0", "layers/1/up:dot_general#0"]),
        # Of two modules that are alike a copy may be either.
        (Merged, ["layers/0/ffn/up:dot_general#0", "layers/0:dot_general#0", "layers/0:dot_general#1"]),
        (Sides, ["layers/0/left/up:dot_general#0", "layers/0/right/up:dot_general#0"]),
    ],
)
def test_a_copy_has_the_path_of_its_module_if_no_other_inside_the_running_module_is_alike(block, names):
    job = rj.Workload.from_nnx(Model(layers=2, block=block), loss, (inputs(),), block)
    assert set(names) <= {row.name for row in rj.residuals(job, "save: *:dot_general#*").rows}


class Scale(eqx.Module):
    weight: jax.Array

    def __call__(self, x: jax.Array) -> jax.Array:
        return jnp.tanh(x @ self.weight)


class Feed(eqx.Module):
    first: Scale

    def __call__(self, x: jax.Array) -> jax.Array:
        return jnp.sin(self.first(x))


class Checkpointed(eqx.Module):
    """`jax.checkpoint` calls a copy of `feed`, made from its arrays."""

    feed: Feed

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + jax.checkpoint(lambda feed, x: feed(x))(self.feed, x)


def test_a_copy_of_an_equinox_module_and_its_parts_have_their_names():
    model, x = Checkpointed(Feed(Scale(jnp.ones((4, 4))))), jnp.ones((2, 4))
    job = rj.Workload(lambda model, x: model(x).sum(), model, (x,), Checkpointed)
    names = {row.name for row in rj.residuals(job, "save: *:dot_general#0; save: *:cos#0").rows}
    assert {"Checkpointed/feed/first:dot_general#0", "Checkpointed/feed:cos#0"} <= names


def test_a_block_in_a_block_names_its_own_copies():
    job = rj.Workload.from_nnx(Model(layers=2, block=OwnCheckpoint), loss, (inputs(),), (Model, OwnCheckpoint))
    rj.residuals(job, {Model: "full", OwnCheckpoint: "save: Model/layers/1/up:dot_general#0"})
    with pytest.raises(NoEffectError, match="Did you mean 'Model/layers/1/up:dot_general#0'"):
        rj.residuals(job, {Model: "full", OwnCheckpoint: "save: Model/layers/1/up/up:dot_general#0"})
