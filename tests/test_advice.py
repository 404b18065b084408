"""Advice beyond the blocks: given where the problem is, absent where it is fixed, with the bytes that the fix frees."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import PartitionSpec as P

import remat_jax as rj
from remat_jax import compat
from remat_jax.core.softmax_products import softmax_products
from remat_jax.diagnosis.beyond import compiled_advice
from remat_jax.errors import InfeasibleBudget
from remat_jax.hardware import target as target_named
from remat_jax.memory.advice import (
    DTYPE,
    HEAD,
    MICRO,
    SCORES,
    STATE,
    Advice,
    micro_batches_divide,
)
from tests.workloads import struct

pytestmark = pytest.mark.skipif(not compat.gpu_compiler_installed(), reason="XLA's GPU compiler is not installed")

ROWS, LENGTH, WIDTH, HEADS = 4, 512, 128, 2


class Block(nn.Module):
    attention: str
    dtype: Any

    @nn.compact
    def __call__(self, x: Any) -> Any:
        dense = functools.partial(nn.Dense, use_bias=False, param_dtype=self.dtype, dtype=x.dtype)
        if self.attention != "none":
            q, k, v = (dense(WIDTH)(x).reshape(*x.shape[:2], HEADS, WIDTH // HEADS) for _ in range(3))
            if self.attention == "kernel":
                mixed = compat.attention_kernel()(q, k, v, segment_ids=None)
            else:
                mixed = jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(jnp.einsum("bthd,bshd->bhts", q, k)), v)
            x = x + mixed.reshape(x.shape)
        return x + dense(WIDTH)(nn.gelu(dense(4 * WIDTH)(x)))


class Decoder(nn.Module):
    vocabulary: int
    attention: str
    dtype: Any

    @nn.compact
    def __call__(self, tokens: Any) -> Any:
        x = nn.Embed(self.vocabulary, WIDTH, param_dtype=self.dtype)(tokens).astype(jnp.bfloat16)
        return Block(self.attention, self.dtype)(x)


def job(
    *,
    vocabulary: int = 256,
    attention: str = "none",
    dtype: Any = jnp.bfloat16,
    chunks: int = 1,
    rows: int = ROWS,
    length: int = LENGTH,
    **options: Any,
) -> rj.Workload:
    """A decoder of one block; its head is the embedding's table."""
    model, tokens = Decoder(vocabulary, attention, dtype), jax.ShapeDtypeStruct((rows, length), jnp.int32)
    alike = Decoder(vocabulary, "none" if attention == "none" else "scores", dtype)
    params = jax.eval_shape(alike.init, jax.random.key(0), tokens)

    def head_loss(table: Any, hidden: Any, targets: Any) -> Any:
        logits = (hidden @ table.T.astype(hidden.dtype)).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets).sum()

    def loss(params: Any, tokens: Any, targets: Any) -> Any:
        table = params["params"]["Embed_0"]["embedding"]
        chunked = rj.in_chunks(head_loss, chunks, axis=(None, 1, 1))
        return chunked(table, model.apply(params, tokens), targets) / targets.size

    return rj.Workload(loss, params, (tokens, tokens), Block, **{"optimizer": optax.adam(1e-3)} | options)


def advised(workload: rj.Workload, policy: str = "full", target: str = "h200") -> tuple[int, dict[str, Advice]]:
    """The device bytes of the step, and its advice."""
    report = rj.measure(workload, policy, target)
    freed = [advice.bytes for advice in report.advice]
    assert freed == sorted(freed, reverse=True)
    assert all(advice.bytes >= 0.02 * report.device_bytes and not advice.compiled for advice in report.advice)
    return report.device_bytes, {advice.what: advice for advice in report.advice}


def assert_mended(before: rj.Workload, after: rj.Workload, change: str, error: float, **asked: Any) -> Advice:
    """Assert that `change` is advised for `before` and not for `after`, and that its freed bytes are right within `error`."""
    (need, advice), (left, advice_after) = advised(before, **asked), advised(after, **asked)
    assert advice[change].bytes == pytest.approx(need - left, rel=error) and need - left > 0.05 * need
    assert change not in advice_after
    return advice[change]


def assert_compiled_as(before: rj.Workload, after: rj.Workload, change: str, target: str) -> None:
    """Assert that the doctor's compiled bytes for `change` are those of `after`, a model written with the change."""
    report = rj.measure(before, "full", target)
    asked = dataclasses.replace(report, advice=tuple(each for each in report.advice if each.what == change))
    (advice,) = compiled_advice(before, "full", asked, target_named(target), 300)
    assert advice.compiled and advice.bytes == report.device_bytes - rj.measure(after, "full", target).device_bytes


def test_an_advice_whose_change_is_unknown_stays_an_estimate() -> None:
    """The unchanged step would free nothing, and the advice would be left out."""
    before = job(rows=2)
    advice = Advice("another change", 2**40, "", "")
    report = dataclasses.replace(rj.measure(before, "full", "cpu"), advice=(advice,))
    assert compiled_advice(before, "full", report, target_named("cpu"), 300) == (advice,)


def test_a_head_in_chunks() -> None:
    before = job(vocabulary=8192)
    advice = assert_mended(before, job(vocabulary=8192, chunks=8), HEAD, 0.02)
    assert "rj.in_chunks(head_loss, 8" in advice.how and "[4, 512, 8192]" in advice.why and "test_advice.py" in advice.why
    # The advice is printed with the report. The CPU target reports no buffers and gives none.
    assert "head in chunks: 80.5 MiB less (estimated)" in " ".join(str(rj.measure(before, "full", "h200")).split())
    assert rj.measure(before, "full", "cpu").advice == ()


def test_the_gradient_of_a_head_that_is_as_large_as_its_logits_stays() -> None:
    """As many tokens as features: the logits have the shape of the parameters, whose gradient no chunk makes smaller."""
    shape = {"vocabulary": 8192, "rows": 1, "length": WIDTH, "optimizer": None, "dtype": jnp.float32}
    (need, advice), (left, advice_in_chunks) = advised(job(**shape)), advised(job(**shape, chunks=8))
    assert advice[HEAD].bytes == pytest.approx(need - left, rel=0.01) and 0 < need - left < 2 * WIDTH * 8192
    assert HEAD not in advice_in_chunks
    # In bfloat16 the chunks free less than their sum of gradients in float32 takes.
    assert HEAD not in advised(job(**shape | {"dtype": jnp.bfloat16}))[1]


def test_a_head_on_a_mesh_is_that_of_one_device() -> None:
    mesh = {"mesh": {"data": 2}, "shardings": (None, P("data"), P("data"))}
    before, after = (job(vocabulary=8192, chunks=chunks, **mesh) for chunks in (1, 8))
    assert_mended(before, after, HEAD, 0.05, target="2xh200")
    assert_compiled_as(before, after, HEAD, "2xh200")


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")
def test_attention_in_a_kernel() -> None:
    """The Pallas kernel stands for cuDNN's: neither computes the scores in memory."""
    before, after = job(attention="scores"), job(attention="kernel")
    advice = assert_mended(before, after, SCORES, 0.1)
    assert "[4, 2, 512, 512]" in advice.why and "dot_product_attention" in advice.how
    assert_compiled_as(before, after, SCORES, "h200")


def test_the_doctor_compiles_what_it_advises() -> None:
    work, offloaded = job(vocabulary=8192), job(vocabulary=8192, optimizer=rj.offload_optimizer(optax.adam(1e-3)))
    need, estimated = advised(work)
    left, advice_offloaded = advised(offloaded)
    compiled = {each.what: each for each in rj.doctor(work, "full", "h200").advice}
    assert {change: each.compiled for change, each in compiled.items()} == {HEAD: True, MICRO: True, STATE: True}
    assert compiled[HEAD].bytes == need - advised(job(vocabulary=8192, chunks=8))[0]
    assert compiled[STATE].bytes == need - left and STATE not in advice_offloaded
    assert estimated[MICRO].bytes == pytest.approx(compiled[MICRO].bytes, rel=0.02)
    # The estimate for a streamed update errs on the safe side.
    assert 0.75 * compiled[STATE].bytes < estimated[STATE].bytes <= compiled[STATE].bytes


def test_parameters_in_bfloat16_are_compiled_and_not_advised_for_a_loss_that_refuses_them() -> None:
    shape = {"vocabulary": 8192, "rows": 1, "length": 16}
    wide, refusing = (job(**shape, dtype=jnp.float32) for _ in range(2))
    narrow = job(**shape)
    assert_mended(wide, narrow, DTYPE, 0.2)
    loss = refusing.loss

    def of_float32(params: Any, *batch: Any) -> Any:
        if any(leaf.dtype != jnp.float32 for leaf in jax.tree.leaves(params)):
            raise RuntimeError("float32 is expected")
        return loss(params, *batch)

    refusing.loss = of_float32
    (compiled,) = (advice for advice in rj.doctor(wide, "full", "h200").advice if advice.what == DTYPE)
    assert compiled.compiled and "parameters are float32, and so are the gradients and the optimizer's state" in compiled.why
    assert compiled.bytes == rj.measure(wide, "full", "h200").device_bytes - rj.measure(narrow, "full", "h200").device_bytes
    assert DTYPE not in advised(refusing)[1]


def test_only_trained_parameters_have_gradients_and_optimizer_state() -> None:
    """16.5 MiB of parameters, of which 0.5 MiB are trained."""
    dtypes = {"dtype": jnp.float32, "trainable": "*Dense*"}
    advice = advised(job(vocabulary=32768, rows=1, length=16, **dtypes))[1][DTYPE]
    assert "16.5 MiB of parameters are float32, and so are the gradients" in advice.why
    assert advice.why.endswith("state of the 512.0 KiB that are trained")


def test_a_batch_that_cannot_be_divided_gets_no_advice_on_micro_batches() -> None:
    for rows, divides in ((1, False), (2, True), (3, False)):
        work = job(rows=rows)
        assert micro_batches_divide(work, work.step("off").local_arguments) is divides
    work = job()
    loss = work.loss
    assert MICRO in advised(work)[1]
    fixed = job()
    fixed.loss = lambda params, tokens, *rest: loss(params, tokens + jnp.zeros((ROWS, LENGTH), jnp.int32), *rest)
    assert MICRO not in advised(fixed)[1]


def attend(q: Any, keep: Any = lambda weights: weights) -> Any:
    return keep(jax.nn.softmax(q @ q.mT)) @ q


def test_a_budget_that_nothing_fits_is_answered_with_advice() -> None:
    with pytest.raises(InfeasibleBudget, match="Beyond the blocks: head in chunks: .* less .estimated.: rj.in_chunks"):
        rj.plan(job(vocabulary=8192), "40MiB", "h200")


def in_loops_and_calls(q: Any, kernel: Any) -> Any:
    x = jax.lax.scan(lambda x, _: (jax.jit(attend)(x), None), q, length=3)[0]
    x = x + jnp.tanh(x @ jnp.ones((8, 8)))  # no softmax
    return jax.nn.logsumexp(x @ kernel, axis=-1).sum()


def projected(x: Any, kernel: Any) -> Any:
    """As in a U-Net: 4 heads of 16 × 16 scores have as many elements as 64 positions of 16 features, and end in 16 too."""
    return jnp.sum(attend((x @ kernel)[:, ::4].reshape(2, 16, 4, 4).swapaxes(1, 2))) + jnp.sum(attend(x @ kernel))


def dropped(weights: Any) -> Any:
    return jnp.where(jax.random.bernoulli(jax.random.key(0), 0.9, weights.shape), weights / 0.9, 0)


def with_weights(q: Any) -> Any:
    weights: list[Any] = []
    return attend(q, lambda w: weights.append(w) or w).sum(), weights[-1]


SCORES_ALONE, HEAD_ALONE = {(False, (2, 16, 16))}, {(True, (2, 16, 50))}
WITH_KERNEL = (2, 16, 8), (8, 50)
# What a softmax reads, in the arrays of these shapes: whether it is a head, and its shape.
PRODUCTS: dict[str, tuple[Any, Any, set[tuple[bool, tuple[int, ...]]]]] = {
    "loops and calls": (in_loops_and_calls, WITH_KERNEL, SCORES_ALONE | HEAD_ALONE),
    "a head in chunks": (rj.in_chunks(in_loops_and_calls, 2, axis=(0, None)), ((4, 16, 8), (8, 50)), SCORES_ALONE),
    "projection": (projected, ((2, 64, 16), (16, 16)), {(False, (2, 4, 16, 16)), (False, (2, 64, 64))}),
    "variance of a VAE": (lambda x, kernel: jnp.exp(x @ kernel).sum(-1).mean(), WITH_KERNEL, set()),
    # A gate that has its own matmul stays a head.
    "head beside": (lambda x, kernel: (jax.nn.logsumexp(x @ kernel, -1).sum(), x @ kernel), WITH_KERNEL, HEAD_ALONE),
    "returned": (
        lambda x, kernel: [(jax.nn.logsumexp(logits, -1).sum(), logits.astype(jnp.bfloat16)) for logits in [x @ kernel]],
        WITH_KERNEL,
        set(),
    ),
    "router": (lambda x, kernel: jax.lax.top_k(jax.nn.softmax(x @ kernel), 2)[0].sum(), WITH_KERNEL, set()),
    "mixture": (lambda x, kernel: (jax.nn.softmax(x @ kernel) @ kernel.T).sum(), WITH_KERNEL, set()),
    # Attention whose weights are changed or returned is not offered a kernel; dropout before the queries changes no weights.
    "dropout of weights": (lambda q: attend(q, dropped).sum(), [(2, 16, 8)], set()),
    "dropout before": (lambda q: attend(dropped(q)).sum(), [(2, 16, 8)], SCORES_ALONE),
    "weights beside": (lambda q: (attend(q).sum(), jax.nn.softmax(q @ q.mT)), [(2, 16, 8)], SCORES_ALONE),
    "weights returned": (with_weights, [(2, 16, 8)], set()),
}


@pytest.mark.versions
@pytest.mark.parametrize("name", PRODUCTS)
def test_what_is_a_head_and_what_are_scores_follows_from_the_data(name: str) -> None:
    function, shapes, expected = PRODUCTS[name]
    products = softmax_products(jax.make_jaxpr(function)(*(struct(*shape) for shape in shapes)))
    assert {(product.is_head, product.shape) for product in products} == expected


def test_a_head_whose_last_logits_the_loss_drops_is_found() -> None:
    """As in language models: `logits[:, :-1]`. A gate with as many elements as the scores is no head."""

    def loss(x: Any, kernel: Any, up: Any) -> Any:
        mixed = attend(x.reshape(2, 16, 2, 4).swapaxes(1, 2)).swapaxes(1, 2).reshape(x.shape)
        x = x + mixed + (jax.nn.sigmoid(x @ up) * (x @ up))[..., :8]
        return jax.nn.logsumexp((x @ kernel)[:, :-1], axis=-1).sum()

    products = softmax_products(jax.make_jaxpr(loss)(jnp.ones((2, 16, 8)), jnp.ones((8, 50)), jnp.ones((8, 32))))
    assert {(product.is_head, product.shape, product.read) for product in products} == {
        (False, (2, 2, 16, 16), 2 * 2 * 16 * 16),
        (True, (2, 16, 50), 2 * 15 * 50),
    }
