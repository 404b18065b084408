"""`checkpoint_sequential`: PyTorch's segments, over functions, Linen modules and NNX modules."""

from __future__ import annotations

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import remat_jax as rj
from remat_jax.cost.count import matmuls
from remat_jax.errors import ArgumentError
from tests.small_models import Linear, assert_same, values

LAYERS = 5


def kernels() -> Any:
    return list(values(LAYERS, 4, 4)), values(3, 4, seed=1)


def layers_of(weights: Any) -> list[Any]:
    return [lambda x, w=w: jnp.tanh(x @ w) for w in weights]


class Layer(nnx.Module):
    def __init__(self, kernel: Any) -> None:
        self.kernel = nnx.Param(kernel)

    def __call__(self, x: Any) -> Any:
        return jnp.tanh(x @ self.kernel[...])


class Stack(nn.Module):
    segments: int
    policy: str = "full"

    @nn.compact
    def __call__(self, x: Any) -> Any:
        layers = [nn.Sequential([Linear(4), jnp.tanh], name=f"layer_{index}") for index in range(LAYERS)]
        return rj.checkpoint_sequential(layers, self.segments, x, policy=self.policy)


def losses(kind: str, segments: int, policy: str = "full") -> Any:
    def loss(weights: Any, x: Any) -> Any:
        if kind == "linen":
            params = {f"layer_{index}": {"layers_0": {"kernel": w}} for index, w in enumerate(weights)}
            return Stack(segments, policy).apply({"params": params}, x).sum()
        layers = [Layer(w) for w in weights] if kind == "nnx" else layers_of(weights)
        if kind == "mixed":
            layers = [Layer(weights[0]), *layers[1:]]
        return rj.checkpoint_sequential(layers, segments, x, policy=policy).sum()

    return loss


@pytest.mark.parametrize("kind", ["function", "nnx", "mixed", "linen"])
def test_all_but_the_last_segment_run_again(x64, kind):
    weights, x = kernels()
    plain = lambda weights, x: functools.reduce(lambda x, w: jnp.tanh(x @ w), weights, x).sum()  # noqa: E731
    expected = jax.jit(jax.grad(plain, argnums=(0, 1)))(weights, x)
    # size = 5 // segments; the layers of all segments but the last are recomputed.
    for segments, again in {1: 0, 2: 2, 3: 2, 4: 3, 5: 4}.items():
        grad = jax.grad(losses(kind, segments), argnums=(0, 1))
        assert matmuls(grad, weights, x) == 3 * LAYERS + again, segments
        if segments in (2, 5):
            assert_same(jax.jit(grad)(weights, x), expected)


@pytest.mark.parametrize("kind", ["function", "nnx", "linen"])
def test_another_policy_for_the_segments(kind):
    weights, x = kernels()
    count = lambda policy: matmuls(jax.grad(losses(kind, 2, policy), argnums=(0, 1)), weights, x)  # noqa: E731
    assert [count(policy) for policy in ("off", "everything", "dots", "full", "offload_inputs")] == [15, 15, 15, 17, 17]


def test_a_sequential_is_a_list_of_its_layers_and_inputs_may_be_pytrees():
    weights, x = kernels()
    model = nnx.Sequential(*[Layer(w) for w in weights])
    np.testing.assert_array_equal(rj.checkpoint_sequential(model, 2, x), model(x))
    np.testing.assert_array_equal(rj.checkpoint_sequential(nnx.List(model.layers), 5, x), model(x))
    pair = rj.checkpoint_sequential([lambda xy: (xy[1], xy[0] + 1)] * 4, 2, (x, 2 * x))
    np.testing.assert_array_equal(pair[0], x + 2)


def test_state_that_layers_write_in_a_segment_is_written_back():
    class Counts(nnx.Module):
        def __init__(self):
            self.seen = nnx.BatchStat(jnp.zeros(()))

        def __call__(self, x):
            self.seen[...] = self.seen[...] + x.sum()
            return 2 * x

    layers = [Counts() for _ in range(4)]
    rj.checkpoint_sequential(layers, 2, jnp.ones(3))
    assert [float(layer.seen[...]) for layer in layers] == [3.0, 6.0, 12.0, 24.0]


def test_wrong_arguments_are_named():
    x = jnp.ones(3)
    for segments in (0, 3, True, 1.0, "2"):
        with pytest.raises(
            ArgumentError, match=f"segments={segments!r}: expected an integer from 1 to the number of functions, 2"
        ):
            rj.checkpoint_sequential([jnp.sin, jnp.sin], segments, x)
    with pytest.raises(ArgumentError, match="expected at least one function"):
        rj.checkpoint_sequential([], 1, x)
    for functions in (jnp.sin, Layer(jnp.ones((3, 3))), "sin"):
        with pytest.raises(ArgumentError, match="expected a list of functions or modules"):
            rj.checkpoint_sequential(functions, 1, x)
    with pytest.raises(ArgumentError, match="not bound"):
        rj.checkpoint_sequential([Linear(4), Linear(4)], 2, x)
