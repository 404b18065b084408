"""A tap: the identity on an array, as a primitive that stays in a jaxpr and whose derivative leaves taps for cotangents.

So a traced training step says by itself where each module's inputs, outputs and cotangents are: through `jit`, `scan`,
`jax.checkpoint`, and through blocks that are linearised, since nothing has to be carried out of them while tracing.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from remat_jax import compat


class Label(NamedTuple):
    """Which array a tap is on: `role` is "input" or "output", `number` its place among the arrays of that role."""

    call: int
    role: str
    number: int


tap_p = Primitive("tap")

# The taps whose arrays are differentiated, while a step is traced; and which step, as part of JAX's trace caches: a function
# that was jitted and traced before would have the taps of another step.
differentiated: ContextVar[set[Label] | None] = ContextVar("differentiated", default=None)
step_traced = compat.trace_context(0)


def tap(x: Any, label: Label) -> Any:
    """`x`, and a mark in the jaxpr; where `x` is differentiated, another one on its cotangent."""
    return tap_p.bind(x, label=label, what="value")


def _jvp(primals: Any, tangents: Any, *, label: Label, what: str) -> tuple[Any, Any]:
    (x,), (tangent,) = primals, tangents
    found = differentiated.get()
    if found is not None and type(tangent) is not ad.Zero:
        found.add(label)
    after = tangent if type(tangent) is ad.Zero else tap_p.bind(tangent, label=label, what="tangent")
    return tap_p.bind(x, label=label, what=what), after


def _transpose(cotangent: Any, _: Any, *, label: Label, what: str) -> list[Any]:
    return [cotangent if type(cotangent) is ad.Zero else tap_p.bind(cotangent, label=label, what="cotangent")]


tap_p.def_impl(lambda x, **_: jnp.asarray(x))
tap_p.def_abstract_eval(lambda x, **_: x)
mlir.register_lowering(tap_p, lambda _, x, **__: [x])
batching.primitive_batchers[tap_p] = lambda args, dims, **params: (tap_p.bind(args[0], **params), dims[0])
ad.primitive_jvps[tap_p] = _jvp
ad.primitive_transposes[tap_p] = _transpose
