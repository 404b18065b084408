"""Blocks of classes with one function under several names, such as `__call__ = forward`."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import remat_jax as rj
from remat_jax.cost.count import matmuls
from tests.test_decorated_calls import BOTH, NnxCoder, X, check


def linen_forward(self: Any, x: Any) -> Any:
    return x + nn.Dense(4)(jnp.tanh(nn.Dense(8)(x)))


def alias_case(library: str, decorator: Any) -> tuple[Any, Any, tuple[Any, ...]]:
    """Two layers whose class has `forward`, and `__call__ = decorator(forward)`."""
    if library == "linen":

        class Layer(nn.Module):
            forward = nn.compact(linen_forward)
            __call__ = decorator(forward)

        model = nn.Sequential([Layer(), Layer()])
        params = jax.jit(model.init)(jax.random.key(0), X)
        return Layer, lambda params, x: (jnp.sum(model.apply(params, x) ** 2), None), (params, X)

    class NnxLayer(NnxCoder):
        def forward(self, x: Any) -> Any:
            return x + self.down(jnp.tanh(self.up(x)))

        __call__ = decorator(forward)

    graph, params = nnx.split(nnx.List([NnxLayer(nnx.Rngs(0)), NnxLayer(nnx.Rngs(1))]))

    def loss(params: Any, x: Any) -> Any:
        for layer in nnx.merge(graph, params):
            x = layer(x)
        return jnp.sum(x**2), None

    return NnxLayer, loss, (params, X)


@pytest.mark.parametrize(
    ("library", "decorator"), [("linen", lambda f: f), ("linen", nn.jit), ("linen", nn.remat), ("nnx", lambda f: f)]
)
def test_a_call_by_another_name_is_the_call(library: str, decorator: Any) -> None:
    layer, loss, arguments = alias_case(library, decorator)
    check(loss, layer, arguments, BOTH)
    for block in [layer.forward] + [layer.__call__, "layers_?"] * (library == "linen"):
        under = rj.checkpoint_blocks(loss, {block: "full"})
        assert matmuls(jax.value_and_grad(under, has_aux=True), *arguments) == 13


def test_a_method_that_a_subclass_defines_anew_is_no_longer_the_call() -> None:
    layer, _, _ = alias_case("linen", lambda f: f)

    class Child(layer):  # type: ignore[misc,valid-type]
        @nn.compact
        def __call__(self, x: Any) -> Any:
            return jnp.sin(self.forward(x))

    params = Child().init(jax.random.key(0), X)

    def loss(params: Any, x: Any) -> Any:
        return jnp.sum(Child().apply(params, x) ** 2), None

    # The block `Child` ends in the sine, which reads the second product; the block `forward` does not.
    check(loss, Child, (params, X), {"full": 7})
    check(loss, Child.forward, (params, X), {"full": 6})


def test_a_descriptor_of_another_class_that_raises_is_passed_over() -> None:
    class Raising:
        def __get__(self, instance: Any, owner: Any) -> Any:
            raise AttributeError("no forward without an instance")

    foreign = type("Foreign", (), {"forward": Raising()})
    layer, loss, arguments = alias_case("linen", lambda f: f)
    check(loss, layer.forward, arguments, {"full": 13})
    assert foreign.__name__ == "Foreign"
