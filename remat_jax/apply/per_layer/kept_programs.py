"""A cache of programs under policies by layer, so that eager calls are not compiled every time.

Eager calls retrace the function every time, because it may read values from outside: a model that it closes over, NumPy's
random numbers, the time. An identical trace reuses the earlier program with policies, for which JAX has compiled code. Programs
that contain arrays, or functions that could close over arrays or have effects, are not cached.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, JaxprEqn

from remat_jax import compat
from remat_jax.apply.audit import Audit
from remat_jax.apply.per_layer import layered
from remat_jax.core.alike import Original, has_plain_rules, holds_arrays, holds_functions
from remat_jax.core.marks import Block
from remat_jax.core.walk import interpret, retrace

_MOST = 32


@dataclass(frozen=True)
class _Program:
    """A program with marks, and the same program under policies (the trace of `layered.evaluate`).

    Attributes:
      settings: the blocks whose marks are replaced, and the JAX settings on which traces depend.
      marked: the program with marks.
      resolved: the same program with policies in place of the marks.
    """

    settings: object
    marked: Original
    resolved: ClosedJaxpr
    counts: Counter[Block]
    audit: Audit


# The most recently used program is last. The tuple is replaced, never changed, so that threads can share it.
_programs: tuple[_Program, ...] = ()


def evaluate(
    jaxpr: ClosedJaxpr, args: Sequence[Any], blocks: frozenset[Block], audit: Audit
) -> tuple[list[Any], Counter[Block]]:
    """`layered.evaluate`, but an identical program is not compiled again."""
    global _programs
    jaxpr, consts = compat.hoist_consts(jaxpr)
    if compat.is_staging() or compat.uses_references(jaxpr) or holds_arrays(jaxpr) or holds_functions(jaxpr):
        return layered.evaluate(jaxpr, [*consts, *args], blocks, audit)
    settings = blocks, compat.trace_settings()
    alike = (other for other in reversed(_programs) if other.settings == settings and other.marked.is_like(jaxpr))
    program = next(alike, None)
    if program is None and not has_plain_rules(jaxpr):
        return layered.evaluate(jaxpr, [*consts, *args], blocks, audit)
    program = program or _resolved(jaxpr, blocks, settings)
    _programs = (*(other for other in _programs if other is not program), program)[-_MOST:]
    audit.add(program.audit)
    return compat.jaxpr_function(program.resolved)(*consts, *args), program.counts


def _resolved(jaxpr: ClosedJaxpr, blocks: frozenset[Block], settings: object) -> _Program:
    audit, counts = Audit(), []

    def resolve(*args: Any) -> list[Any]:
        outputs, number = layered.evaluate(jaxpr, args, blocks, audit)
        counts.append(number)
        return outputs

    resolved = retrace(jaxpr, resolve)
    with_jits = retrace(resolved, lambda *args: interpret(resolved, args, _loops_in_jit))
    return _Program(settings, Original(jaxpr), with_jits, counts[-1], audit)


def _loops_in_jit(eqn: JaxprEqn, inputs: list[Any]) -> list[Any] | None:
    """Evaluates a loop inside a `jit`, so that JAX caches its derivative and its compiled code too."""
    if eqn.primitive.name not in ("scan", "while", "cond"):
        return None
    return list(jax.jit(lambda *values: compat.bind(eqn, values))(*inputs))
