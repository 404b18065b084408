"""Each advice can be followed: its code runs on the model that it was given for, and JAX takes the kernels that it names."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import remat_jax as rj
from remat_jax import compat
from remat_jax.core.softmax_products import softmax_products
from remat_jax.diagnosis.beyond import compiled_advice
from remat_jax.hardware import target as target_named
from remat_jax.memory.advice import DONATION, DTYPE, MICRO, STATE
from remat_jax.memory.compile.backends import backend_of
from tests.test_advice import WIDTH, Block, advised, job
from tests.workloads import mean_square, needs_gpu_compiler, struct


def plain(scores: Any) -> Any:
    return scores


@pytest.mark.parametrize(
    ("dtype", "rows", "features", "change", "refusal"),
    [
        (jnp.bfloat16, 256, 64, plain, ""),
        (jnp.bfloat16, 255, 64, plain, "odd lengths"),
        (jnp.bfloat16, 256, 64, lambda s: jnp.where(jnp.tri(256, dtype=bool), s, -1e9), ""),
        (jnp.float32, 256, 64, plain, "float32"),
        (jnp.bfloat16, 256, 12, plain, "12 features of a head"),
    ],
)
def test_cudnns_attention_is_advised_exactly_where_jax_takes_it(dtype, rows, features, change, refusal, monkeypatch):
    """JAX checks the arguments as for an H100 with cuDNN 9.10, without either."""
    q = jax.ShapeDtypeStruct((2, 4, rows, features), dtype)
    (product,) = softmax_products(jax.make_jaxpr(lambda q: jax.nn.softmax(change(q @ q.mT)) @ q)(q))
    assert (product.needs, product.cudnn_refuses) == ("", refusal)
    text = backend_of(target_named("h100")).attention_kernel(cudnn_refuses=refusal)
    assert ("implementation=" in text) is not bool(refusal) and ("does not take " + refusal in text) is bool(refusal)
    # Private JAX: no public function pretends that there is an H100 with cuDNN.
    where = "jax._src.cudnn.fused_attention_stablehlo."
    monkeypatch.setattr(f"{where}check_cudnn_version", lambda: 91000)
    monkeypatch.setattr(f"{where}check_compute_capability", lambda capability: True)
    monkeypatch.setattr(f"{where}is_cuda_compute_capability_equal", lambda capability: False)
    bias = None if change is plain else jax.ShapeDtypeStruct((1, 1, rows, rows), dtype)

    def attended(q: Any, bias: Any) -> Any:
        return jax.nn.dot_product_attention(q, q, q, bias, implementation="cudnn").sum()

    trace = functools.partial(jax.eval_shape, jax.grad(attended), q.update(shape=(2, rows, 4, features)), bias)
    if refusal:
        with pytest.raises(NotImplementedError):
            trace()
    else:
        assert trace().dtype == dtype


def test_query_heads_that_share_a_key_head_are_no_length() -> None:
    q = struct(2, 3, 2, 256, 64, dtype=jnp.bfloat16)  # three query heads for each of two key heads
    k = struct(2, 2, 256, 64, dtype=jnp.bfloat16)

    def attend(q: Any, k: Any) -> Any:
        weights = jax.nn.softmax(jnp.einsum("bghtd,bhsd->bhgts", q, k))
        return jnp.einsum("bhgts,bhsd->bghtd", weights, k)

    (product,) = softmax_products(jax.make_jaxpr(attend)(q, k))
    assert 3 in product.shape and product.cudnn_refuses == ""


def test_a_kernel_must_take_what_the_model_does_to_its_scores() -> None:
    def of(loss: Any, **shapes: int) -> str:
        q, v = (jax.ShapeDtypeStruct((2, 4, 256, shapes.get(name, 64)), jnp.bfloat16) for name in "qv")
        (product,) = softmax_products(jax.make_jaxpr(loss)(q, v))
        return backend_of(target_named("h100")).attention_kernel(needs=product.needs, cudnn_refuses=product.cudnn_refuses)

    kernel = "an attention kernel that never stores the scores and takes"
    capped = of(lambda q, v: jax.nn.softmax(jnp.tanh(q @ q.mT / 50) * 50) @ v)
    assert capped == f"{kernel} tanh of the scores; cuDNN's does not"
    wide = of(lambda q, v: jax.nn.softmax(q @ q.mT) @ v, v=128)
    assert wide == f"{kernel} values with another number of features than the keys; cuDNN's does not"
    assert "takes tanh of the scores, such as jax.experimental.pallas.ops.tpu.splash_attention" in backend_of(
        target_named("v5e")
    ).attention_kernel(needs="tanh of the scores")


@needs_gpu_compiler
def test_micro_batches_are_said_to_compute_another_function_where_examples_meet() -> None:
    (need, advice), contrastive = advised(job(attention="scores", optimizer=None)), job(attention="scores", optimizer=None)
    assert advice[MICRO].how.startswith('rj.plan(…, allow="micro_batches"), or rj.accumulate_gradients(sums, 2), where')
    assert advice[MICRO].why.endswith("The loss is a sum or a mean over examples, so the function stays the same")
    loss = contrastive.loss
    contrastive.loss = lambda params, tokens, targets: loss(params, tokens, targets[::-1])
    changed = advised(contrastive)[1][MICRO]
    assert changed.how.startswith("rj.accumulate_gradients(sums, 2), where sums(params, *batch) returns the sum of the losses")
    assert "unless the loss is written over independent examples: rev int32[4, 512] at " in changed.why and need


@needs_gpu_compiler
def test_jaxs_attention_kernel_takes_the_lengths_that_the_advice_names() -> None:
    text = backend_of(target_named("h200")).attention_kernel(cudnn_refuses="odd lengths")
    assert "mha (with causal masks and segment ids only; pad lengths above 128 to a multiple of 128)" in text
    for length, taken in ((64, True), (128, True), (197, False), (256, True)):
        q = jax.ShapeDtypeStruct((2, length, 4, 64), jnp.bfloat16)
        with contextlib.nullcontext() if taken else pytest.raises(ValueError, match="must be a multiple of"):
            jax.eval_shape(functools.partial(compat.attention_kernel(), segment_ids=None), q, q, q)


class Layer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.up, self.down = nnx.Linear(WIDTH, 64 * WIDTH, rngs=rngs), nnx.Linear(64 * WIDTH, WIDTH, rngs=rngs)
        self.dropout, self.steps = nnx.Dropout(0.1, rngs=rngs), nnx.Param(jnp.zeros((), jnp.int32))

    def __call__(self, x: Any) -> Any:
        return x + self.dropout(self.down(nnx.gelu(self.up(x))))


def nnx_loss(model: Any, x: Any) -> Any:
    return jnp.mean(model(x).astype(jnp.float32) ** 2)


@needs_gpu_compiler
def test_advice_is_code_that_runs_on_the_model_that_it_was_given_for() -> None:
    """Each `how` is run as it is written. There are integers among the parameters."""
    work, model = job(vocabulary=8192, rows=2, length=16, dtype=jnp.float32), Layer(nnx.Rngs(0))
    params = {"model": jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), work.params), "version": jnp.int32(1)}
    options = {"optimizer": optax.adam(1e-3), "trainable": "*kernel*"}

    def of_linen(params: Any) -> rj.Workload:
        return rj.Workload(lambda params, *batch: work.loss(params["model"], *batch), params, work.batch, Block, **options)

    def of_nnx(model: Any) -> rj.Workload:
        return rj.Workload.from_nnx(model, nnx_loss, (jnp.ones((64, WIDTH)),), Layer, **options)

    for made, argument in ((of_linen, "params"), (of_nnx, "model")):
        names = {"jax": jax, "jnp": jnp, "nnx": nnx, "rj": rj, "optimizer": optax.adam(1e-3), "params": params, "model": model}
        workload = made(names[argument])
        need, advice = advised(workload)
        exec(f"optimizer = {advice[STATE].how}", names)
        assert rj.measure(workload.with_optimizer(names["optimizer"]), "full", "h200").device_bytes < need
        code, _, remark = advice[DTYPE].how.partition(";")
        exec(code, names)
        left = rj.measure(made(names[argument]), "full", "h200").device_bytes
        assert 0 < advice[DTYPE].bytes <= need - left and remark == " bfloat16 rounds small updates away"


@needs_gpu_compiler
@pytest.mark.parametrize("kind", ["nnx.jit", "equinox.filter_jit"])
def test_donated_arguments_as_they_are_advised_for_each_jit(kind: str) -> None:
    """The arguments that the advice names are donated as it says, by the jit of the library that the step uses."""
    equinox, x = pytest.importorskip("equinox"), jnp.ones((64, WIDTH))
    tx = optax.adam(1e-3)

    def update(params: Any, state: Any, x: Any) -> Any:
        gradients = jax.grad(lambda params: jnp.mean(jnp.tanh(x @ params["up"]) @ params["down"]))(params)
        changes, state = tx.update(gradients, state)
        return optax.apply_updates(params, changes), state

    params = {"up": jnp.zeros((WIDTH, 64 * WIDTH)), "down": jnp.zeros((64 * WIDTH, WIDTH))}
    arguments = params, tx.init(params), x
    jit = {"nnx.jit": nnx.jit, "equinox.filter_jit": equinox.filter_jit}[kind]
    before = rj.Workload.from_step(jit(update), *arguments, blocks="scans")
    need, advice = advised(before, "off")
    options = {"donate": "all"} if kind == "equinox.filter_jit" else {"donate_argnums": (0, 1)}
    assert all(f"{name}={value!r}".replace("'", '"') in advice[DONATION].how for name, value in options.items())
    after = rj.Workload.from_step(jit(update, **options), *arguments, blocks="scans")
    (compiled,) = (each for each in rj.doctor(before, "off", "h200").advice if each.what == DONATION)
    assert compiled.compiled and compiled.bytes == pytest.approx(advice[DONATION].bytes, rel=0.2)
    left, advice_after = advised(after, "off")
    assert DONATION not in advice_after
    assert 0.8 * (need - left) < advice[DONATION].bytes <= need - left and need - left > 4 * 2**20


@needs_gpu_compiler
def test_micro_batches_of_the_plan_free_what_is_advised() -> None:
    work = job()
    need, advice = advised(work)
    said, budget = advice[MICRO].bytes, int(need - 0.9 * advice[MICRO].bytes)
    made = rj.plan(work, budget, "h200", allow="micro_batches")
    assert made.micro_batches == 2 and need - made.device_bytes > 0.9 * said


@needs_gpu_compiler
def test_that_activations_follow_narrow_parameters_is_told_in_bytes() -> None:
    model = nn.Sequential([nn.Embed(64, 512), nn.Dense(2048), nn.Dense(512)])
    tokens = jax.ShapeDtypeStruct((2048,), jnp.int32)
    work = mean_square(model, tokens, nn.Dense, optimizer=optax.adam(1e-3))
    advice = compiled_advice(work, "off", rj.measure(work, "off", "h200"), target_named("h200"), 300)
    (why,) = [each.why for each in advice if each.what == DTYPE and each.compiled]
    assert why.endswith(". Activations follow them: the model keeps 12.0 MiB of residuals, not 24.0 MiB")
