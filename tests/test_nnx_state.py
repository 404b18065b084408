"""A block under a policy leaves its NNX module as the plain call does; what cannot be kept is an error."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import remat_jax as rj
from remat_jax.errors import UnsupportedError
from tests.test_nnx import Layer, Model, assert_same, inputs, loss, plain_values


class Stateful(nnx.Module):
    """Every kind of attribute; subclasses change some of them in a call."""

    def __init__(self) -> None:
        self.a, self.b = nnx.Param(jnp.float32(2)), nnx.Param(jnp.float32(3))
        self.stats = nnx.List([nnx.BatchStat(jnp.float32(value)) for value in range(3)])
        self.parts = nnx.Dict(one=nnx.Linear(1, 1, rngs=nnx.Rngs(0)), two=nnx.Linear(1, 1, rngs=nnx.Rngs(1)))
        self.rngs, self.none, self.arrays = nnx.Rngs(5), nnx.data(None), nnx.data([jnp.float32(1)])
        self.calls, self.log, self.text = 0, [], "x"


class Swaps(Stateful):
    def __call__(self, x):
        self.a, self.b = self.b, self.a
        self.parts.one, self.parts.two = self.parts.two, self.parts.one
        self.stats[0][...], self.stats[1][...] = self.stats[1][...], self.stats[0][...]
        return x * self.a[...] + self.parts.one(x[None])[0]


class Deletes(Stateful):
    def __call__(self, x):
        if hasattr(self, "b"):
            gone = self.b
            del self.b
            gone[...] = gone[...] * 7
            self.stats.append(gone)
            self.parts.two = None
        return x * self.a[...] + len(self.stats)


class Aliases(Stateful):
    def __call__(self, x):
        self.c, self.other = self.a, self.parts.one
        self.parts.two.bias = self.parts.one.bias
        return x * self.c[...] + self.other(x[None])[0]


class Lists(Stateful):
    def __call__(self, x):
        self.calls, self.text = self.calls + 1, self.text + "y"
        self.log.append(self.calls)
        self.arrays.append(x * self.calls)
        self.stats.append(self.stats.pop(0))
        self.parts[f"stat{self.calls}"] = nnx.BatchStat(x)
        return x * self.stats[0][...] + self.arrays[0] + self.a[...]


class News(Stateful):
    def __call__(self, x):
        if not hasattr(self, "made"):
            self.made = nnx.Linear(1, 1, rngs=nnx.Rngs(3))
        self.made.kernel[...] += 1
        self.last, self.none = nnx.data(x * 2), nnx.data(x) if self.none is None else None
        return self.made(x[None])[0] + self.a[...]


class Kinds(Stateful):
    def __call__(self, x):
        kind = nnx.BatchStat if isinstance(self.b, nnx.Param) else nnx.Param
        self.b = kind(self.b[...] * x)
        self.a.set_metadata("calls", self.a.get_metadata("calls", 0) + 1)
        return x * self.a[...] * self.a.get_metadata("calls") + self.b[...]


class Draws(Stateful):
    def __call__(self, x):
        noise = jax.random.uniform(self.rngs.fork().dropout())
        self.sow(nnx.Intermediate, "noise", noise)
        return x * self.a[...] + noise


def content(model):
    """All that a module holds, in comparable form, and which of its paths are the same object."""
    values = {}
    for path, node in nnx.iter_graph(model):
        if isinstance(node, nnx.Variable):
            metadata = {key: str(value) for key, value in node.get_metadata().items()}
            values[path] = type(node).__name__, [leaf.tolist() for leaf in plain_values(node.get_raw_value())], metadata
        elif not str(path[-1:]).startswith("('_pytree__"):
            values[path] = str(node) if isinstance(node, jax.Array | int | str | None | list) else type(node).__name__
    return values, sorted(map(sorted, nnx.find_duplicates(model)))


WAYS = {
    "plain": lambda fn, cls: (fn, cls()),
    "policy": lambda fn, cls: (rj.checkpoint_blocks(fn, {cls: "full"}), cls()),
    "layers": lambda fn, cls: (rj.checkpoint_blocks(fn, {cls: "1 x full | 1 x everything"}), cls()),
    "switch": lambda fn, cls: (fn, rj.enable_gradient_checkpointing(cls(), blocks=cls)),
    "class": lambda fn, cls: (fn, rj.remat(cls)()),
    "function": lambda fn, cls: (rj.remat(fn), cls()),
}


@pytest.mark.versions
@pytest.mark.filterwarnings("ignore:Using 'Module.sow")
@pytest.mark.parametrize("cls", Stateful.__subclasses__())
def test_a_block_leaves_its_module_as_the_plain_call_does(cls):
    def left_by(way):
        fn, model = WAYS[way](lambda model, x: model(x) + model(x), cls)
        step = nnx.value_and_grad(fn, argnums=nnx.DiffState(0, nnx.Param))
        results = [nnx.jit(step)(model, jnp.float32(x)) for x in (1.5, 0.5)]
        return plain_values(results), content(model)

    expected, left = left_by("plain")
    for way in WAYS:
        values, now = left_by(way)
        assert now == left, way
        np.testing.assert_allclose(np.hstack(list(map(np.ravel, values))), np.hstack(list(map(np.ravel, expected))), rtol=1e-6)


def test_a_block_returns_its_own_and_new_objects():
    class Gives(nnx.Module):
        def __init__(self):
            self.inner = nnx.Linear(4, 4, rngs=nnx.Rngs(0))

        def __call__(self, x):
            return self.inner, nnx.Cache(2 * x)

    model = Gives()
    inner, cache = rj.checkpoint_blocks(lambda model, x: model(x), {Gives: "full"})(model, jnp.ones(4))
    assert inner is model.inner
    assert_same(cache[...], 2 * jnp.ones(4))


class Holder:
    def __init__(self) -> None:
        self.cache, self.last = nnx.Cache(jnp.zeros(3)), None


class Hides(nnx.Module):
    def __init__(self, writes: str) -> None:
        self.w, self.writes, self.holder = nnx.Param(jnp.ones(3)), writes, Holder()

    def __call__(self, x, given):
        if self.writes == "attribute":
            self.holder.last = 2 * x
        elif self.writes == "variable":
            given.cache[...] = x
        else:
            self.w[...] += x
            raise ValueError("from the block")
        return x * self.w[...]


@pytest.mark.parametrize(("writes", "named"), [("attribute", "Hides.holder.last"), ("variable", "perhaps Holder.cache")])
def test_what_cannot_leave_a_block_is_refused_and_named(writes, named):
    model = Hides(writes)
    with pytest.raises(UnsupportedError, match=named):
        rj.checkpoint_blocks(lambda model, x: model(x, Holder()), {Hides: "full"})(model, jnp.ones(3))
    assert model.holder.last is None


def test_a_block_that_fails_changes_nothing():
    model = Hides("neither")
    with pytest.raises(ValueError, match="from the block"):
        rj.checkpoint_blocks(lambda model, x: model(x, None), {Hides: "full"})(model, jnp.ones(3))
    assert_same(model.w[...], jnp.ones(3))


@pytest.mark.parametrize("policy", ["full", "1 x full | 1 x dots"])
def test_no_tracer_of_a_block_is_kept(policy):
    fn = rj.checkpoint_blocks(loss, {Layer: policy})
    with jax.checking_leaks():
        nnx.jit(nnx.grad(fn))(Model(rate=0.3), inputs())
