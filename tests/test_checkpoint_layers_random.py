"""Random policies by layer, some in groups, on random stacks: values and gradients are those of the plain function, to 1e-12 in float64."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from hypothesis import HealthCheck, example, given, settings
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
    """Layers in a row; then layers in a scan with a factor and a sum for each, which read one number of the input."""

    unrolled: int
    scanned: int
    reverse: bool
    unroll: int

    @nn.compact
    def __call__(self, x: Any, factors: Any) -> Any:
        scale = jnp.cos(x[0, 0])
        for index in range(self.unrolled):
            x = Layer(name=f"layer_{index}")(x) * factors[index]
        if not self.scanned:
            return x, factors

        def run_layer(layer: nn.Module, x: Any, factor: Any) -> Any:
            out = layer(x) * factor * scale
            return out, (out.sum(), factor * 2)

        axes, split = {"params": 0, "statistics": 0}, {"params": True, "dropout": True}
        kwargs = {"length": self.scanned, "reverse": self.reverse, "unroll": self.unroll}
        scan = nn.scan(run_layer, variable_axes=axes, split_rngs=split, **kwargs)
        x, (sums, doubled) = scan(Layer(name="layers"), x, factors[self.unrolled :])
        return x, sums + doubled[0] * sums[-1]


@st.composite
def _stacks(draw: st.DrawFn) -> tuple[Layers, str]:
    layers, text = 0, ""
    for _ in range(draw(st.integers(1, 3))):
        count, policy = draw(st.integers(1, 3)), draw(st.sampled_from(POLICIES))
        group = draw(st.integers(0, 3)) if "offload" not in policy else 0
        text += (draw(st.sampled_from([" | ", " || "])) if text else "") + f"{count} x {policy}"
        text += f" in groups of {group}" if group else ""
        layers += count
    unrolled = draw(st.integers(0, layers))
    return Layers(unrolled, layers - unrolled, draw(st.booleans()), draw(st.sampled_from([1, 2]))), text


@pytest.mark.usefixtures("x64")
@settings(max_examples=6, derandomize=True, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@example((Layers(2, 4, False, 1), "6 x full in groups of 6"))
@example((Layers(0, 5, True, 1), "2 x full | 3 x everything"))
@example((Layers(0, 7, True, 1), "5 x full in groups of 2 | 2 x offload_inputs"))
@given(_stacks())
def test_random_layers_compute_what_the_plain_function_computes(drawn: tuple[Layers, str]) -> None:
    model, policies = drawn
    x, factors = values(3, 4), 1 + values(model.unrolled + model.scanned, seed=1)
    keys = {"dropout": jax.random.key(2)}
    shapes = jax.eval_shape(model.init, {"params": jax.random.key(0), **keys}, x, factors)
    made = jax.tree.map(lambda leaf: values(*leaf.shape, seed=3), shapes)

    def loss(params: Any, x: Any, factors: Any) -> Any:
        variables = {"params": params, "statistics": made["statistics"]}
        (out, sums), written = model.apply(variables, x, factors, rngs=keys, mutable=["statistics"])
        return jnp.sum(jnp.sin(out)) + jnp.sum(sums * jnp.arange(1.0, 1 + len(sums))), written

    fn = rj.checkpoint_blocks(loss, {Layer: policies})
    run, plain = (
        jax.jit(jax.value_and_grad(function, argnums=(0, 1, 2), has_aux=True))(made["params"], x, factors)
        for function in (fn, loss)
    )
    assert_same(run, plain)
