"""The doctor on kept and recomputed arrays: each trap is planted, found and cured; right workloads raise no alarm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

import remat_jax as rj
from examples.models import linen as linen_models
from examples.models import nnx as nnx_models
from remat_jax import compat, doctor
from remat_jax.report import format_bytes
from tests.small_models import Attention, Mlp, Stack, make_loss, times
from tests.test_doctor import POLICIES, ROWS, WIDTH, job, traps
from tests.workloads import struct


@jax.custom_vjp
def attention(q: Any, k: Any, v: Any) -> Any:
    return attention_forward(q, k, v)[0]


def attention_forward(q: Any, k: Any, v: Any) -> Any:
    """Attention over blocks of keys in a scan, like flash attention: the output and its log-sum-exp."""

    def step(carry: Any, block: Any) -> Any:
        total, out = carry
        weights = jnp.exp(q @ block[0].T)
        return (total + weights.sum(-1), out + weights @ block[1]), None

    blocks = (k.reshape(2, -1, k.shape[-1]), v.reshape(2, -1, v.shape[-1]))
    (total, out), _ = jax.lax.scan(step, (jnp.zeros(q.shape[0]), jnp.zeros_like(q)), blocks)
    out, lse = checkpoint_name(out / total[:, None], "kernel_out"), checkpoint_name(jnp.log(total), "attention_lse")
    return out, (q, k, v, out, lse)


def attention_backward(kept: Any, ct: Any) -> Any:
    q, k, v, out, lse = kept
    weights = jnp.exp(q @ k.T - lse[:, None])
    dscores = weights * (ct @ v.T - (ct * out).sum(-1, keepdims=True))
    return dscores @ k, dscores.T @ q, weights.T @ ct


attention.defvjp(attention_forward, attention_backward)


class Flash(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        q, k, v = (nn.Dense(WIDTH, name=name)(x) for name in "qkv")
        return nn.Dense(WIDTH, name="out")(checkpoint_name(attention(q, k, v), "attention_out"))


def test_flash_attentions_output_kept_without_its_log_sum_exp_runs_the_kernel_again():
    workload = job(Flash(), Flash)
    alone = "save: attention_out"
    diagnosis = doctor(workload, alone)
    assert traps(diagnosis) == ["kernel_run_again"]
    both = "save: attention_out, attention_lse"
    assert doctor(workload, both).ok
    assert doctor(workload, "full").ok
    loops = {
        policy: times("scan", jax.grad(workload.with_policy(workload.loss, policy)), workload.params, *workload.batch)
        for policy in ("off", "full", alone, both)
    }
    assert loops == {"off": 1, "full": 2, alone: 2, both: 1}


class Half(nn.Module):
    """Parameters in float32 that are cast before use."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        return x + nn.Dense(WIDTH, dtype=jnp.bfloat16, use_bias=False)(jnp.tanh(x)).astype(x.dtype)


def test_the_same_under_a_policy_of_jaxs_needs_the_names_of_the_derivative_rule():
    """A name behind the kernel saves another array than the one the kernel's rule reads."""

    def checkpointed(*names: str) -> rj.Workload:
        return job(nn.remat(Flash, policy=POLICIES.save_only_these_names(*names))(), Flash)

    wrong = [checkpointed("attention_out"), checkpointed("attention_out", "attention_lse"), checkpointed("kernel_out")]
    right = checkpointed("kernel_out", "attention_lse")
    assert [traps(doctor(workload, "off")) for workload in wrong] == [["kernel_run_again"]] * 3
    assert doctor(right, "off").ok
    loops = [times("scan", jax.grad(workload.loss), workload.params, *workload.batch) for workload in (*wrong, right)]
    # The new rematerialisation keeps nothing that a derivative rule names (docs/limits.md).
    assert loops == [2, 2, 2, 2 if compat.remat3() else 1]


@pytest.mark.parametrize("scan", [True, False])
def test_copies_of_parameters_that_a_policy_keeps(scan):
    workload = job(Stack(Half, 3, scan), Half)
    diagnosis = doctor(workload, "everything")
    assert traps(diagnosis) == ["parameter_kept"]
    assert format_bytes(WIDTH * WIDTH * 2) in diagnosis.findings[0].problem
    cured = "recompute: @primitive:convert_element_type; save: *"
    assert cured.split(";")[0] in diagnosis.findings[0].remedy
    assert doctor(workload, cured).ok
    assert doctor(workload, "save: */Dense_0:convert_element_type#0; save: @dots").ok, "a plan saves it on purpose"
    kernels = [
        sum(row.bytes for row in rj.residuals(workload, policy) if row.shape[-2:] == (WIDTH, WIDTH) and row.action == "save")
        for policy in ("everything", cured)
    ]
    read = 3 if scan else 2  # the first block's is not, because the batch has no gradient
    assert kernels == [read * WIDTH * WIDTH * 2, 0]
    assert doctor(workload, "dots").ok


class Keyless(nn.Module):
    keyless: bool

    @nn.compact
    def __call__(self, x: Any) -> Any:
        key = jax.random.key(3)
        noise = jax.lax.rng_uniform(0.0, 1.0, x.shape) if self.keyless else jax.random.uniform(key, x.shape)
        return nn.Dense(WIDTH, name="dense")(x) * noise


def gradient_over_value(workload: rj.Workload, policy: str) -> float:
    """A function that is linear in its parameters is 1 if the forward and the backward pass read the same numbers."""
    random = np.random.default_rng(0)
    params = jax.tree.map(lambda leaf: jnp.asarray(random.uniform(size=leaf.shape), leaf.dtype), workload.params)
    x = jnp.ones(workload.batch[0].shape)
    value, gradient = jax.jit(jax.value_and_grad(workload.with_policy(workload.loss, policy)))(params, x)
    paired = sum(jnp.vdot(a, b) for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(gradient), strict=True))
    return float(paired / value)


def test_random_numbers_without_a_key_are_others_in_the_recomputation():
    def workload(keyless: bool) -> rj.Workload:
        model = Keyless(keyless)
        params = jax.eval_shape(model.init, jax.random.key(0), struct(ROWS, WIDTH))
        return rj.Workload(lambda p, x: model.apply(p, x).sum(), params, (struct(ROWS, WIDTH),), Keyless)

    wrong, right = workload(True), workload(False)
    assert traps(doctor(wrong, "full")) == ["keyless_random"]
    assert abs(gradient_over_value(wrong, "full") - 1) > 1e-3
    for cured, policy in ((wrong, "save: @primitive:rng_uniform"), (right, "full")):
        assert doctor(cured, policy).ok
        assert abs(gradient_over_value(cured, policy) - 1) < 1e-5


# No false alarm on right workloads, each under a suitable policy.


TOKENS = jax.ShapeDtypeStruct((2, 8), jnp.int32)


def stack(block: Any = Mlp, *, scanned: bool = False, layers: int = 3, **options: Any) -> rj.Workload:
    loss, params, x = make_loss(block, scanned=scanned, layers=layers)
    return rj.Workload(loss, params, (x,), block, **options)


def decoder(**fields: Any) -> rj.Workload:
    model = linen_models.ByteDecoder(d_model=16, nhead=2, num_layers=3, max_len=8, **fields)
    params = jax.eval_shape(model.init, jax.random.key(0), TOKENS)["params"]

    def loss(params: Any, tokens: Any, targets: Any) -> Any:
        return model.apply({"params": params}, tokens, targets, method="loss")

    return rj.Workload(loss, params, (TOKENS, TOKENS), linen_models.DecoderLayer, optimizer=optax.adam(1e-3))


def nnx_decoder(**fields: Any) -> rj.Workload:
    model = nnx.eval_shape(
        lambda: nnx_models.ByteDecoder(d_model=16, nhead=2, num_layers=3, max_len=8, rngs=nnx.Rngs(0), **fields)
    )
    return rj.Workload.from_nnx(model, lambda model, *batch: model.loss(*batch), (TOKENS, TOKENS), nnx_models.DecoderLayer)


def with_dropout() -> rj.Workload:
    class Block(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            return x + nn.Dropout(0.5, deterministic=False)(nn.Dense(4)(jnp.tanh(x)))

    model, x, key = Stack(Block), struct(2, 4), jax.random.key(0)
    params = jax.eval_shape(lambda key: model.init({"params": key, "dropout": key}, jnp.ones((2, 4))), key)
    return rj.Workload(lambda p, x, key: model.apply(p, x, rngs={"dropout": key}).sum(), params, (x, key), Block)


CLEAN: dict[str, tuple[Callable[[], rj.Workload], Any]] = {
    "scanned": (lambda: stack(Attention, scanned=True), "full"),
    "a policy of JAX's": (lambda: stack(Attention), POLICIES.dots_with_no_batch_dims_saveable),
    "a mapping that keeps the last block": (
        lambda: stack(optimizer=optax.adam(1e-3)),
        {"layer_2": "full", Mlp: "offload_inputs"},
    ),
    "decoder, scanned, offloaded": (lambda: decoder(scan=True), "offload_dot_with_no_batch_dims"),
    "NNX, scanned, everything": (lambda: nnx_decoder(scan=True), "everything"),  # keeps a form of its norms' scales
    "NNX, unrolled, by name": (nnx_decoder, "offload: *ffn/up:dot_general*; save: @dots_with_no_batch_dims"),
    "dropout": (with_dropout, "full"),
    "nn.remat": (lambda: stack(nn.remat(Attention, policy=POLICIES.dots_saveable), scanned=True), "off"),
    "no checkpoint": (stack, "off"),
}


@pytest.mark.parametrize("name", CLEAN)
def test_a_clean_workload_has_no_finding(name):
    make, policy = CLEAN[name]
    diagnosis = rj.doctor(make(), policy)
    assert diagnosis.ok, str(diagnosis)
    assert (diagnosis.regions > 0) == (name != "no checkpoint")
