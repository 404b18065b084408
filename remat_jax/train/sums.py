"""Sums over many terms that are exact in float32: counts of any dtype, and losses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr

from remat_jax import compat
from remat_jax.core.walk import equations
from remat_jax.errors import ArgumentError

Pair = tuple[Any, Any]
"""A number as the sum of two floats of one dtype; the second float has the digits that do not fit into the first."""


def wide(dtype: Any) -> Any:
    """The dtype in which to sum arrays of `dtype`: at least float32 for floats (JAX promotes no float8), otherwise `dtype`."""
    if jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32:
        return jnp.dtype(jnp.float32)
    return jnp.dtype(dtype)


def widened(array: Any) -> Any:
    """`array` in the dtype in which to sum it."""
    return array.astype(wide(array.dtype))


def real(dtype: Any) -> Any:
    """The dtype of the real part of `dtype`."""
    return jnp.finfo(dtype).dtype


def pair(number: Any) -> Pair:
    """A real scalar as a Pair: an int of 32 bits or a Python int is not rounded, although float32 has 24 bits."""
    dtype = jax.dtypes.canonicalize_dtype(jnp.float64)
    if not isinstance(number, jax.Array):
        value = np.asarray(number).item()
        high = np.asarray(value, dtype)
        return jnp.asarray(high), jnp.asarray(value - high.item(), dtype)
    if jnp.issubdtype(number.dtype, jnp.floating):
        return number.astype(dtype), jnp.zeros((), dtype)
    if number.dtype.itemsize < 4:
        number = number.astype(jnp.int32)
    low = number & 0xFFFF
    return (number - low).astype(dtype), low.astype(dtype)


def plus(total: Pair, term: Any) -> Pair:
    """`total` plus a float, with about twice the digits of a float (Knuth's TwoSum)."""
    high, low = total
    added = high + term
    share = added - high
    low = low + ((high - (added - share)) + (term - share))
    normal = added + low
    return normal, low - (normal - added)


def zero() -> Pair:
    """0 as a Pair."""
    return pair(0)


def value(total: Pair) -> Any:
    """A Pair as one float: the sum, rounded once; infinities and NaN stay."""
    high, low = total
    return jnp.where(jnp.isfinite(high), high + low, high)


def power_of_two(number: Any, dtype: Any) -> Any:
    """A power of two near the float `number` whose reciprocal is a normal number of `dtype`; 1 for 0 and for infinities."""
    info = jnp.finfo(number.dtype)
    largest = 1 / float(jnp.finfo(dtype).smallest_normal)
    rounded = jax.lax.reduce_precision(jnp.abs(number), exponent_bits=info.nexp, mantissa_bits=0)
    usable = (rounded >= 1) & (rounded < jnp.inf)
    return jnp.where(usable, jnp.minimum(rounded, jnp.asarray(largest, number.dtype)), 1)


def check_dtype(dtype: Any) -> None:
    """Raise ArgumentError unless `dtype` is None or a real floating-point dtype."""
    try:
        is_float = dtype is None or jnp.issubdtype(np.dtype(dtype), jnp.floating)
    except TypeError:
        is_float = False
    if not is_float:
        raise ArgumentError(
            f"dtype={dtype!r}: expected a floating-point dtype to sum gradients in, such as jnp.float32; for complex "
            "parameters it is the dtype of the real part"
        )


def available(dtype: Any) -> Any:
    """`dtype`, None included, as JAX computes it; raises ArgumentError for float64 while `jax_enable_x64` is off."""
    computed = None if dtype is None else jax.dtypes.canonicalize_dtype(dtype)
    if dtype is not None and dtype is not float and computed != np.dtype(dtype):
        raise ArgumentError(
            f"dtype={dtype!r}: JAX would compute in {computed}, because jax_enable_x64 is off; enable it, or give "
            f"dtype=jnp.{computed}"
        )
    return computed


def with_precision(dtype: Any, precision: Any) -> Any:
    """`dtype` with the precision of the real dtype `precision`: a complex dtype stays complex."""
    if not jnp.issubdtype(dtype, jnp.complexfloating):
        return precision
    return jnp.promote_types(wide(precision), jnp.complex64)


def overflows_early(jaxpr: ClosedJaxpr) -> bool:
    """Whether the closed `jaxpr` computes floats with a smaller range than float32 and bfloat16, such as float16."""
    dtypes = {getattr(var.aval, "dtype", None) for eqn in equations(jaxpr) for var in (*eqn.invars, *eqn.outvars)}
    floats = (dtype for dtype in dtypes if dtype is not None and jnp.issubdtype(dtype, jnp.floating))
    return any(jnp.finfo(dtype).maxexp < jnp.finfo(jnp.float32).maxexp for dtype in floats)


def plus_scaled(scale: Any, total: Any, term: Any) -> Any:
    """`total + scale * term` in `total`'s dtype, computed in at least float32. A `scale` of None is 1."""
    dtype = wide(total.dtype)
    scaled = term.astype(dtype) if scale is None else scale.astype(real(dtype)) * term.astype(dtype)
    return (total.astype(dtype) + scaled).astype(total.dtype)


def divided(total: Any, divisor: Any) -> Any:
    """`total` divided by a real scalar, in at least float32."""
    dtype = wide(total.dtype)
    return total.astype(dtype) / divisor.astype(real(dtype))


def with_wide_gradients(function: Callable[[Any], Any], argument: Any) -> Callable[[Any], Any]:
    """`function`, whose calls add up the gradients of what it closes over in at least float32.

    A scan adds up the gradient of a closed-over array in the array's dtype. So each narrow array gets a companion, zeros in
    float32 that no call reads, and its gradients flow into the companion:

        value ↦ companion = 0 · value,   (value, companion) ↦ value,   with the derivative of the identity in total

    Args:
      argument: a pytree like the function's argument; only shapes and dtypes are used.
    """
    traced, outputs = jax.make_jaxpr(function, return_shape=True)(argument)
    jaxpr, closed_over = compat.hoist_consts(traced)
    companions = list(map(companion, closed_over))
    if all(zeros is None for zeros in companions):
        return function
    run, treedef = compat.jaxpr_function(jaxpr), jax.tree.structure(outputs)

    def wide_inside(argument: Any) -> Any:
        values = map(with_companion, closed_over, companions)
        return jax.tree.unflatten(treedef, run(*values, *jax.tree.leaves(argument)))

    return wide_inside


def companion(value: Any) -> Any:
    """For a float narrower than float32: zeros in float32 with the derivative of a cast of `value`; else None."""
    dtype = jnp.result_type(value)
    return _companion(value) if jnp.issubdtype(dtype, jnp.floating) and wide(dtype) != dtype else None


def with_companion(value: Any, zeros: Any) -> Any:
    """`value`, whose gradient flows to its companion `zeros` instead, unless this is None."""
    return value if zeros is None else _with_companion(value, zeros)


@jax.custom_jvp
def _companion(value: Any) -> Any:
    # Computed from `value`, so that a `vmap` of `value` gives zeros for each example, as the derivative has them.
    return jnp.where(True, 0, value.astype(wide(value.dtype)))


@_companion.defjvp
def _(primals: Any, tangents: Any) -> Any:
    return _companion(*primals), tangents[0].astype(wide(primals[0].dtype))


@jax.custom_jvp
def _with_companion(value: Any, zeros: Any) -> Any:
    return value


@_with_companion.defjvp
def _(primals: Any, tangents: Any) -> Any:
    return _with_companion(*primals), tangents[1].astype(primals[0].dtype)
