"""Programs under policies by layer that are kept, so that calls that are not under `jit` are not compiled every time.

The function itself is traced in every call: what it reads from outside (a model that it closes over, a random number of
NumPy's, the time) must not be that of an earlier call. Only where this gives the same program as before is the one with
policies taken from there, and with it what JAX has compiled of it. What is kept are programs without arrays, and without
functions that could close over some or do what the program does not say: callbacks, rules of a `custom_vjp`, policies of
`jax.checkpoint`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax

from remat_jax import compat
from remat_jax.apply.audit import Audit
from remat_jax.apply.per_layer import layered
from remat_jax.core.alike import Original, has_plain_rules, holds_arrays, holds_functions
from remat_jax.core.marks import Block
from remat_jax.core.walk import interpret, retrace

_MOST = 32


@dataclass(frozen=True)
class _Program:
    """A program with marks, and what it is under the policies.

    Attributes:
      settings: all that JAX's traces depended on, and the blocks whose policies are set.
      marked: the program with marks.
      resolved: the program without.
      counts: how many blocks there were.
      audit: what the policies met.
    """

    settings: Any
    marked: Original
    resolved: Any
    counts: Counter[Block]
    audit: Audit


# The last ones that were used, the latest last. Never changed, only replaced.
_programs: tuple[_Program, ...] = ()


def evaluate(jaxpr: Any, args: Sequence[Any], blocks: frozenset[Block], audit: Audit) -> tuple[list[Any], Counter[Block]]:
    """`layered.evaluate`, which compiles nothing that was compiled for the same program before."""
    jaxpr, consts = compat.hoist_consts(jaxpr)
    if compat.is_staging() or compat.uses_references(jaxpr) or holds_arrays(jaxpr) or holds_functions(jaxpr):
        return layered.evaluate(jaxpr, [*consts, *args], blocks, audit)
    program = _found(jaxpr, blocks)
    if program is None and not has_plain_rules(jaxpr):
        return layered.evaluate(jaxpr, [*consts, *args], blocks, audit)
    program = program or _made(jaxpr, blocks)
    _keep(program)
    audit.add(program.audit)
    return compat.jaxpr_function(program.resolved)(*consts, *args), program.counts


def _settings(blocks: frozenset[Block]) -> Any:
    return blocks, compat.trace_settings()


def _found(jaxpr: Any, blocks: frozenset[Block]) -> _Program | None:
    settings = _settings(blocks)
    return next((one for one in reversed(_programs) if one.settings == settings and one.marked.is_like(jaxpr)), None)


def _made(jaxpr: Any, blocks: frozenset[Block]) -> _Program:
    audit, counts = Audit(), []

    def resolve(*args: Any) -> list[Any]:
        outputs, found = layered.evaluate(jaxpr, args, blocks, audit)
        counts.append(found)
        return outputs

    resolved = retrace(jaxpr, resolve)
    whole = retrace(resolved, lambda *args: interpret(resolved, args, _loops_in_jit))
    return _Program(_settings(blocks), Original(jaxpr), whole, counts[-1], audit)


def _loops_in_jit(eqn: Any, inputs: list[Any]) -> list[Any] | None:
    """Loops are compiled as a whole anyway; of one in a `jit` JAX keeps what it is differentiated and compiled to as well."""
    if eqn.primitive.name not in ("scan", "while", "cond"):
        return None
    return list(jax.jit(lambda *values: compat.bind(eqn, values))(*inputs))


def _keep(program: _Program) -> None:
    global _programs
    _programs = (*(one for one in _programs if one is not program), program)[-_MOST:]
