"""Adapters beside frozen kernels: what they compute, what is trained and kept, under checkpoints, in scans and out of them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import remat_jax as rj
from examples.models import lora
from examples.models.wan import Wan, WanBlock, WanConfig
from remat_jax.graph.count import flops

LAYERS, RANK = 2, 2
CONFIG = WanConfig(num_layers=LAYERS)
INPUTS = {"latents": (2, 2, 4, 6, 3), "text": (2, 5, 20), "time": (2,)}
ADAPTED = ["*_attention/*", "*/mlp/fc?"]


def parts(*, scan: bool) -> tuple[Any, Any, dict[str, jax.Array]]:
    """A model, its parameters with adapters of which none is zero, and its inputs, in float64."""
    random, model = np.random.default_rng(0), Wan(CONFIG, scan=scan, param_dtype=jnp.float64)
    inputs = {name: jnp.asarray(random.normal(size=shape)) for name, shape in INPUTS.items()}
    params = lora.with_adapters(jax.random.key(1), model.init(jax.random.key(0), **inputs), ADAPTED, RANK)
    return model, jax.tree.map(lambda leaf: leaf + 0.1 * random.normal(size=leaf.shape), params), inputs


def job(*, scan: bool) -> tuple[rj.Workload, Any]:
    model, params, inputs = parts(scan=scan)

    def loss(params: Any, inputs: Any) -> jax.Array:
        with lora.adapters():
            return jnp.mean(jnp.square(model.apply(params, **inputs)))

    return rj.Workload(loss, params, (inputs,), WanBlock, trainable=lora.TRAINED), (params, inputs)


def merged(params: Any) -> Any:
    """The same model without adapters, whose kernels have them added."""
    if "lora_a" in params:
        kernel = params["kernel"] + jnp.einsum("...ir,...ro->...io", params["lora_a"], params["lora_b"])
        return {"kernel": kernel, **{name: leaf for name, leaf in params.items() if name == "bias"}}
    return {name: merged(leaf) if isinstance(leaf, dict) else leaf for name, leaf in params.items()}


@pytest.mark.parametrize("scan", [False, True])
def test_loss_and_gradients_are_those_of_a_model_whose_kernels_have_the_product_added(scan: bool, x64: None) -> None:
    work, (params, inputs) = job(scan=scan)
    model, leaves = Wan(CONFIG, scan=scan, param_dtype=jnp.float64), flat(params)

    def reference(params: Any) -> jax.Array:
        return jnp.mean(jnp.square(model.apply(params, **inputs)))

    expected, of_merged = jax.jit(jax.value_and_grad(reference))(merged(params))
    assert abs(float(jax.jit(reference)(params)) - float(expected)) > 1e-3  # or it would show nothing
    of_kernels = flat(of_merged)
    for policy in ("off", "full"):
        step = work.step(policy)
        trained, frozen = ({path: leaves[path] for path in part} for part in step.arguments[:2])
        assert set(trained) == {path for path in leaves if "lora_" in path}
        value, gradients = jax.jit(step.function)(trained, frozen, inputs)
        assert float(value) == pytest.approx(float(expected), rel=1e-12)
        for path in {path.rpartition("/")[0] for path in trained}:
            kernel, first, second = of_kernels[f"{path}/kernel"], trained[f"{path}/lora_a"], trained[f"{path}/lora_b"]
            chained = kernel @ second.swapaxes(-1, -2), first.swapaxes(-1, -2) @ kernel
            for name, by_hand in zip(("lora_a", "lora_b"), chained, strict=True):
                np.testing.assert_allclose(gradients[f"{path}/{name}"], by_hand, rtol=1e-9, atol=1e-12)


def flat(params: Any) -> dict[str, Any]:
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in jax.tree.leaves_with_path(params)}


@pytest.mark.parametrize("policy", ["off", "full"])
def test_no_product_is_made_for_the_gradient_of_a_frozen_kernel(policy: str, x64: None) -> None:
    """Beside those of the blocks, that of what stands before and behind them is saved: the rest."""
    work, _ = job(scan=True)
    everything = rj.Workload(work.loss, work.params, work.batch, WanBlock)
    fewer = flops(everything.step(policy).function, *everything.step(policy).arguments) - flops(
        work.step(policy).function, *work.step(policy).arguments
    )
    tokens, words, width, hidden = 2 * 2 * 2 * 3, 2 * 5, CONFIG.hidden_size, CONFIG.intermediate_size
    rows = {"self": 4 * tokens, "cross": 2 * tokens + 2 * words}
    in_blocks = LAYERS * 2 * (sum(rows.values()) * width * width + 2 * tokens * width * hidden)
    assert in_blocks <= fewer < 1.5 * in_blocks


def test_adapters_begin_without_effect_and_have_the_kernels_dtype() -> None:
    kernel = jnp.ones((LAYERS, 64, 6), jnp.bfloat16)
    found = lora.with_adapters(jax.random.key(0), {"a": {"up": {"kernel": kernel}, "down": {"kernel": kernel}}}, ["*/up"], 4)
    assert set(found["a"]["down"]) == {"kernel"}
    first, second = (found["a"]["up"][name] for name in ("lora_a", "lora_b"))
    assert (first.shape, second.shape, first.dtype, second.dtype) == (
        (LAYERS, 64, 4),
        (LAYERS, 4, 6),
        kernel.dtype,
        kernel.dtype,
    )
    assert not second.any() and 0.1 < float(jnp.abs(first).max()) <= 1 / 8
    with pytest.raises(ValueError, match="rank=0: expected at least 1"):
        lora.with_adapters(jax.random.key(0), found, ["*/up"], 0)
    with pytest.raises(ValueError, match=r"modules: '\*/side' matches no module with a kernel; there are a/up, a/down"):
        lora.with_adapters(jax.random.key(0), found, ["*/up", "*/side"], 4)
