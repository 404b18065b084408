"""How the steps of a comparison are compiled, and what their jaxprs show before."""

from __future__ import annotations

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp

from remat_jax.graph.walk import equations

# In float64 only the mathematics counts, and what XLA spends on fast code is lost: about five times quicker to compile.
_QUICK = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
    "xla_cpu_use_fusion_emitters": False,
}


def compile_options(dtype: str) -> dict[str, Any]:
    """Options for XLA: quick code for float64, the user's own code for what is judged by its rounding."""
    return _known() if dtype == "float64" and jax.default_backend() == "cpu" else {}


@functools.cache
def _known() -> dict[str, Any]:
    """Those of `_QUICK` that this XLA knows."""
    found: dict[str, Any] = {}
    for name, value in _QUICK.items():
        try:
            jax.jit(lambda: 1).lower().compile(compiler_options={name: value})
        except jax.errors.JaxRuntimeError as error:
            if "No such compile option" not in str(error):
                raise
        else:
            found[name] = value
    return found


def down_casts(jaxpr: Any) -> list[str]:
    """Where float64 becomes a smaller floating-point dtype, by the name stack; each place once.

    >>> with jax.enable_x64(True):
    ...     down_casts(jax.make_jaxpr(jax.jit(lambda x: x.astype("float32").sum()))(jnp.ones(2, "float64")))
    ['float64 to float32']
    """
    found: dict[str, None] = {}
    for eqn in equations(jaxpr):
        if eqn.primitive.name != "convert_element_type":
            continue
        before, after = eqn.invars[0].aval.dtype, eqn.outvars[0].aval.dtype
        if before == jnp.float64 and jnp.issubdtype(after, jnp.floating) and after != before:
            where = _place(str(eqn.source_info.name_stack))
            found[f"float64 to {after}" + (f" in {where}" if where else "")] = None
    return list(found)


def _place(names: str) -> str:
    """A name stack without the transformations, which name one place once for each pass."""
    while (plain := re.sub(r"\b(?:jvp|transpose|vmap)\(([^()]*)\)", r"\1", names)) != names:
        names = plain
    return names
