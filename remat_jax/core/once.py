"""Raises a clear error when a derivative through an offload is differentiated again in reverse mode, which JAX cannot do.

Reverse over reverse and reverse over forward fail when JAX transposes a `device_put` between memories. JAX's error, «Expected
cotangent type float32[…] but got float32<host>[…]», does not name the cause. So each tangent that enters or leaves an
offloading block passes through an identity, `once_p`, with `order` 1. The derivative of `once_p` is a `once_p` of order 2. The
first backward pass transposes order 1, which is allowed. A second backward pass transposes order 2, which raises our error
before JAX transposes the rest of the block.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from remat_jax import compat
from remat_jax.compat import rules
from remat_jax.errors import UnsupportedError

_TWICE = 2


def transposed_once(derivative: Any) -> Any:
    """Pass `derivative`, a tangent of an offloading block's input or output, through a `once_p` that may be transposed."""
    return once_p.bind(derivative, order=1)


def transposed_no_more(derivative: Any) -> Any:
    """Pass `derivative`, computed from offloaded residuals, through a `once_p` that raises our error if transposed."""
    return once_p.bind(derivative, order=_TWICE) if jnp.issubdtype(derivative.dtype, jnp.inexact) else derivative


once_p = compat.new_primitive("differentiated_once", lambda value, order: value, multiple_results=False)


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], *, order: int) -> tuple[Any, Any]:
    (tangent,) = tangents
    if not isinstance(tangent, rules.Zero):
        tangent = once_p.bind(tangent, order=_TWICE)
    return once_p.bind(*primals, order=order), tangent


def _transpose(cotangent: Any, _: Any, *, order: int) -> list[Any]:
    if isinstance(cotangent, rules.Zero):
        return [cotangent]
    if order >= _TWICE:
        raise UnsupportedError(
            "a gradient through an offload is differentiated again in reverse mode; JAX cannot do this with arrays in host "
            "memory. Take the outer derivative in forward mode (jax.jvp or jax.linearize of jax.grad, jax.jacfwd, "
            "jax.hessian), or use a policy that offloads nothing, such as 'full'"
        )
    return [once_p.bind(cotangent, order=order)]


def _batch(args: Sequence[Any], axes: Sequence[int], *, order: int) -> tuple[Any, int]:
    return once_p.bind(*args, order=order), axes[0]


once_p.def_abstract_eval(lambda aval, order: aval)
rules.primitive_jvps[once_p] = _jvp
rules.primitive_transposes[once_p] = _transpose
rules.primitive_batchers[once_p] = _batch
