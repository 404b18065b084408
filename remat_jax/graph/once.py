"""A clear refusal of what JAX cannot differentiate twice: a gradient through an offload, in reverse mode.

Forward over reverse works, and so does any forward mode. Reverse over reverse, and reverse over forward, end in JAX's
transposition of a `device_put` between memories with «Expected cotangent type float32[…] but got float32<host>[…]», raised far
from whoever can help. So what enters and leaves an offloading block passes an identity that counts its own transpositions: of a
value once differentiated it may be transposed once, and the first transposition of one that was differentiated twice, which is
where a second backward pass meets the block first, says what is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jax.extend import core as jex
from jax.interpreters import ad, batching, mlir

from remat_jax.errors import UnsupportedError
from remat_jax.graph import is_smooth

ONCE = "differentiated_once"
_TWICE = 2


def transposed_once(run: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    """`run`, a function of flat arrays to a list of arrays, whose gradient says clearly that it has none in reverse mode.

    Raises:
      UnsupportedError: when a gradient of it is differentiated in reverse mode again.
    """

    def refusing(*values: Any) -> list[Any]:
        return [_once(out) for out in run(*map(_once, values))]

    return refusing


def transposed_no_more(derivative: Any) -> Any:
    """A derivative through an offload, which refuses to be differentiated in reverse mode."""
    return once_p.bind(derivative, order=_TWICE) if is_smooth(derivative) else derivative


def _once(value: Any) -> Any:
    return once_p.bind(value, order=0) if is_smooth(value) else value


once_p = jex.Primitive(ONCE)


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], *, order: int) -> tuple[Any, Any]:
    (value,), (tangent,) = primals, tangents
    if not isinstance(tangent, ad.Zero):
        tangent = once_p.bind(tangent, order=min(order + 1, _TWICE))
    # The value itself: another one would be kept for the backward pass beside it.
    return value, tangent


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
