"""A traced program in float64, whatever dtypes its author fixed: the reference for models that have no float64 form."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from remat_jax import compat
from remat_jax.core.walk import bodies, interpret, map_inner
from remat_jax.errors import UnsupportedError

_CALLS = {"closed_call", "core_call", "custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr", "jit", "pjit"}
"""Primitives that run their one body once."""


def widened(jaxpr: Any) -> Callable[..., list[Any]]:
    """The closed `jaxpr` as a function in which every floating-point number is a float64, every complex number a complex128.

    Casts to narrower dtypes do nothing, so that only the mathematics of the program is left. Differentiate before tracing, and
    call it with 64-bit types enabled. Unlike `keep_jax_float64` it takes loops whose carry begins in float32, and parameters of
    any dtype.

    Raises:
      UnsupportedError: when called, for a primitive with a body that is neither a call nor a loop.

    >>> narrow = jax.make_jaxpr(lambda x: x.astype(jnp.bfloat16).astype(jnp.float32) / 3)(jnp.float32(1))
    >>> with jax.enable_x64(True):
    ...     [float(one) for one in widened(narrow)(jnp.float32(1))]
    [0.3333333333333333]
    """
    return lambda *args: interpret(jaxpr, [_wide(arg) for arg in args], _visit)


def _wide_dtype(dtype: Any) -> Any:
    if jnp.issubdtype(dtype, jnp.floating):
        return jnp.dtype("float64")
    return jnp.dtype("complex128") if jnp.issubdtype(dtype, jnp.complexfloating) else dtype


def _wide(value: Any) -> Any:
    if isinstance(value, bool | int | float):  # a literal has more digits than its dtype
        value = np.asarray(value, getattr(value, "dtype", np.float32 if isinstance(value, float) else None))
    return jnp.asarray(value, _wide_dtype(value.dtype)) if jnp.issubdtype(value.dtype, jnp.inexact) else value


def _visit(eqn: Any, inputs: list[Any]) -> list[Any]:
    name, inputs = eqn.primitive.name, [_wide(value) for value in inputs]
    if name in _LOOPS:
        return list(_LOOPS[name](eqn.params, inputs))
    if name in _CALLS or compat.is_checkpoint(eqn):
        return widened(bodies(eqn)[0])(*inputs)
    if name == "reduce_precision":
        return inputs
    if name == "bitcast_convert_type":
        # The bits of a number mean another number in float64, so bit casts stay, as for random numbers.
        inputs = [jnp.asarray(value, atom.aval.dtype) for value, atom in zip(inputs, eqn.invars, strict=True)]
        return [_wide(output) for output in compat.bind(eqn, inputs)]
    if bodies(eqn) and not name.startswith("scatter"):
        raise UnsupportedError(f"the primitive {name!r} has a body and is not known here: add it to _CALLS or _LOOPS")
    return compat.bind(eqn, inputs, **_wide_params(eqn))


def _wide_params(eqn: Any) -> dict[str, Any]:
    """The parameters of `eqn` that are dtypes, or hold the combiner of a scatter."""
    dtypes = {"new_dtype", "preferred_element_type", "dtype", "out_dtype"}
    dtype_params = {key: value for key, value in eqn.params.items() if key in dtypes and value is not None}
    return {key: _wide_dtype(value) for key, value in dtype_params.items()} | map_inner(eqn, _wide_jaxpr)


def _wide_jaxpr(jaxpr: Any) -> Any:
    avals = [jax.ShapeDtypeStruct(aval.shape, _wide_dtype(aval.dtype)) for aval in jaxpr.in_avals]
    return jax.make_jaxpr(widened(jaxpr))(*avals)


def _scan(params: Any, inputs: Sequence[Any]) -> list[Any]:
    constants, carried = params["num_consts"], params["num_carry"]
    fixed, begin = inputs[:constants], list(inputs[constants : constants + carried])
    body = widened(params["jaxpr"])

    def one_round(carry: list[Any], row: list[Any]) -> tuple[list[Any], list[Any]]:
        outputs = body(*fixed, *carry, *row)
        return outputs[:carried], outputs[carried:]

    rows = list(inputs[constants + carried :])
    carry, stacked = jax.lax.scan(one_round, begin, rows, length=params["length"], reverse=params["reverse"])
    return [*carry, *stacked]


def _while(params: Any, inputs: Sequence[Any]) -> list[Any]:
    of_condition, of_body = params["cond_nconsts"], params["body_nconsts"]
    first, second = inputs[:of_condition], inputs[of_condition : of_condition + of_body]
    condition, body = widened(params["cond_jaxpr"]), widened(params["body_jaxpr"])
    begin = list(inputs[of_condition + of_body :])
    return list(jax.lax.while_loop(lambda carry: condition(*first, *carry)[0], lambda carry: body(*second, *carry), begin))


def _cond(params: Any, inputs: Sequence[Any]) -> list[Any]:
    return list(jax.lax.switch(inputs[0], [widened(branch) for branch in params["branches"]], *inputs[1:]))


_LOOPS = {"scan": _scan, "while": _while, "cond": _cond}
