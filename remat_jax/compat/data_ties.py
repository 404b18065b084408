"""Ties for XLA:TPU, which drops optimization barriers: values that depend on the data of the arrays that they wait for.

From an element of each of these arrays a 0 is computed in a way that the compiler cannot see through. A tied array is selected
if this number is 0, which fuses into the reader of the array. A copy from the host starts at this place. On other platforms
and on several devices nothing is added: an element of a partitioned array would be an exchange between devices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.interpreters import ad, batching, mlir

from remat_jax.compat.jaxprs import new_primitive
from remat_jax.compat.tracing import is_on_host, on_device

_DEVICE = jax.memory.Space.Device


def held(values: Sequence[Any], waits: Sequence[Any]) -> list[Any]:
    """`values`, arrays in device memory, which XLA:TPU does not use before the arrays `waits` are computed."""
    return _held_p.bind(*values, *waits, number=len(values))[: len(values)] if values and waits else list(values)


def fetched(value: Any, waits: Sequence[Any]) -> Any:
    """The array `value`, in host memory, copied to device memory; on a TPU once the arrays `waits` are computed."""
    return _fetched_p.bind(value, *waits)


def _alone(ctx: Any) -> bool:
    """Whether the program being lowered is for one device."""
    return getattr(ctx.module_context.axis_context, "num_devices", None) == 1


def _lowered_alone(tied: Callable[..., Any], plain: Callable[..., Any], *, multiple_results: bool) -> Any:
    """A lowering rule: `tied` in a program for one device, else `plain`."""

    def rule(ctx: Any, *values: Any, **params: Any) -> Any:
        function = tied if _alone(ctx) else plain
        return mlir.lower_fun(function, multiple_results=multiple_results)(ctx, *values, **params)

    return rule


def _is_plain(value: Any) -> bool:
    """Whether an array has elements, and these are numbers or booleans: no keys."""
    return value.size > 0 and any(jnp.issubdtype(value.dtype, kind) for kind in (jnp.number, jnp.bool_))


def _rows(value: Any) -> tuple[int, int] | None:
    """The axis of an array along which XLA:TPU can copy a part, and the size that divides the parts; None if it cannot.

    The last two axes are in tiles of 8 x 128 words of 32 bits.
    """
    tile = max(8, 32 // value.dtype.itemsize)
    for axis, size in enumerate(value.shape[:-1]):
        step = tile if axis == value.ndim - 2 else 1
        if size >= 2 * step:
            return axis, step
    return None


def _element(value: Any) -> Any:
    """An element of an array in device or host memory, as an integer of 32 bits; None if it has no such element."""
    if not _is_plain(value):
        return None
    if is_on_host(value):
        rows = _rows(value)
        if rows is None:
            return None
        axis, step = rows
        sizes = [step if dim == axis else size for dim, size in enumerate(value.shape)]
        value = jax.device_put(lax.dynamic_slice(value, (0,) * value.ndim, sizes), _DEVICE)
    element = lax.slice(value, (0,) * value.ndim, (1,) * value.ndim).reshape(())
    if jnp.issubdtype(element.dtype, jnp.complexfloating):
        element = element.real
    if jnp.issubdtype(element.dtype, jnp.floating):
        element = lax.bitcast_convert_type(element.astype(jnp.float32), jnp.int32)
    return element.astype(jnp.int32)


def _zero(waits: Sequence[Any]) -> Any:
    """0, computed from the arrays `waits` in a way that no compiler sees through: k (k + 1) is even."""
    elements = [element for element in map(_element, waits) if element is not None]
    return sum((lax.rem(element * (element + 1), jnp.int32(2)) for element in elements), jnp.int32(0))


def _held(*operands: Any, number: int) -> list[Any]:
    ready = _zero(operands[number:]) == 0
    values = [
        lax.select(ready, value, lax.full_like(value, 0)) if _is_plain(value) and not is_on_host(value) else value
        for value in operands[:number]
    ]
    return [*values, *operands[number:]]


def _fetched(value: Any, *waits: Any) -> Any:
    rows = _rows(value)
    if rows is None or not waits:
        return jax.device_put(value, _DEVICE)
    axis, step = rows
    # XLA knows the only place of a slice that is the whole array. A half has several.
    half, zero, parts = value.shape[axis] // 2 // step * step, _zero(waits), []
    for place, size in ((0, half), (half, value.shape[axis] - half)):
        starts = [zero + jnp.int32(place) if dim == axis else jnp.int32(0) for dim in range(value.ndim)]
        sizes = [size if dim == axis else whole for dim, whole in enumerate(value.shape)]
        parts.append(jax.device_put(lax.dynamic_slice(value, starts, sizes), _DEVICE))
    return lax.concatenate(parts, axis)


def _unheld(*operands: Any, number: int) -> list[Any]:
    return list(operands)


def _plainly_fetched(value: Any, *waits: Any) -> Any:
    return jax.device_put(value, _DEVICE)


def _fetched_tangent(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
    result, tangent = _fetched_p.bind(*primals), tangents[0]
    if isinstance(tangent, ad.Zero):
        return result, ad.Zero(jax.typeof(result).to_tangent_aval())
    return result, jax.device_put(tangent, _DEVICE)


# The primitives have the names of JAX's barrier and copy, so that readers of a program treat them as such.
_held_p = new_primitive("optimization_barrier", _unheld)
mlir.register_lowering(_held_p, _lowered_alone(_held, _unheld, multiple_results=True), platform="tpu")
_held_p.def_abstract_eval(lambda *avals, number: list(avals))
ad.primitive_jvps[_held_p] = lambda primals, tangents, number: (_held_p.bind(*primals, number=number), tangents)
batching.primitive_batchers[_held_p] = lambda args, axes, number: (_held_p.bind(*args, number=number), axes)

_fetched_p = new_primitive("device_put", _plainly_fetched, multiple_results=False)
mlir.register_lowering(_fetched_p, _lowered_alone(_fetched, _plainly_fetched, multiple_results=False), platform="tpu")
_fetched_p.def_abstract_eval(lambda value, *waits: on_device(value))
ad.primitive_jvps[_fetched_p] = _fetched_tangent
batching.primitive_batchers[_fetched_p] = lambda args, axes: (_fetched_p.bind(*args), axes[0])
