"""Blocks that are Haiku modules, and functions in Haiku transforms: random keys, state, scanned stacks, init."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
import pytest

import remat_jax as rj
from remat_jax.cost.count import matmuls
from remat_jax.planning.outcome import parts_of
from remat_jax.planning.problem import describe
from remat_jax.planning.translate import named_candidate

X = jnp.linspace(-1.0, 1.0, 8).reshape(2, 4)


class Layer(hk.Module):
    """A block that draws a dropout mask, and writes the state of its own counter and of a BatchNorm."""

    def __call__(self, x: Any) -> Any:
        count = hk.get_state("count", (), jnp.int32, init=jnp.zeros)
        hk.set_state("count", count + 1)
        h = hk.Linear(4, name="down")(jnp.tanh(hk.Linear(8, name="up")(x)))
        h = hk.BatchNorm(True, True, 0.9)(h, is_training=True)
        return x + hk.dropout(hk.next_rng_key(), 0.5, h)

    def encode(self, x: Any) -> Any:
        h = hk.Linear(4, name="down")(jnp.tanh(hk.Linear(8, name="up")(x)))
        return x + hk.dropout(hk.next_rng_key(), 0.5, h)


@rj.block
def function(x: Any) -> Any:
    return Layer(name="layer").encode(x)


def two(x: Any) -> Any:
    return Layer(name="b")(Layer(name="a")(x))


def under_remat(x: Any) -> Any:
    return hk.remat(lambda x: Layer(name="b")(x))(Layer(name="a")(x))


def stacked(x: Any) -> Any:
    return hk.experimental.layer_stack(3)(lambda x: Layer(name="layer").encode(x))(x)


def mapped(x: Any) -> Any:
    first, second = Layer(), Layer()
    return hk.vmap(lambda row: second.encode(first.encode(row)), split_rng=not hk.running_init())(x)


def branched(x: Any) -> Any:
    return hk.cond(x.sum() > 1.0, lambda x: Layer(name="a")(x), lambda x: Layer(name="a")(2 * x), x)


# Below BatchNorm the backward pass reads the second product as well, so `full` recomputes both products of a layer.
TWO = {"full": 15, "1 x full | 1 x dots": 13}
CASES: dict[str, tuple[Callable[..., Any], Any, dict[str, int]]] = {
    "modules": (two, Layer, TWO),
    "glob": (two, "?", {"dots": 11}),
    "own remat": (under_remat, Layer, {"dots": 11}),
    "layer_stack": (stacked, Layer.encode, {"dots": 18, "1 x full | 2 x dots": 19}),
    "vmap": (mapped, Layer.encode, {"1 x full | 1 x dots": 12}),
    "cond": (branched, Layer, {"full": 7}),
    "function": (function, function, {"full": 6}),
}


def case(model: Callable[..., Any]) -> tuple[Any, Any, tuple[Any, ...]]:
    net = hk.transform_with_state(model)
    params, state = net.init(jax.random.PRNGKey(0), X)

    def loss(params: Any, state: Any, x: Any) -> Any:
        y, state = net.apply(params, state, jax.random.PRNGKey(3), x)
        return jnp.sum(y**2), state

    return net, loss, (params, state, X)


@pytest.mark.parametrize("name", CASES)
def test_masks_state_and_gradients_are_those_of_the_plain_model(name: str) -> None:
    model, block, counts = CASES[name]
    _, loss, arguments = case(model)
    plain = jax.jit(jax.value_and_grad(loss, has_aux=True))(*arguments)
    for policy, count in counts.items():
        gradient = jax.value_and_grad(rj.checkpoint_blocks(loss, {block: policy}), has_aux=True)
        assert matmuls(gradient, *arguments) == count, policy
        got = jax.jit(gradient)(*arguments)
        assert jax.tree.structure(got) == jax.tree.structure(plain)
        assert jax.tree.all(jax.tree.map(lambda a, b: bool(jnp.allclose(a, b, rtol=1e-5, atol=1e-6)), got, plain)), policy


def test_parameters_that_are_made_under_a_policy_are_the_same() -> None:
    net, _, (params, state, x) = case(two)
    made = rj.checkpoint_blocks(net.init, {Layer: "full"})(jax.random.PRNGKey(0), x)
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), made, (params, state)))


def test_a_workload_of_haiku_modules() -> None:
    _, loss, (params, state, x) = case(two)
    job = rj.Workload(loss, params, (state, x), Layer, has_aux=True)
    names = {row.name for row in rj.residuals(job, "dots").rows}
    assert {"a/up:dot_general#0", "b/down:dot_general#0"} <= names
    assert {row.source.partition(":")[0] for row in rj.residuals(job, "off")} <= {"", os.path.relpath(__file__)}
    assert rj.measure(job, "full", target="cpu").device_bytes > 0


def test_a_forward_call_in_a_transform() -> None:
    def model(x: Any, *, checkpointed: bool) -> Any:
        return rj.gradient_checkpoint_forward(Layer(name="a"), checkpointed, False, x)

    net = hk.transform_with_state(model)
    params, state = net.init(jax.random.PRNGKey(0), X, checkpointed=True)
    on, off = (net.apply(params, state, jax.random.PRNGKey(1), X, checkpointed=flag) for flag in (True, False))
    assert jax.tree.all(jax.tree.map(lambda a, b: bool(jnp.allclose(a, b)), on, off))


def test_equal_layers_that_draw_different_keys_are_one_row_of_a_plan() -> None:
    """The first layer is none of them: its input needs no gradient."""
    _, loss, (params, state, x) = case(lambda x: functools.reduce(lambda x, name: Layer(name=name).encode(x), "abc", x))
    described = describe(rj.Workload(loss, params, (state, x), Layer.encode, has_aux=True), "h200")
    parts = parts_of(described, described.stack, named_candidate(described, "full"))
    assert len(described.kinds) == 3 and [(part.first, part.layers) for part in parts] == [(0, 1), (1, 2)]
