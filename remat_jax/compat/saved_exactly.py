"""Regions of `jax.checkpoint` that save arrays of every dtype unchanged, for policies of `remat_jax.jax_policy`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax._src import ad_checkpoint as _ad_checkpoint
from jax._src import core as _core
from jax._src.interpreters import remat as _remat
from jax.extend.core import Jaxpr

from remat_jax.compat.patches import Patch


def _is_saved_exactly(aval: Any) -> bool:
    """Whether JAX's rounding of saved arrays is left out for an array of the type `aval`."""
    if not isinstance(aval, _core.ShapedArray) or not jnp.issubdtype(aval.dtype, jnp.inexact):
        return False
    return jnp.iscomplexobj(aval) or jnp.finfo(aval.dtype).bits < 16


def _rounding_where_exact(insert: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(insert)
    def insert_where_exact(jaxpr: Jaxpr, num_res: int) -> Any:
        residuals = jaxpr.outvars[len(jaxpr.outvars) - num_res :]
        rounded = [var for var in residuals if not _is_saved_exactly(var.aval)]
        if len(rounded) == len(residuals):
            return insert(jaxpr, num_res)
        # The inserted equations keep the variables of the outputs.
        result = insert(_with_outputs(jaxpr, rounded), len(rounded))
        return _with_outputs(result, jaxpr.outvars)

    return insert_where_exact


def _rounded_where_exact(round_saved: Callable[..., Any]) -> Callable[..., Any]:
    return lambda aval, value: value if _is_saved_exactly(aval) else round_saved(aval, value)


saved_exactly = Patch(
    (_ad_checkpoint, "_insert_reduce_precision", _rounding_where_exact),
    (_remat.reduce_precision_handlers, _core.ShapedArray, _rounded_where_exact),
)
"""Checkpoint regions of JAX save arrays of float8, float4 and complex dtypes unchanged, as they save integers.

JAX rounds each saved array by `reduce_precision` to the exponent and mantissa of its own dtype, because XLA may compute
float32, float16 and bfloat16 with excess precision. For other dtypes this is no identity: in float8 and float4, it rounds
subnormals to zero and overflows above the largest power of two, for example above 256 in `float8_e4m3fn`; it rejects complex
numbers. So the function that inserts the rounding is replaced, and its counterpart of `jax_remat3`.
"""


def _with_outputs(jaxpr: Jaxpr, outputs: Sequence[Any]) -> Any:
    return jaxpr.replace(outvars=list(outputs), debug_info=jaxpr.debug_info.with_unknown_names())
