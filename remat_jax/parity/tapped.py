"""Taps: identity operations that stay in a jaxpr. Evaluating the jaxpr returns the value and the cotangent at each tap."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn, Primitive

from remat_jax import compat
from remat_jax.compat import rules
from remat_jax.core.walk import Visit, bodies, equations, interpret


class Label(NamedTuple):
    """Identifies a tapped array: `call` is an index into `Recorder.calls`, `number` the index of the array in its role.

    `role` is "input", "output" or "state".
    """

    call: int
    role: str
    number: int


tap_p = Primitive("tap")

# Set while a step is traced: the labels of the taps whose arrays are differentiated, and the step's number. The number is part
# of the key of JAX's trace caches; otherwise a jitted function would reuse a trace with the taps of an earlier step.
differentiated: ContextVar[set[Label] | None] = ContextVar("differentiated", default=None)
step_traced = compat.trace_context(0)


def tap(x: jax.Array, label: Label) -> jax.Array:
    """`x`, marked in the jaxpr; if `x` is differentiated, its cotangent is marked too."""
    return tap_p.bind(x, label=label, what="value")


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], *, label: Label, what: str) -> tuple[Any, Any]:
    (x,), (tangent,) = primals, tangents
    labels = differentiated.get()
    if labels is not None and type(tangent) is not rules.Zero:
        labels.add(label)
    after = tangent if type(tangent) is rules.Zero else tap_p.bind(tangent, label=label, what="tangent")
    return tap_p.bind(x, label=label, what=what), after


def _transpose(cotangent: jax.Array | rules.Zero, _: object, *, label: Label, what: str) -> list[Any]:
    return [cotangent if type(cotangent) is rules.Zero else tap_p.bind(cotangent, label=label, what="cotangent")]


tap_p.def_impl(lambda x, **_: jnp.asarray(x))
tap_p.def_abstract_eval(lambda x, **_: x)
rules.register_lowering(tap_p, lambda _, x, **__: [x])
rules.primitive_batchers[tap_p] = lambda args, dims, **params: (tap_p.bind(args[0], **params), dims[0])
rules.primitive_jvps[tap_p] = _jvp
rules.primitive_transposes[tap_p] = _transpose


# Taps in the bodies of these equations are not read: the bodies run a data-dependent number of times, or on part of the data.
_CLOSED = frozenset({"while", "cond", "shard_map", "pallas_call", "run_state"})


@dataclass(frozen=True)
class TapVisit:
    """One visit of a tap by an evaluation; a tap inside loops is visited in every iteration.

    Attributes:
        label, what: the array, and whether the tap is on its "value" or its "cotangent".
        parts: the parts of the module's path, with None in place of each loop index.
        index: the indices of the enclosing loops, outermost first.
    """

    label: Label
    what: str
    parts: tuple[str | None, ...]
    index: tuple[int, ...] = ()

    @property
    def path(self) -> str:
        """The module's path, with the indices of loops."""
        indices = iter(self.index)
        return "/".join(str(next(indices)) if part is None else part for part in self.parts)


def visits(
    jaxpr: ClosedJaxpr, paths: Sequence[tuple[str, ...]], depths: dict[tuple[int, int], int] | None = None
) -> list[TapVisit]:
    """The visits of the closed `jaxpr`'s taps, in the order of `evaluate`; `paths` has every call's module path."""
    depths, reached = {} if depths is None else depths, list[TapVisit]()
    for eqn in jaxpr.jaxpr.eqns:
        if is_tap(eqn):
            label = eqn.params["label"]
            reached.append(TapVisit(label, eqn.params["what"], paths[label.call]))
        elif (body := _body(eqn)) is not None:
            inside = visits(body, paths, depths)
            reached += _in_every_iteration(eqn, inside, depths) if eqn.primitive.name == "scan" else inside
    return reached


def _in_every_iteration(eqn: JaxprEqn, inside: list[TapVisit], depths: dict[tuple[int, int], int]) -> list[TapVisit]:
    """The visits of a scan, given the visits of its body.

    In a path, the loop's index comes after the prefix that all module paths in the body share.
    `depths` maps (call, number of inner loops) to this position, so that the backward pass's loop uses the same position.
    """
    parts_by_level = zip(*(visit.parts for visit in inside), strict=False)
    common = len([*itertools.takewhile(lambda parts: len(set(parts)) == 1, parts_by_level)])
    looped = []
    for visit in inside:
        depth = depths.setdefault((visit.label.call, len(visit.index)), common)
        looped.append(replace(visit, parts=(*visit.parts[:depth], None, *visit.parts[depth:])))
    return [replace(visit, index=(turn, *visit.index)) for turn in _turns(eqn) for visit in looped]


def _turns(scan: JaxprEqn) -> range:
    """The iterations of a scan, in the order in which they run."""
    forwards = range(scan.params["length"])
    return forwards[::-1] if scan.params["reverse"] else forwards


def evaluate(jaxpr: ClosedJaxpr, args: Sequence[Any], given: Mapping[int, Any]) -> tuple[list[Any], list[Any]]:
    """Evaluate the closed `jaxpr`; return its outputs and the value at each tap, in the order of `visits`.

    `given` maps the index of a visit to an array that replaces the value there; None keeps the value.
    """
    values: list[Any] = []

    def visit(eqn: JaxprEqn, inputs: list[Any]) -> list[Any] | None:
        if is_tap(eqn):
            other = given.get(len(values))
            values.append(inputs[0])
            return [inputs[0] if other is None else np.asarray(other, inputs[0].dtype)]
        body, is_scan = _body(eqn), eqn.primitive.name == "scan"
        # A call without taps is also evaluated equation by equation: as a whole, it would be compiled in every evaluation.
        if body is None or (is_scan and not (eqn.params["length"] and any(map(is_tap, equations(body))))):
            return None
        with compat.eqn_context(eqn):
            return _scan(eqn, body, inputs, visit) if is_scan else interpret(body, inputs, visit)

    return interpret(jaxpr, args, visit), values


def _scan(eqn: JaxprEqn, body: ClosedJaxpr, inputs: list[Any], visit: Visit) -> list[Any]:
    """Run a scan as a Python loop: another model can reuse the compiled operations, but not a compiled loop."""
    consts, carried = compat.scan_layout(eqn)
    # NumPy arrays are cheap to index; RNG keys stay in JAX.
    xs = [x if _is_key(x) else np.asarray(x) for x in inputs[consts + carried :]]
    carry, rows = inputs[consts : consts + carried], dict[int, list[Any]]()
    for turn in _turns(eqn):
        outputs = interpret(body, [*inputs[:consts], *carry, *(x[turn] for x in xs)], visit)
        carry, rows[turn] = outputs[:carried], outputs[carried:]
    columns = zip(*(rows[turn] for turn in sorted(rows)), strict=True)
    return [*carry, *(jnp.stack(column) if _is_key(column[0]) else np.stack(column) for column in columns)]


def _is_key(x: jax.Array) -> bool:
    return bool(jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended))


def is_tap(eqn: JaxprEqn) -> bool:
    """Whether an equation is a tap on a value or a cotangent; taps on tangents are ignored."""
    return eqn.primitive is tap_p and eqn.params["what"] != "tangent"


class Running:
    """Tracks which calls enclose the current equation, while the equations of a jaxpr are visited in order.

    `paths` has the module path of every call.
    """

    def __init__(self, paths: Sequence[tuple[str, ...]]) -> None:
        self._paths, self._calls = paths, list[int]()

    @property
    def path(self) -> str:
        """The module path of the last call that has begun and not ended; "" outside of all calls."""
        return "/".join(self._paths[self._calls[-1]]) if self._calls else ""

    def passes(self, tap: JaxprEqn) -> None:
        """Visit a tap: a call begins at its first input tap, and ends at an output tap."""
        label = tap.params["label"]
        if label.role == "input" and label.call not in self._calls:
            self._calls.append(label.call)
        elif label.role == "output" and label.call in self._calls:
            del self._calls[self._calls.index(label.call) :]


def _body(eqn: JaxprEqn) -> ClosedJaxpr | None:
    """The jaxpr that `eqn` evaluates once, or in every iteration, on the inputs of `eqn`; None if its taps are not read."""
    inside = bodies(eqn)
    fits = len(inside) == 1 and len(inside[0].in_avals) == len(eqn.invars)
    return inside[0] if fits and eqn.primitive.name not in _CLOSED else None
