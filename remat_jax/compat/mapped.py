"""Batching a jaxpr for `vmap`, and a batching rule that JAX lacks.

JAX batches a function before it differentiates it. A block has its own derivative rule, so `vmap` batches that rule, which
already contains tangents: the linear part of a `custom_vjp` needs a batching rule.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax._src import core as _core
from jax._src.interpreters import ad as _ad
from jax._src.interpreters import batching as _batching


def batched(
    jaxpr: Any, axis: Any, args: Sequence[Any], axes: Sequence[int | None], instantiate: bool | list[bool] = False
) -> tuple[Any, list[Any], list[int | None]]:
    """The closed `jaxpr` under the `vmap` of a batching rule.

    An output that is the same for the whole batch (a mean over it) stays one array: `vmap` accepts `out_axes=None` for it.

    Args:
      axis: the axis data that JAX passes to the batching rule.
      args: the operands.
      axes: for each operand, the index of its mapped axis, or None.
      instantiate: whether all outputs, or which outputs, are mapped in any case.

    Returns:
      The mapped jaxpr, its operands with the mapped axis in front, and for each output 0 or None.
    """
    in_front = [arg if dim is None else jnp.moveaxis(arg, dim, 0) for arg, dim in zip(args, axes, strict=True)]
    mapped, which = _batching.batch_jaxpr(jaxpr, axis, [dim is not None for dim in axes], instantiate)
    return mapped, in_front, [0 if flag else None for flag in which]


def _known_since_0_12(num_res: int) -> tuple[Any, ...]:
    """Two more arguments since JAX 0.12: the number of residuals, and a name for messages."""
    asked = inspect.signature(_batching.batch_custom_vjp_bwd).parameters
    return (lambda: num_res, "custom_vjp") if "num_res" in asked else ()


def _map_linear(
    axis: Any, args: Sequence[Any], dims: Sequence[Any], *, num_res: int, bwd: Any, out_avals: Any, in_zeros: Any, **rest: Any
) -> tuple[list[Any], list[int]]:
    """The batched linear part of a `custom_vjp`, as JAX batches its rule: cotangents of unmapped operands are summed."""
    along = iter(dims[num_res:])
    places = [None if zero else next(along) for zero in in_zeros]
    given = [*dims[:num_res], *[0] * len(out_avals)]
    mapped = _batching.batch_custom_vjp_bwd(bwd, _core.TraceTag(), axis, given, places, *_known_since_0_12(num_res))
    avals = [_core.unmapped_aval(axis.size, 0, aval, axis.explicit_mesh_axis) for aval in out_avals]
    outputs = _ad.custom_lin_p.bind(*args, num_res=num_res, bwd=mapped, out_avals=avals, in_zeros=in_zeros, **rest)
    return list(outputs), [0] * len(avals)


# JAX's rule raises that a `custom_vjp` has no forward mode. Evaluating the result still raises that error.
_batching.fancy_primitive_batchers[_ad.custom_lin_p] = _map_linear
