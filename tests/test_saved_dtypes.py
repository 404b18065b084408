"""Saving and offloading keep every bit of an array, whatever its dtype; the rounding by which JAX saves arrays does not."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

import remat_jax as rj

FLOATS = (
    *("float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2"),
    *("float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn", "float16", "bfloat16", "float32"),
)
INTEGERS = ("int2", "uint2", "int4", "uint4", "int8")
DTYPES = (*FLOATS, *INTEGERS, "complex64")


def every_value(dtype: str) -> np.ndarray:
    """The finite numbers of `dtype`, subnormals and the largest too, as float32; of a wide dtype some of them."""
    if dtype in INTEGERS:
        info = ml_dtypes.iinfo(dtype)
        return np.arange(info.min, info.max + 1, dtype=np.float32)
    if dtype in ("float32", "complex64"):
        return np.float32([1e-30, -1 / 3, 3e18])
    bits = ml_dtypes.finfo(dtype).bits
    step = 1 if bits <= 8 else 97
    values = np.arange(0, 2**bits, step, dtype=f"uint{max(bits, 8)}").view(dtype).astype(np.float32)
    # XLA's CPU computes with float32 numbers below 2**-126 as zeros.
    return values[np.isfinite(values) & ((values == 0) | (abs(values) >= 2.0**-126))]


NUMBERS = {dtype: every_value(dtype) for dtype in DTYPES}
SOME = {dtype: NUMBERS[dtype] for dtype in ("float8_e4m3fn", "float8_e8m0fnu", "float4_e2m1fn", "complex64")}


def product(dtype: str, x: Any) -> Any:
    """`x` times `x` in `dtype`, the array `kept`, which the derivative reads."""
    x_in_dtype = jax.lax.complex(x, x / 3) if dtype == "complex64" else x.astype(dtype)
    kept = checkpoint_name(jax.lax.stop_gradient(x_in_dtype), "kept")
    return jnp.real(kept * x) + jnp.imag(kept * x) if dtype == "complex64" else kept.astype(jnp.float32) * x


def block(numbers: dict[str, Any]) -> dict[str, Any]:
    return {dtype: product(dtype, x) for dtype, x in numbers.items()}


def results(fn: Callable[..., Any], numbers: Any) -> tuple[Any, Any]:
    """The outputs of `fn`, which has one output for each number, and its derivatives."""

    def run(numbers: Any) -> Any:
        outputs, pullback = jax.vjp(fn, numbers)
        return outputs, pullback(jax.tree.map(jnp.ones_like, outputs))[0]

    return jax.tree.map(np.asarray, jax.jit(run)(numbers))


def assert_exact(fn: Callable[..., Any], plain: Callable[..., Any]) -> None:
    jax.tree.map(functools.partial(np.testing.assert_array_equal, strict=True), results(fn, SOME), results(plain, SOME))


NAMED = jax.checkpoint_policies.save_only_these_names("kept")
KEEPING: dict[str, Callable[[], Any]] = {
    "save": lambda: rj.remat(block, "save: kept"),
    "offload": lambda: rj.remat(block, "offload: kept"),
    "everything": lambda: rj.remat(block, "everything"),
    "names of JAX": lambda: rj.remat(block, NAMED),
    "our names by hand": lambda: jax.checkpoint(block, policy=rj.jax_policy("save: kept")),
    "everything of JAX": lambda: rj.remat(block, jax.checkpoint_policies.everything_saveable),
}


@pytest.mark.parametrize("how", KEEPING)
def test_a_kept_array_has_all_its_bits(how: str) -> None:
    plain = results(block, NUMBERS)
    jax.tree.map(functools.partial(np.testing.assert_array_equal, strict=True), results(KEEPING[how](), NUMBERS), plain)
    for dtype in DTYPES[:-1]:
        np.testing.assert_array_equal(plain[1][dtype], NUMBERS[dtype], dtype)


def test_beside_the_new_rematerialisation_a_kept_array_has_all_its_bits(remat3: None) -> None:
    assert_exact(rj.remat(block, "save: kept"), block)


marked = rj.block(block)
SCALES = jnp.float32([1, 1 / 2, 1 / 4])


def scaled(numbers: Any, scale: Any) -> Any:
    return jax.tree.map(lambda x: scale * x, numbers)


def unrolled(numbers: Any, block: Any = marked) -> Any:
    return jax.tree.map(lambda *outputs: sum(outputs), *(block(scaled(numbers, scale)) for scale in SCALES))


def scanned(numbers: Any) -> Any:
    def one_round(carry: Any, scale: Any) -> Any:
        return jax.tree.map(jnp.add, carry, marked(scaled(numbers, scale))), None

    return jax.lax.scan(one_round, jax.tree.map(jnp.zeros_like, numbers), SCALES)[0]


def batched(numbers: Any) -> Any:
    return jax.vmap(unrolled)(jax.tree.map(lambda x: x[None], numbers))


def under(policy: str) -> Callable[..., Any]:
    return lambda fn: rj.checkpoint_blocks(fn, {marked: policy})


FORMS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "tied": (unrolled, under("offload: kept")),
    "scanned": (scanned, under("save: kept")),
    "by layer": (scanned, under("1 × full | 1 × save: kept | 1 × offload: kept")),
    "in groups": (unrolled, under("3 × save: kept in groups of 2")),
    "vmap": (batched, under("save: kept")),
    "replanned": (functools.partial(unrolled, block=jax.checkpoint(block)), lambda fn: rj.replan(fn, "save: kept")),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_a_block_keeps_all_bits(form: str) -> None:
    plain, put = FORMS[form]
    assert_exact(put(plain), plain)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float4_e2m1fn"])
def test_the_table_lists_a_kept_array_in_its_dtype(dtype: str) -> None:
    def loss(numbers: Any, scale: Any) -> Any:
        return sum(map(jnp.sum, jax.tree.leaves(unrolled(scaled(numbers, scale)))))

    job = rj.Workload(loss, {dtype: NUMBERS[dtype]}, (jnp.float32(1),), blocks=marked)
    for action in ("save", "offload"):
        [row] = [row for row in rj.residuals(job, f"{action}: kept") if row.name == "kept"]
        # XLA packs two numbers of four bits into a byte.
        nbytes = -(-NUMBERS[dtype].size * ml_dtypes.finfo(dtype).bits // 8)
        assert (row.dtype, row.action, row.count, row.bytes) == (dtype, action, 3, 3 * nbytes)
