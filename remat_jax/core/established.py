"""Rewriting a program traced under `jax_remat3` for JAX's established rematerialisation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from remat_jax import compat
from remat_jax.core.walk import equations, inner_jaxprs, interpret, map_inner, retrace


def established(jaxpr: Any) -> Any:
    """The closed `jaxpr` with the names and regions of `jax_remat3` replaced by established ones; itself if it has none.

    JAX's policies ignore the new names, so a named array would silently be recomputed. A policy cannot keep arrays inside a new
    region either.
    """
    if not any(map(_is_new, equations(jaxpr))):
        return jaxpr

    def visit(eqn: Any, inputs: Sequence[Any]) -> list[Any] | None:
        name, body = compat.given_name(eqn), compat.hidden_body(eqn)
        if body is not None:
            return compat.bind_established(eqn, established(compat.closed(body)), list(inputs))
        if name is not None and _is_new(eqn):
            return [compat.bind_name(eqn, name, inputs[0])]
        # Rules of custom derivatives are traced later, under the setting of that time.
        if eqn.primitive.name.startswith("custom_") or not inner_jaxprs(eqn):
            return None
        with compat.inner_context(eqn):
            changed = map_inner(eqn, established)
        return compat.bind(eqn, inputs, **changed)

    with compat.classic_rematerialisation():
        return retrace(jaxpr, lambda *args: interpret(jaxpr, args, visit))


def _is_new(eqn: Any) -> bool:
    return compat.hidden_body(eqn) is not None or (compat.given_name(eqn) is not None and eqn.primitive.name != "name")
