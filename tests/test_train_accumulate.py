"""Gradients from micro-batches: equal to those of the whole batch, their dtypes, their keys, and their memory."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import remat_jax as rj
from remat_jax import compat
from remat_jax.errors import ArgumentError
from remat_jax.hardware import target
from remat_jax.memory.compile.compiler import compile_programs
from remat_jax.memory.compile.exporting import export_step
from tests.small_models import Mlp, Stack, assert_bit_equal, assert_same, times
from tests.workloads import Perceptron, needs_gpu_compiler

ROWS, LENGTH, WIDTH = 12, 5, 4
MODEL = Stack(Mlp, 2)


def data(dtype: Any = jnp.float64) -> tuple[Any, Any, Any]:
    """Parameters, inputs, and a mask that leaves 1 to 5 targets in a row, so that all micro-batches differ."""
    random = np.random.default_rng(0)
    x = jnp.asarray(random.normal(size=(ROWS, LENGTH, WIDTH)), dtype)
    shapes = jax.eval_shape(MODEL.init, jax.random.key(0), x)
    params = jax.tree.map(lambda leaf: jnp.asarray(random.normal(size=leaf.shape) / 2, dtype), shapes)
    counts = np.array([5, 1, 4, 5, 1, 1, 5, 1, 3, 4, 2, 2])
    return params, x, jnp.asarray(np.arange(LENGTH) < counts[:, None])


def summed(params: Any, x: Any, mask: Any) -> tuple[Any, Any]:
    losses = jnp.square(MODEL.apply(params, x)).mean(-1)
    return jnp.sum(losses * mask), jnp.sum(mask)


def mean(params: Any, x: Any, mask: Any) -> Any:
    total, count = summed(params, x, mask)
    return total / count


# --- the gradient -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 3, 12])
def test_it_is_the_whole_batchs_gradient(x64, n):
    expected = jax.value_and_grad(mean)(*data())
    gradients = jax.jit(rj.accumulate_gradients(summed, n))(*data())
    assert_same(gradients, expected, 1e-12)
    assert gradients[0].dtype == jnp.float64 and times("scan", rj.accumulate_gradients(summed, n), *data()) == 1


def test_empty_micro_batches_change_nothing_and_an_empty_batch_divides_by_nothing(x64):
    params, x, mask = data()
    accumulated = rj.accumulate_gradients(summed, 3)
    some = mask.at[::3].set(False)
    assert_same(accumulated(params, x, some), jax.value_and_grad(mean)(params, x, some), 1e-12)
    assert {float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(accumulated(params, x, jnp.zeros_like(mask)))} == {0.0}


def test_narrow_gradients_are_summed_in_float32():
    params, x, mask = data(jnp.bfloat16)
    # A sum of 128 equal terms: in bfloat16 it stops growing once a term is less than half a step.
    many = jnp.tile(x[:1], (128, 1, 1)), jnp.tile(mask[:1], (128, 1))
    first = jax.tree.map(lambda g: g.astype(jnp.float32), jax.grad(mean)(params, x[:1], mask[:1]))

    def error(dtype: Any) -> float:
        gradients = rj.accumulate_gradients(summed, 128, dtype=dtype)(params, *many)[1]
        assert {leaf.dtype for leaf in jax.tree.leaves(gradients)} == {jnp.dtype(dtype or jnp.bfloat16)}
        squares = jax.tree.map(lambda a, b: (jnp.sum((a.astype(jnp.float32) - b) ** 2), jnp.sum(b**2)), gradients, first)
        pairs = jax.tree.leaves(squares)
        return float(sum(pairs[::2]) / sum(pairs[1::2])) ** 0.5

    assert error(None) < 2**-7 and error(jnp.float32) < 2**-7
    assert error(jnp.bfloat16) > 0.05


# --- every dtype ------------------------------------------------------------------------------------------------------


def squares(count: Any) -> Any:
    """A loss whose mean is 1 and whose gradient is 2 at w = 1, with `count(rows)` as the number of targets."""
    return lambda w, x: (jnp.sum((w * x).astype(jnp.float32) ** 2), count(x.shape[0]))


NARROW = ("bool", "int4", "int8", "uint8", "int16", "uint32", "float8_e4m3fn", "bfloat16", "float16", "float32")


@pytest.mark.parametrize("dtype", NARROW)
def test_counts_of_every_dtype_are_added_up_exactly(dtype):
    rows, n = 1 if dtype == "bool" else 7, 600
    loss = squares(lambda rows: jnp.asarray(rows, jnp.int32).astype(dtype))
    value, gradient = rj.accumulate_gradients(loss, n)(jnp.float32(1), jnp.ones(n * rows))
    assert (float(value), float(gradient)) == (1.0, 2.0)


@pytest.mark.parametrize("number", [2**31 + 1, np.int64(3 * 10**9), np.int32(2**30 + 1), jnp.uint32(2**32 - 1), 2.5])
def test_counts_beyond_32_bits_are_not_cut(number):
    value, _ = rj.accumulate_gradients(lambda w, x: (jnp.sum(w * x) * 1e9, number), 5)(1.0, jnp.ones(5))
    np.testing.assert_allclose(float(value), 1e9 / float(number), rtol=2e-7)


def test_losses_and_odd_counts_are_added_up_with_more_digits_than_a_float_has():
    """One float32 of 24 bits would lose a third of a million terms' digits, and every odd count above 2**24."""
    x = jnp.full(2**14, 0.1, jnp.float32)
    value = rj.accumulate_gradients(lambda w, x: (jnp.sum(w * x), jnp.int32(2**18 + 1)), 2**14)(jnp.float32(1), x)[0]
    expected = float(np.float32(0.1)) / (2**18 + 1)
    np.testing.assert_allclose(float(value), expected, rtol=1.2e-7)


def test_float16_gradients_of_a_long_sum_stay_finite():
    value, gradient = rj.accumulate_gradients(squares(int), 2)(jnp.float16(1), jnp.ones(80_000, jnp.float16))
    assert (float(value), float(gradient), gradient.dtype) == (1.0, 2.0, jnp.float16)


@pytest.mark.parametrize(("total", "count"), [("bfloat16", "int32"), ("float16", "float32"), ("float32", "bfloat16")])
def test_the_mean_has_the_dtype_of_the_whole_batchs(total, count):
    def loss(w: Any, x: Any) -> Any:
        return jnp.sum(w * x).astype(total), jnp.asarray(x.size, count)

    def whole(w: Any, x: Any) -> Any:
        total, count = loss(w, x)
        return total / count

    w, x = jnp.asarray(1, total), jnp.ones(8, total)
    expected, results = jax.value_and_grad(whole)(w, x), rj.accumulate_gradients(loss, 4)(w, x)
    assert [each.dtype for each in results] == [each.dtype for each in expected]
    assert_same(results, expected, 0)


@pytest.mark.parametrize("dtype", [None, jnp.float32, jnp.bfloat16, jnp.float64])
def test_complex_parameters_keep_both_parts(x64, dtype):
    def loss(w: Any, x: Any) -> Any:
        return jnp.sum(jnp.abs(w * x - 1) ** 2), x.shape[0]

    w, x = jnp.asarray([1 + 2j, 0.5 - 1j], jnp.complex64), jnp.asarray(np.random.default_rng(0).normal(size=(6, 2)))
    gradient = rj.accumulate_gradients(loss, 3, dtype=dtype)(w, x)[1]
    assert gradient.dtype == (jnp.complex128 if dtype is jnp.float64 else jnp.complex64)
    np.testing.assert_allclose(gradient, jax.grad(lambda w: loss(w, x)[0] / 6)(w), rtol=1e-6)


# --- what goes through it ---------------------------------------------------------------------------------------------


def test_each_micro_batch_has_its_own_key_and_aux_is_stacked():
    def loss(w: Any, key: Any, x: Any) -> Any:
        kept = jax.random.bernoulli(key, 0.5, x.shape)
        return (jnp.sum(w * x * kept), x.size), {"kept": kept, "first": x[0]}

    x, key = jnp.arange(1.0, 13.0), jax.random.key(3)
    (value, aux), gradient = rj.accumulate_gradients(loss, 3, has_aux=True)(jnp.float32(2.0), key, x)
    expected = jnp.stack([jax.random.bernoulli(jax.random.fold_in(key, index), 0.5, (4,)) for index in range(3)])
    assert_bit_equal(aux, {"kept": expected, "first": x[:3]})
    assert len({tuple(row.tolist()) for row in expected}) > 1
    np.testing.assert_allclose(gradient, jnp.sum(x * expected.T.reshape(-1)) / 12, rtol=1e-6)
    np.testing.assert_allclose(value, 2 * gradient, rtol=1e-6)


@pytest.mark.parametrize("make", [jax.random.key, jax.random.PRNGKey])
def test_rows_are_taken_by_stride_keys_among_them(make):
    def loss(w: Any, keys: Any, x: Any) -> Any:
        return (w * jax.vmap(jax.random.uniform)(keys).sum(), len(keys)), (x, jax.random.key_data(keys))

    keys, x = jax.random.split(make(0), 4), np.arange(4.0, dtype=np.float32)
    (value, aux), _ = rj.accumulate_gradients(loss, 2, has_aux=True)(1.0, keys, x)
    np.testing.assert_allclose(value, jax.vmap(jax.random.uniform)(keys).mean(), rtol=1e-6)
    data = jax.random.key_data(keys)
    assert_bit_equal(aux, (jnp.array([[0.0, 2.0], [1.0, 3.0]]), jnp.stack([data[::2], data[1::2]])))


def test_checkpointed_blocks_inside(x64):
    loss = rj.checkpoint_blocks(summed, {Mlp: "full"})
    accumulated = rj.accumulate_gradients(loss, 3)
    assert_same(accumulated(*data()), jax.value_and_grad(mean)(*data()), 1e-12)
    # Two layers of two matmuls each: forward, recomputation (only the first; nobody reads the second), two for gradients.
    assert times("dot_general", accumulated, *data()) == times("dot_general", jax.value_and_grad(loss, has_aux=True), *data())
    assert times("dot_general", accumulated, *data()) > times("dot_general", rj.accumulate_gradients(summed, 3), *data())


# --- memory -----------------------------------------------------------------------------------------------------------


@needs_gpu_compiler
def test_on_an_h200_it_needs_one_micro_batch_and_one_more_tree_of_gradients():
    """Of scanned layers; of unrolled ones it depends on the schedule (docs/notes/optimizer_offload.md)."""
    layers, rows, n = 4, 32768, 8
    model = Stack(Perceptron, layers, scanned=True)

    def loss(params: Any, x: Any) -> Any:
        return jnp.sum(model.apply(params, x) ** 2), x.size

    def plain(params: Any, x: Any) -> Any:
        return jax.value_and_grad(lambda p: loss(p, x)[0] / x.size)(params)

    whole, micro = (jax.ShapeDtypeStruct((size, 512), jnp.float32) for size in (rows, rows // n))
    params = jax.eval_shape(model.init, jax.random.key(0), micro)
    tree = sum(4 * leaf.size for leaf in jax.tree.leaves(params))
    jobs = {
        "whole": rj.Workload.from_step(plain, params, whole, blocks=Perceptron),
        "micro": rj.Workload.from_step(plain, params, micro, blocks=Perceptron),
        "accumulated": rj.Workload.from_step(rj.accumulate_gradients(loss, n), params, whole, blocks=Perceptron),
    }
    programs = [export_step(key, job.step("off"), target("h200")) for key, job in jobs.items()]
    sizes = compile_programs(programs, target("h200"), timeout=300)
    batch = 4 * 512 * (rows - rows // n)
    assert abs(sizes["accumulated"].device - batch - sizes["micro"].device - tree) < 1e5
    assert sizes["accumulated"].device < 0.4 * sizes["whole"].device
    assert sizes["micro"].device > 4 * 512 * rows // n * layers, "activations are most of it"


# --- wrong use --------------------------------------------------------------------------------------------------------


def test_wrong_arguments_are_named():
    for n in (0, -2, 2.0, True, "4"):
        with pytest.raises(ArgumentError, match="n=.*expected the number of micro-batches, a positive int"):
            rj.accumulate_gradients(summed, n)
    with pytest.raises(ArgumentError, match="loss=3: expected a function"):
        rj.accumulate_gradients(3, 2)
    with pytest.raises(ArgumentError, match="dtype=.*int32.*floating-point dtype to sum"):
        rj.accumulate_gradients(summed, 2, dtype=jnp.int32)
    params, x, mask = data(jnp.float32)
    with pytest.raises(ArgumentError, match="dtype=.*float64.*jax_enable_x64 is off.*jnp.float32"):
        rj.accumulate_gradients(summed, 2, dtype=jnp.float64)(params, x, mask)
    with pytest.raises(ArgumentError, match="params: 'steps' is int32 and has no gradient"):
        rj.accumulate_gradients(summed, 2)({"steps": 3}, x, mask)
    with pytest.raises(ArgumentError, match="loss returned .*complex64.*two real scalars"):
        rj.accumulate_gradients(lambda w, x: (jnp.sum(w * x), jnp.complex64(4)), 2)(1.0, x)
    with pytest.raises(ArgumentError, match=r"n=5 does not divide the leading axis of batch\[0\], which has 12 rows.*4 and 6"):
        rj.accumulate_gradients(summed, 5)(params, x, mask)
    with pytest.raises(ArgumentError, match=r"batch\[0\] has 12, batch\[1\] has 11.*jax.random.key"):
        rj.accumulate_gradients(summed, 2)(params, x, mask[1:])
    with pytest.raises(ArgumentError, match=r"batch\[1\]\['scale'\] is a scalar.*bind it into the loss"):
        rj.accumulate_gradients(summed, 2)(params, x, {"scale": 2.0})
    with pytest.raises(ArgumentError, match="batch: expected at least one array"):
        rj.accumulate_gradients(summed, 2)(params, jax.random.key(0))
    with pytest.raises(ArgumentError, match=r"loss returned float32\[\]: expected \(sum of losses, number of.*not a mean"):
        rj.accumulate_gradients(mean, 2)(params, x, mask)
    with pytest.raises(ArgumentError, match=r"expected \(\(sum of losses, number of targets\), aux\)"):
        rj.accumulate_gradients(summed, 2, has_aux=True)(params, x, mask)


@pytest.mark.skipif(
    compat.JAX_VERSION >= (0, 12, 0),
    reason="its scheduler puts the weight gradients off, which hides the effect (docs/notes/optimizer_offload.md)",
)
def test_unrolled_blocks_are_computed_again_inside_the_loop_over_micro_batches() -> None:
    """Forward pass and recomputation are in one loop body there: without a barrier XLA would merge the two."""
    width, rows = 256, 8192

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            return nn.Dense(width)(jnp.tanh(nn.Dense(4 * width)(x)))

    model, x = Stack(Block, 4), jax.ShapeDtypeStruct((rows, width), jnp.float32)
    params = jax.eval_shape(model.init, jax.random.key(0), x)

    def summed(params: Any, x: Any) -> Any:
        return jnp.sum(model.apply(params, x) ** 2), x.shape[0]

    def temp(policy: str) -> int:
        loss = summed if policy == "off" else rj.checkpoint_blocks(summed, {Block: policy})
        job = rj.Workload.from_step(rj.accumulate_gradients(loss, 4), params, x, blocks=Block)
        return rj.measure(job, "off", target="h200").temp_bytes

    hidden = rows // 4 * 4 * width * 4
    assert temp("off") - temp("full") > 2 * hidden


# On a mesh every device keeps its own rows, so work and memory are those of one micro-batch.


@pytest.fixture(scope="module")
def told(on_eight_devices: Callable[..., Path]) -> dict[str, Any]:
    return dict(json.loads(on_eight_devices("tests.accumulate_on_mesh", "told.json").read_text()))


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_a_device_computes_its_own_rows_and_no_others(told: dict[str, Any], kind: str) -> None:
    figures = told[kind]
    assert figures["error"] < 1e-5
    whole = figures["1"]
    for n in (2, 4, 8):
        micro = figures[str(n)]
        # The loop body counts once; 1 % is for sums of gradients and the rows' addresses.
        assert micro["flops"] * n == pytest.approx(whole["flops"], rel=0.01)
        assert micro["temp"] < 0.8 * whole["temp"]
        assert [micro[name] for name in ("all-gather", "all-to-all", "collective-permute")] == [0, 0, 0]


def test_rows_that_explicit_axes_cannot_divide_are_refused(told: dict[str, Any]) -> None:
    refusal = "a micro-batch of batch[0] has 4 rows, which do not divide over the 8 devices of 'data'; n can be 1, 2, 4, 8;"
    assert refusal in told["Explicit"]["refusal"] and told["Auto"]["refusal"] == ""
