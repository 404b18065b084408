"""The example models and text: adapters, experts, attention in chunks and precision, by their definitions."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import remat_jax as rj
from examples.models import lora, moe
from examples.models import weights as w
from examples.models.diffusion import long_attention, time_features
from examples.models.functions import cross_entropy
from remat_jax.cost.count import flops
from tests.plan_models import WIDTH, MlpLayer, MlpStack


def test_stacking_orders_layers_by_number_and_undoes_unstacking() -> None:
    tree = {f"layers_{i}": {"norm1": {"scale": np.full(2, i)}} for i in range(12)} | {"head": {"bias": np.ones(1)}}
    stacked = w.stack_layers(tree)
    assert stacked["layers"]["norm1"]["scale"][:, 0].tolist() == list(range(12))
    assert jax.tree.map(np.array_equal, w.unstack_layers(stacked), tree) == jax.tree.map(lambda _: True, tree)


def test_cross_entropy_keeps_one_array_of_the_logits_size() -> None:
    logits, targets = jnp.ones((4, 6, 32)), jnp.zeros((4, 6), jnp.int32)
    _, pullback = jax.vjp(lambda logits: cross_entropy(logits, targets), logits)
    assert sorted(leaf.size for leaf in jax.tree.leaves(pullback))[-2:] == [24, 24 * 32]


def test_attention_in_chunks_keeps_no_scores() -> None:
    """A chunk's scores, 64 × 64 for each of 2 heads, are not kept after the forward pass."""
    arrays = [jax.ShapeDtypeStruct((1, 64, 2, 4), jnp.float32)] * 3

    def largest(chunk: int | None) -> int:
        _, pullback = jax.eval_shape(lambda *x: jax.vjp(lambda *x: long_attention(*x, chunk=chunk), *x), *arrays)
        return max(leaf.size for leaf in jax.tree.leaves(pullback))

    assert largest(None) == 2 * 64 * 64 and largest(16) == 64 * 2 * 4


@pytest.mark.parametrize("jit", [False, True])
def test_exact_angles_far_out_are_those_of_float64(jit: bool) -> None:
    times = np.array([0.0, 0.3, 17.25, 312.0, 999.9], np.float32)
    frequencies = 10000.0 ** -(np.arange(128) / 128)
    angles = times.astype(np.float64)[:, None] * frequencies
    expected = np.concatenate([np.cos(angles), np.sin(angles)], axis=-1)

    def error(exact: bool) -> float:
        features = jax.jit(time_features, static_argnums=1, static_argnames="exact") if jit else time_features
        return float(np.abs(features(jnp.asarray(times), 256, exact=exact) - expected).max())

    assert error(exact=True) < 1e-6 < 3e-5 < error(exact=False)


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


CONFIG = moe.MoeConfig(vocab_size=32, hidden_size=16, intermediate_size=24, num_experts=4, num_active=2, capacity_factor=9.0)
SEQUENCES, TOKENS = 2, 6


def dense(params, x, config, capacity):
    """Every token through each of its experts, one by one, in NumPy; and the balance."""
    chances = np.exp(x @ params["router"]["kernel"])
    chances /= chances.sum(axis=-1, keepdims=True)
    out, sent = np.zeros_like(x), np.zeros(config.num_experts)
    for row in range(SEQUENCES):
        taken = np.zeros(config.num_experts, int)
        for token in range(TOKENS):
            chosen = np.argsort(-chances[row, token], kind="stable")[: config.num_active]
            weights = chances[row, token, chosen] / chances[row, token, chosen].sum()
            sent[chosen] += 1
            for expert, weight in zip(chosen, weights, strict=True):
                taken[expert] += 1
                if taken[expert] > capacity:
                    continue
                gate, up = (x[row, token] @ params[name][expert] for name in ("gate_proj", "up_proj"))
                out[row, token] += weight * (gate / (1 + np.exp(-gate)) * up) @ params["down_proj"][expert]
    return out, config.num_experts * (sent / sent.sum() * chances.mean(axis=(0, 1))).sum()


@pytest.mark.parametrize("factor", [9.0, 0.5])
def test_tokens_go_to_their_experts_as_far_as_there_is_room(factor, x64):
    config = moe.MoeConfig(**{**vars(CONFIG), "capacity_factor": factor})
    x = jax.random.normal(jax.random.key(1), (SEQUENCES, TOKENS, config.hidden_size), jnp.float64)
    layer = moe.Experts(config, jnp.float64)
    params = jax.jit(layer.init)(jax.random.key(0), x)["params"]
    params["router"]["kernel"] *= 3
    capacity = config.capacity(TOKENS)
    assert capacity == {9.0: TOKENS, 0.5: 2}[factor]
    output, balance = jax.jit(layer.apply)({"params": params}, x)
    expected, of_definition = dense(jax.tree.map(np.asarray, params), np.asarray(x), config, capacity)
    np.testing.assert_allclose(output, expected, rtol=1e-12, atol=1e-13)
    np.testing.assert_allclose(balance, of_definition, rtol=1e-12)
    without, _ = dense(jax.tree.map(np.asarray, params), np.asarray(x), config, TOKENS)
    assert (np.abs(without - expected).max() > 1e-3) == (factor == 0.5), "some find no room, or none"
