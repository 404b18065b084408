"""Identical layers are named and linearised once, and nothing else changes."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

import remat_jax as rj
from remat_jax.core import block as graph_block
from remat_jax.core import repeated
from tests.small_models import NnxMlp, NnxStack


class Layer(nn.Module):
    width: int = 16

    @nn.compact
    def __call__(self, x):
        h = nn.relu(nn.Dense(self.width)(x))
        first, second = jnp.split(jnp.tanh(h), 2, axis=-1)  # with sizes that are NumPy integers
        return x + jax.nn.softmax(nn.Dense(8)(jnp.concatenate([second, first], axis=-1)))


class Dropped(nn.Module):
    """Flax folds a number made from the path and the count of calls into the key of each dropout."""

    width: int = 16

    @nn.compact
    def __call__(self, x):
        drop = nn.Dropout(0.5, deterministic=False)
        return x + drop(nn.Dense(8)(drop(jnp.tanh(nn.Dense(self.width)(x)))))


class Stack(nn.Module):
    kind: type = Layer
    widths: tuple = (16,) * 3

    @nn.compact
    def __call__(self, x):
        for index, width in enumerate(self.widths):
            x = self.kind(width, name=f"layer_{index}")(x)
        return x


X = jnp.linspace(-1.0, 1.0, 32).reshape(4, 8)


def loss_of(model):
    params = jax.jit(model.init)(jax.random.key(0), X)
    return lambda params, x: (model.apply(params, x) ** 2).sum(), params


@pytest.fixture(autouse=True)
def forgotten(monkeypatch):
    monkeypatch.setattr(repeated, "_first_layers", ())


@pytest.fixture
def counts(monkeypatch):
    """The numbers of named and linearised blocks."""
    calls = {"named": 0, "linearised": 0}

    def count(kind, module, name):
        function = getattr(module, name)

        def run(*args):
            calls[kind] += 1
            return function(*args)

        monkeypatch.setattr(module, name, run)

    count("named", repeated, "name_residuals")
    count("linearised", graph_block, "name_linearised")
    return calls


@pytest.mark.parametrize("flag", [None, "jax_remat3", "jax_custom_jvp3"])
def test_three_layers_are_named_and_linearised_once(counts, with_flags, flag):
    if flag is not None and not hasattr(jax.config, flag):
        pytest.skip(f"this JAX has no {flag}")  # upgrade flags come and go with releases
    with_flags([flag] if flag else [])
    loss, params = loss_of(Stack())
    jax.make_jaxpr(jax.grad(rj.checkpoint_blocks(loss, {Layer: "dots"})))(params, X)
    # The first layer gets the batch, which is not differentiated.
    assert counts == {"named": 1, "linearised": 2}


def test_measure_and_residuals_share_them(counts):
    loss, params = loss_of(Stack())
    job = rj.Workload(loss, params, (X,), Layer)
    rj.residuals(job, "dots")
    rj.measure(job, "full")
    assert counts == {"named": 1, "linearised": 2}


def test_layers_with_dropout_are_identical_and_draw_their_own_masks(counts):
    model = Stack(Dropped)
    params = jax.jit(model.init)({"params": jax.random.key(0), "dropout": jax.random.key(1)}, X)

    def loss(params, key):
        return (model.apply(params, X, rngs={"dropout": key}) ** 2).sum()

    under = rj.checkpoint_blocks(loss, {Dropped: "2 × full | 1 × save: *:tanh#0"})
    gradients = (jax.jit(jax.value_and_grad(fn))(params, jax.random.key(2)) for fn in (under, loss))
    jax.tree.map(np.testing.assert_array_equal, *gradients)
    assert counts["named"] == 1


def test_layers_that_fold_several_numbers_at_once_are_compared_as_they_are(counts, with_flags):
    """With this flag JAX keeps an array of numbers as a literal of the equation."""
    with_flags(["jax_use_simplified_jaxpr_constants"])
    keys = jax.random.split(jax.random.key(0), 2)

    def layer(x, first):
        numbers = np.uint32([first, first + 1])
        return x * jax.vmap(jax.random.uniform)(jax.vmap(jax.random.fold_in)(keys, numbers)).sum()

    assert_gradients_of_two(layer, (1,), (3,))


def test_a_rule_that_folds_a_number_is_not_shared(counts):
    """In the rule, layer 0's number 7 is not the one that layer 1 replaces by 8."""
    key = jax.random.key(3)

    def layer(x, number):
        @jax.custom_jvp
        def noisy(x):
            return x * 2

        @noisy.defjvp
        def rule(primals, tangents):
            return noisy(*primals), tangents[0] * jax.random.uniform(jax.random.fold_in(jax.random.key(0), 7))

        return noisy(jnp.sin(x)) * jax.random.uniform(jax.random.fold_in(key, number))

    assert_gradients_of_two(layer, (7,), (8,))


def assert_gradients_of_two(layer, *arguments):
    """A layer twice, each time with arguments of its own, has the gradient of the plain function."""
    block = rj.block(layer)

    def loss(layer, x):
        for each in arguments:
            x = layer(x, *each)
        return x.sum()

    ours = jax.jit(jax.grad(rj.checkpoint_blocks(functools.partial(loss, block), {block: "full"})))(X)
    np.testing.assert_allclose(ours, jax.jit(jax.grad(functools.partial(loss, layer)))(X), rtol=1e-6)


def test_layers_that_differ_are_told_apart(counts):
    loss, params = loss_of(Stack(widths=(16, 32, 16)))
    jax.eval_shape(jax.grad(rj.checkpoint_blocks(loss, {Layer: "full"})), params, X)
    assert counts["named"] == 2
    # The same program from two lines.
    first = rj.block(lambda x: jnp.sin(jnp.tanh(x)))
    second = rj.block(lambda x: jnp.sin(jnp.tanh(x)))
    fn = rj.checkpoint_blocks(lambda x: first(second(first(x))).sum(), {first: "full", second: "full"})
    jax.eval_shape(jax.grad(fn), X)
    assert counts["named"] == 4


def test_a_layer_traced_under_other_settings_is_another(counts):
    loss, params = loss_of(Stack())
    traced = rj.checkpoint_blocks(loss, {Layer: "full"})
    jax.make_jaxpr(traced)(params, X)
    with jax.default_matmul_precision("highest"):
        jax.make_jaxpr(traced)(params, X)
    assert counts["named"] == 2


def table(loss, params, policy):
    rows = rj.residuals(rj.Workload(loss, params, (X,), Layer), policy).rows
    return [(row.name, row.shape, row.action, row.source) for row in rows]


POLICIES = ("full", "save: layer_2:*; offload: layer_1:tanh#0", "offload_inputs", "everything")


def test_names_actions_and_gradients_are_those_of_layers_that_share_nothing(monkeypatch):
    loss, params = loss_of(Stack())

    def results():
        under = jax.grad(rj.checkpoint_blocks(loss, {Layer: POLICIES[1]}))
        return [table(loss, params, policy) for policy in POLICIES], jax.jit(under)(params, X)

    shared, gradients = results()
    monkeypatch.setattr(repeated.FirstLayer, "folded_as", lambda *_: None)
    alone, gradients_alone = results()
    assert shared == alone
    assert {name.partition("/")[0].partition(":")[0] for name, *_ in shared[0]} >= {"layer_1", "layer_2"}
    jax.tree.map(np.testing.assert_array_equal, gradients, gradients_alone)


def test_the_compiled_step_tells_each_layer_by_its_own_path():
    loss, params = loss_of(Stack())
    step = jax.jit(jax.grad(rj.checkpoint_blocks(loss, {Layer: "full"}))).lower(params, X)
    # Equal `jit`s are lowered once, at the place of the first.
    places = re.findall(r'loc\("([^"]*)"', step.as_text(debug_info=True))
    of_layer = [sum(f"layer_{index}/" in place and not place.endswith("/jit") for place in places) for index in range(3)]
    assert of_layer[1] == of_layer[2] > 0


def test_layers_that_close_over_arrays_of_their_own_share_nothing():
    def layer(scale):
        @jax.custom_jvp
        def scaled(x):
            return jnp.sin(x) * 2

        scaled.defjvp(lambda primals, tangents: (scaled(*primals), tangents[0] * scale))
        return rj.remat(lambda x: scaled(jnp.tanh(x)), "full")

    layers = [layer(jnp.float32(scale)) for scale in (2.0, 3.0)]
    gradient = jax.grad(lambda x: sum(layer(x).sum() for layer in layers))(X)
    np.testing.assert_allclose(gradient, (1 - jnp.tanh(X) ** 2) * 5.0, rtol=1e-6)


def test_nnx_layers_share_them(counts):
    job = rj.Workload.from_nnx(NnxStack(3), lambda model, x: (model(x) ** 2).sum(), (X[..., :4],), NnxMlp)
    names = {row.name for row in rj.residuals(job, "dots").rows}
    assert counts["named"] == 1
    assert {name.partition(":")[0].removesuffix("/down") for name in names} >= {f"layers/{index}" for index in range(3)}
