"""Adapters beside frozen kernels: their values, the trained parameters, checkpoints, scanned and unrolled."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import remat_jax as rj
from examples.models import lora
from remat_jax.cost.count import flops
from tests.plan_models import WIDTH, MlpLayer, MlpStack

LAYERS, RANK, ROWS = 2, 3, 5


def job(*, scan: bool) -> tuple[rj.Workload, Any, jax.Array]:
    """A stack with non-zero adapters as a workload, its parameters and its input, in float64."""
    random, model = np.random.default_rng(0), MlpStack(scan, LAYERS)
    x = jnp.asarray(random.normal(size=(ROWS, WIDTH)))
    shapes = jax.eval_shape(model.init, jax.random.key(0), x)
    shapes = jax.eval_shape(lambda params: lora.with_adapters(jax.random.key(0), params, ["*/up", "*/down"], RANK), shapes)
    params = jax.tree.map(lambda leaf: jnp.asarray(0.2 * random.normal(size=leaf.shape)), shapes)

    def loss(params: Any, x: jax.Array) -> jax.Array:
        with lora.adapters():
            return jnp.mean(jnp.square(jnp.asarray(model.apply(params, x))))

    return rj.Workload(loss, params, (x,), MlpLayer, trainable=lora.TRAINED), params, x


def merged(params: Any) -> Any:
    """The same model without adapters, with the adapters added to its kernels."""
    if "lora_a" in params:
        return {"kernel": params["kernel"] + jnp.einsum("...ir,...ro->...io", params["lora_a"], params["lora_b"])}
    return {name: merged(leaf) for name, leaf in params.items()}


def flat(params: Any) -> dict[str, Any]:
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in jax.tree.leaves_with_path(params)}


@pytest.mark.parametrize(("policy", "scan"), [("off", True), ("full", True), ("full", False)])
def test_loss_and_gradients_are_those_of_kernels_that_have_the_product_added(policy: str, scan: bool, x64: None) -> None:
    work, params, x = job(scan=scan)
    model, leaves = MlpStack(scan, LAYERS), flat(params)

    def reference(params: Any) -> jax.Array:
        return jnp.mean(jnp.square(jnp.asarray(model.apply(params, x))))

    expected, of_merged = jax.jit(jax.value_and_grad(reference))(merged(params))
    assert abs(float(reference(params)) / float(expected) - 1) > 0.01  # otherwise the test would show nothing
    step, of_kernels = work.step(policy), flat(of_merged)
    trained, frozen = ({path: leaves[path] for path in part} for part in step.arguments[:2])
    assert set(trained) == {path for path in leaves if "lora_" in path} and len(trained) == (4 if scan else 4 * LAYERS)
    value, gradients = jax.jit(step.function)(trained, frozen, x)
    assert float(value) == pytest.approx(float(expected), rel=1e-12)
    for path in {path.rpartition("/")[0] for path in trained}:
        kernel, first, second = of_kernels[f"{path}/kernel"], trained[f"{path}/lora_a"], trained[f"{path}/lora_b"]
        np.testing.assert_allclose(gradients[f"{path}/lora_a"], kernel @ second.swapaxes(-1, -2), rtol=1e-9, atol=1e-13)
        np.testing.assert_allclose(gradients[f"{path}/lora_b"], first.swapaxes(-1, -2) @ kernel, rtol=1e-9, atol=1e-13)


@pytest.mark.parametrize("policy", ["off", "full"])
def test_no_product_is_made_for_the_gradient_of_a_frozen_kernel(policy: str, x64: None) -> None:
    work, _, _ = job(scan=True)
    counted = []
    for trainable in (None, lora.TRAINED):
        step = rj.Workload(work.loss, work.params, work.batch, MlpLayer, trainable=trainable).step(policy)
        counted.append(flops(step.function, *step.arguments))
    # Two kernels per layer, each the product of its input and of its output's cotangent.
    assert counted[0] - counted[1] == LAYERS * 2 * (2 * ROWS * WIDTH * 4 * WIDTH)


def test_adapters_begin_without_effect_and_have_the_kernels_dtype() -> None:
    kernel = jnp.ones((LAYERS, 64, 6), jnp.bfloat16)
    adapted = lora.with_adapters(jax.random.key(0), {"a": {"up": {"kernel": kernel}, "down": {"kernel": kernel}}}, ["*/up"], 4)
    assert set(adapted["a"]["down"]) == {"kernel"}
    first, second = (adapted["a"]["up"][name] for name in ("lora_a", "lora_b"))
    assert (first.shape, second.shape) == ((LAYERS, 64, 4), (LAYERS, 4, 6))
    assert first.dtype == second.dtype == kernel.dtype
    assert not second.any() and 0.1 < float(jnp.abs(first).max()) <= 1 / 8


def test_wrong_use_is_told() -> None:
    params = {"a": {name: {"kernel": jnp.ones((2, 2))} for name in ("up", "down")}}
    with pytest.raises(ValueError, match="rank=0: expected at least 1"):
        lora.with_adapters(jax.random.key(0), params, ["*/up"], 0)
    with pytest.raises(ValueError, match=r"modules: '\*/side' matches no module with a kernel; there are a/up, a/down"):
        lora.with_adapters(jax.random.key(0), params, ["*/up", "*/side"], 4)


def test_a_layer_that_adds_no_adapters_is_named_when_it_has_some() -> None:
    conv, x = nn.Conv(4, (3,), name="patches"), jnp.ones((2, 5, 3))
    params = lora.with_adapters(
        jax.random.key(0), {"params": {"patches": conv.init(jax.random.key(0), x)["params"]}}, ["*patches"], 2
    )
    with lora.adapters(), pytest.raises(TypeError, match="is a Conv with adapters, and only nn.Dense adds them"):
        conv.apply({"params": params["params"]["patches"]}, x)


def test_the_result_keeps_the_dtype_of_the_layer_and_the_input_may_have_its_name() -> None:
    dense, x = nn.Dense(4, dtype=jnp.bfloat16), jnp.ones((2, 3))
    params = lora.with_adapters(jax.random.key(0), {"params": {"up": dense.init(jax.random.key(0), x)["params"]}}, ["*up"], 2)
    layer_params = jax.tree.map(jnp.ones_like, params["params"]["up"])
    with lora.adapters():
        output = dense.apply({"params": layer_params}, inputs=x)
    assert output.dtype == jnp.bfloat16
    # Three inputs of one layer through the kernel, its bias, and two factors of rank two.
    np.testing.assert_array_equal(np.asarray(output, np.float32), 3 + 1 + 3 * 2)
