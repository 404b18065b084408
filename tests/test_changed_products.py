"""The changed losses that the doctor compiles before it advises attention in a kernel or a head in chunks."""

from __future__ import annotations

import math
import re
from types import SimpleNamespace
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

import remat_jax as rj
from remat_jax import compat
from remat_jax.core.walk import equations
from remat_jax.diagnosis.beyond import attention_in_a_kernel, compiled_advice
from remat_jax.errors import UnsupportedError
from remat_jax.hardware import target as target_named
from remat_jax.memory.advice import HEAD, Advice

ROWS, LENGTH, WIDTH, HEADS = 2, 64, 32, 4


class Layer(nn.Module):
    """Attention with two queries for each key, in the form of `einsum`."""

    @nn.compact
    def __call__(self, x: Any, _: Any = None) -> Any:
        groups = HEADS // 2
        query = nn.DenseGeneral((groups, 2, WIDTH // HEADS))(x)
        key, value = (nn.DenseGeneral((groups, WIDTH // HEADS))(x) for _ in range(2))
        weights = jax.nn.softmax(jnp.einsum("btkgd,bskd->bkgts", query, key))
        mixed = jnp.einsum("bkgts,bskd->btkgd", weights, value).reshape(x.shape)
        return x + nn.Dense(WIDTH)(mixed), None


class Decoder(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        return nn.scan(Layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=3)()(x, None)[0]


def job() -> rj.Workload:
    """A scanned decoder."""
    x = jax.ShapeDtypeStruct((ROWS, LENGTH, WIDTH), jnp.float32)
    params = jax.eval_shape(Decoder().init, jax.random.key(0), x)
    return rj.Workload(lambda params, x: jnp.square(Decoder().apply(params, x)).mean(), params, (x,), Layer)


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")
@pytest.mark.parametrize("policy", ["off", "full", "save: */DenseGeneral_0:*"])
def test_a_changed_attention_makes_no_scores(policy: str) -> None:
    """With two queries for each key, in a scan; the kernel's own tiles are not counted, because they are not in memory."""
    workload, scores = job(), ROWS * HEADS * LENGTH**2
    loss = attention_in_a_kernel(workload, policy)
    jaxpr = compat.dce(jax.make_jaxpr(jax.grad(loss))(workload.params, *workload.batch))
    made = [eqn for eqn in equations(jaxpr) for atom in eqn.outvars if math.prod(atom.aval.shape) == scores]
    assert not made and any(eqn.primitive.name == "pallas_call" for eqn in equations(jaxpr))


def test_a_loss_without_attention_is_refused() -> None:
    dense = rj.Workload(lambda w, x: (x @ w).mean(), jnp.ones((4, 4)), (jnp.ones((2, 4)),), "*")
    for policy in ("off", "full"):
        with pytest.raises(UnsupportedError, match="no attention whose scores are read only to mix values"):
            jax.eval_shape(attention_in_a_kernel(dense, policy), dense.params, *dense.batch)


def test_advice_for_a_head_that_cannot_run_in_chunks_names_the_operation() -> None:
    """A contrastive loss compares each row with all others."""

    def loss(w: Any, x: Any, y: Any) -> Any:
        logits = x @ w @ y.T
        return -(jax.nn.log_softmax(logits) + jax.nn.log_softmax(logits, 0)).trace() / len(x)

    rows = jnp.ones((64, 16))
    workload = rj.Workload(loss, jnp.ones((16, 16)), (rows, rows), "*")
    report: Any = SimpleNamespace(device_bytes=2**21, advice=(Advice(HEAD, 2**20, "", "1.0 MiB are logits"),))
    (advice,) = compiled_advice(workload, "off", report, target_named("h200"), 60)
    assert not advice.compiled and advice.bytes == 2**20
    assert re.sub(r" at \S+ \(\S+\)", "", advice.why) == (
        "1.0 MiB are logits. The change was not compiled: the head dot_general float32[64, 64] cannot run in chunks: "
        "reduce_max float32[64] combines tokens of float32[64, 64]"
    )
