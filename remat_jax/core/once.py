"""A clear refusal of what JAX cannot differentiate twice: a gradient through an offload, in reverse mode.

Forward over reverse works, and so does any forward mode. Reverse over reverse, and reverse over forward, end in JAX's
transposition of a `device_put` between memories with «Expected cotangent type float32[…] but got float32<host>[…]», raised far
from whoever can help. So the derivatives that enter and leave an offloading block pass an identity that knows how often it was
differentiated: a first derivative may be transposed, and the transposition of a second one, which is where a second backward
pass meets the block first, says what is wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax.extend import core as jex
from jax.interpreters import ad, batching, mlir

from remat_jax.errors import UnsupportedError

_TWICE = 2


def transposed_once(derivative: Any) -> Any:
    """A tangent that enters or leaves an offloading block: in one backward pass its cotangent goes the other way."""
    return once_p.bind(derivative, order=1)


def transposed_no_more(derivative: Any) -> Any:
    """A derivative through an offload that a backward pass or forward mode results in: it is not transposed at all."""
    return once_p.bind(derivative, order=_TWICE) if jnp.issubdtype(derivative.dtype, jnp.inexact) else derivative


once_p = jex.Primitive("differentiated_once")


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], *, order: int) -> tuple[Any, Any]:
    (tangent,) = tangents
    if not isinstance(tangent, ad.Zero):
        tangent = once_p.bind(tangent, order=_TWICE)
    return once_p.bind(*primals, order=order), tangent


def _transpose(cotangent: Any, _: Any, *, order: int) -> list[Any]:
    if isinstance(cotangent, ad.Zero):
        return [cotangent]
    if order >= _TWICE:
        raise UnsupportedError(
            "a gradient through an offload is differentiated in reverse mode again, which JAX does not do with arrays in host "
            "memory. Take the outer derivative in forward mode (jax.jvp or jax.linearize of jax.grad, jax.jacfwd, "
            "jax.hessian), or use a policy that offloads nothing, such as 'full'"
        )
    return [once_p.bind(cotangent, order=order)]


def _batch(args: Sequence[Any], axes: Sequence[int], *, order: int) -> tuple[Any, int]:
    return once_p.bind(*args, order=order), axes[0]


once_p.def_impl(lambda value, order: value)
once_p.to_lojax = lambda value, order: value
once_p.def_abstract_eval(lambda aval, order: aval)
mlir.register_lowering(once_p, lambda _, value, order: [value])
ad.primitive_jvps[once_p] = _jvp
ad.primitive_transposes[once_p] = _transpose
batching.primitive_batchers[once_p] = _batch
