"""Random policies by layer on random stacks: values and gradients are those of the plain function, to 1e-12 in float64."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import remat_jax as rj
from tests.small_models import Linear, assert_same, values

POLICIES = ("full", "dots", "off", "everything", "offload_inputs", "save: *tanh*", "offload: *tanh*")


class Layer(nn.Module):
    """Dropout, and a statistic that every call writes."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        mean = self.variable("statistics", "mean", jnp.zeros, x.shape[-1:], x.dtype)
        mean.value = 0.9 * mean.value + x.mean(0)
        return x + nn.Dropout(0.5, deterministic=False)(jnp.tanh(Linear(4)(x)) * mean.value)


class Layers(nn.Module):
    """Layers in a row, or in a scan with a factor and a sum for each layer."""

    scanned: bool
    layers: int
    reverse: bool
    unroll: int

    @nn.compact
    def __call__(self, x: Any, factors: Any) -> Any:
        if not self.scanned:
            for index in range(self.layers):
                x = Layer(name=f"layer_{index}")(x) * factors[index]
            return x, factors

        def run_layer(layer: nn.Module, x: Any, factor: Any) -> Any:
            out = layer(x) * factor
            return out, out.sum()

        axes, split = {"params": 0, "statistics": 0}, {"params": True, "dropout": True}
        kwargs = {"length": self.layers, "reverse": self.reverse, "unroll": self.unroll}
        return nn.scan(run_layer, variable_axes=axes, split_rngs=split, **kwargs)(Layer(name="layers"), x, factors)


@st.composite
def _stacks(draw: st.DrawFn) -> tuple[Layers, list[str]]:
    policies = draw(st.lists(st.sampled_from(POLICIES), min_size=1, max_size=5))
    model = Layers(draw(st.booleans()), len(policies), draw(st.booleans()), draw(st.sampled_from([1, 2])))
    return model, policies


@pytest.mark.usefixtures("x64")
@settings(max_examples=8, derandomize=True, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(_stacks())
def test_random_layers_compute_what_the_plain_function_computes(drawn: tuple[Layers, list[str]]) -> None:
    model, policies = drawn
    x, factors, keys = values(3, 4), 1 + values(model.layers, seed=1), {"dropout": jax.random.key(2)}
    shapes = jax.eval_shape(model.init, {"params": jax.random.key(0), **keys}, x, factors)
    made = jax.tree.map(lambda leaf: values(*leaf.shape, seed=3), shapes)

    def loss(params: Any, x: Any, factors: Any) -> Any:
        variables = {"params": params, "statistics": made["statistics"]}
        (out, sums), written = model.apply(variables, x, factors, rngs=keys, mutable=["statistics"])
        return jnp.sum(jnp.sin(out)) + jnp.sum(sums * jnp.arange(1.0, 1 + model.layers)), written

    fn = rj.checkpoint_blocks(loss, {Layer: rj.LayerPolicies.of(policies)})
    run, plain = (
        jax.jit(jax.value_and_grad(function, argnums=(0, 1, 2), has_aux=True))(made["params"], x, factors)
        for function in (fn, loss)
    )
    assert_same(run, plain)
