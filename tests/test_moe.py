"""The decoder with experts: routing against its definition, gradients in every mode, tokens over capacity."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import remat_jax as rj
from examples.models import moe
from examples.moe_235b import by_expert, job_on
from remat_jax import compat
from remat_jax.memory.step_time.collectives import executed
from remat_jax.mesh import as_mesh

CONFIG = moe.MoeConfig(vocab_size=32, hidden_size=16, intermediate_size=24, num_experts=4, num_active=2, capacity_factor=9.0)
ROWS, TOKENS = 2, 6


def dense(params, x, config, capacity):
    """Every token through each of its experts, one by one, in NumPy; and the balance."""
    chances = np.exp(x @ params["router"]["kernel"])
    chances /= chances.sum(axis=-1, keepdims=True)
    out, sent = np.zeros_like(x), np.zeros(config.num_experts)
    for row in range(ROWS):
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
    x = jax.random.normal(jax.random.key(1), (ROWS, TOKENS, config.hidden_size), jnp.float64)
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


def test_gradients_are_the_same_under_a_policy(x64):
    model = moe.Moe(CONFIG, True, jnp.float64)
    tokens = jax.random.randint(jax.random.key(2), (ROWS, TOKENS), 0, CONFIG.vocab_size)
    params = jax.jit(model.init)(jax.random.key(0), tokens)

    def loss(params):
        logits, balance = model.apply(params, tokens)
        return (logits**2).mean() + balance

    under = rj.checkpoint_blocks(loss, {moe.MoeBlock: "save: *gate_proj*; offload: @inputs, *down_proj*"})
    plain, gradients = jax.jit(lambda params: [jax.grad(fn)(params) for fn in (loss, under)])(params)
    for leaf, expected in zip(jax.tree.leaves(gradients), jax.tree.leaves(plain), strict=True):
        assert float(jnp.abs(expected).max()) > 0, "every expert and the router are trained"
        np.testing.assert_allclose(leaf, expected, rtol=1e-12, atol=1e-13 * float(jnp.abs(expected).max()))


def test_experts_are_divided_over_a_host_and_their_rest_over_hosts():
    config = moe.MoeConfig(vocab_size=64, hidden_size=64, intermediate_size=32, num_experts=16, num_active=2)
    job = job_on(2, config, length=8, dtype=jnp.float32)
    assert job.mesh == as_mesh("data=2,fsdp=8") and job.batch[0].shape == (16, 8)
    trained = job.step("full").local_arguments[0]
    assert trained["layers"]["mlp"]["gate_proj"].shape == (2, 16 // 8, 64, 32 // 2)
    assert trained["layers"]["mlp"]["router"]["kernel"].shape == (2, 64 // 16, 16)
    assert trained["embed"]["embedding"].shape == (64, 4)
    assert by_expert(16)("layers/input_norm/scale", jax.ShapeDtypeStruct((2, 64), jnp.float32))[-1] == ("data", "fsdp")


@pytest.mark.skipif(not compat.gpu_compiler_installed(), reason="needs XLA's GPU compiler")
def test_devices_gather_no_tokens_that_are_not_theirs():
    config = moe.MoeConfig(vocab_size=64, hidden_size=64, intermediate_size=32, num_experts=16, num_active=2)
    job = job_on(2, config, length=64, dtype=jnp.float32)
    sent = executed(rj.measure(job, "off", "2x8xh200").collectives)
    # Under `off` the places of tokens are kept between the passes; the partitioner then does not know what they are.
    assert sent["all-gather"][1] < 16 * 64 * config.num_active * 64 * 4, "less than all copies of all tokens, once"
