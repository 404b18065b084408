"""Taps: identities that stay in a jaxpr. Evaluating the jaxpr returns the value and the cotangent at each tap."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from remat_jax import compat
from remat_jax.core.walk import bodies, interpret


class Label(NamedTuple):
    """The array that a tap is on: its `role` ("input", "output" or "state") and its `number` among that role's arrays."""

    call: int
    role: str
    number: int


tap_p = Primitive("tap")

# While a step is traced: the taps whose arrays are differentiated, and the step's number. The number is part of JAX's trace
# caches; without it a jitted function would reuse a trace with another step's taps.
differentiated: ContextVar[set[Label] | None] = ContextVar("differentiated", default=None)
step_traced = compat.trace_context(0)


def tap(x: Any, label: Label) -> Any:
    """`x`, marked in the jaxpr; if `x` is differentiated, its cotangent is marked too."""
    return tap_p.bind(x, label=label, what="value")


def _jvp(primals: Any, tangents: Any, *, label: Label, what: str) -> tuple[Any, Any]:
    (x,), (tangent,) = primals, tangents
    labels = differentiated.get()
    if labels is not None and type(tangent) is not ad.Zero:
        labels.add(label)
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


Depths = dict[tuple[int, int], int]  # (call, number of loops inside) → the position of the loop's index in the path

# Taps are not read here: these bodies run a data-dependent number of times, or on part of the data.
_CLOSED = frozenset({"while", "cond", "shard_map", "pallas_call", "run_state"})


@dataclass(frozen=True)
class TapPlace:
    """Where a tap is in a program.

    Attributes:
        label, what: the array, and whether the tap is on its "value" or its "cotangent".
        path: the module's path; None stands for the index of a loop.
        key: the position in the order of execution, a sort key; None stands for the index of a loop.
        loops: the lengths of the enclosing loops, the outermost first; negative if a loop runs backwards.
    """

    label: Label
    what: str
    path: tuple[str | None, ...]
    key: tuple[int | None, ...]
    loops: tuple[int, ...] = ()

    def instances(self) -> Iterator[tuple[tuple[int, ...], str, tuple[int, ...]]]:
        """For every iteration: its indices, and the path and the key with the indices filled in."""
        for index in itertools.product(*(range(abs(length)) for length in self.loops)):
            left = iter(index)
            path = "/".join(str(next(left)) if part is None else part for part in self.path)
            turns = iter([i if length > 0 else -length - 1 - i for i, length in zip(index, self.loops, strict=True)])
            yield index, path, tuple(next(turns) if part is None else part for part in self.key)


def places(jaxpr: Any, paths: Sequence[tuple[str, ...]]) -> tuple[list[TapPlace], set[int]]:
    """The taps of the closed `jaxpr` in order, and the calls whose taps cannot be read.

    `paths` has the module path of every call. A loop's index follows the common prefix of its modules' paths, which is the
    path of the repeated module.
    """
    hidden: set[int] = set()
    return _places(jaxpr, paths, {}, hidden), hidden


def _places(jaxpr: Any, paths: Sequence[tuple[str, ...]], depths: Depths, hidden: set[int]) -> list[TapPlace]:
    taps: list[TapPlace] = []
    for position, eqn in enumerate(jaxpr.jaxpr.eqns):
        if is_tap(eqn):
            label = eqn.params["label"]
            taps.append(TapPlace(label, eqn.params["what"], paths[label.call], (position,)))
            continue
        body = _body(eqn)
        if body is None:
            hidden |= {inner.label.call for inside in bodies(eqn) for inner in _places(inside, paths, {}, set())}
            continue
        inner = _places(body, paths, depths, hidden)
        if eqn.primitive.name == "scan":
            inner = _looped(eqn, inner, depths)
        taps += [replace(place, key=(position, *place.key)) for place in inner]
    return taps


def _looped(eqn: Any, inner: list[TapPlace], depths: Depths) -> list[TapPlace]:
    """The taps of a scan's body, seen from outside; a backward loop has its index at the forward loop's position."""
    parts_by_level = zip(*(place.path for place in inner), strict=False)
    common = len([*itertools.takewhile(lambda parts: len(set(parts)) == 1, parts_by_level)])
    length = -eqn.params["length"] if eqn.params["reverse"] else eqn.params["length"]
    looped = []
    for place in inner:
        depth = depths.setdefault((place.label.call, len(place.loops)), common)
        path = (*place.path[:depth], None, *place.path[depth:])
        looped.append(replace(place, path=path, key=(None, *place.key), loops=(length, *place.loops)))
    return looped


def evaluate(jaxpr: Any, args: Sequence[Any], given: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Evaluate the closed `jaxpr`; return its outputs and the value at each tap, in the order of `places`.

    An array in `given` replaces the value at its tap; None keeps the value.
    """
    values: list[Any] = []
    remaining = iter(given)

    def visit(eqn: Any, inputs: list[Any]) -> list[Any] | None:
        if is_tap(eqn):
            values.append(inputs[0])
            other = next(remaining)
            return [inputs[0] if other is None else np.asarray(other, inputs[0].dtype)]
        body, is_scan = _body(eqn), eqn.primitive.name == "scan"
        count = 0 if body is None else _count(body)
        # A call without taps is evaluated equation by equation too: whole, it would be compiled on every evaluation.
        if body is None or (is_scan and not (count and eqn.params["length"])):
            return None
        inside = list(itertools.islice(remaining, count))
        with compat.eqn_context(eqn):
            outputs, inner = _scan(eqn, body, inputs, inside) if is_scan else evaluate(body, inputs, inside)
        values.extend(inner)
        return outputs

    return interpret(jaxpr, args, visit), values


def _scan(eqn: Any, body: Any, inputs: list[Any], given: list[Any]) -> tuple[list[Any], list[Any]]:
    """A scan run in Python: the next model reuses its compiled operations, but would have to compile a whole loop anew."""
    consts, carried = compat.scan_layout(eqn)
    carry, length = inputs[consts : consts + carried], eqn.params["length"]
    xs = [_rows(x) for x in inputs[consts + carried :]]
    turns = range(length - 1, -1, -1) if eqn.params["reverse"] else range(length)
    rows: dict[int, list[Any]] = {}
    for turn in turns:
        inside = [None if values is None else values[turn] for values in given]
        outputs, tapped = evaluate(body, [*inputs[:consts], *carry, *(x[turn] for x in xs)], inside)
        carry, rows[turn] = outputs[:carried], [*outputs[carried:], *tapped]
    stacked = [_stacked(column) for column in zip(*(rows[turn] for turn in range(length)), strict=True)]
    count = len(eqn.outvars) - carried
    return [*carry, *stacked[:count]], stacked[count:]


def _rows(x: Any) -> Any:
    """`x` as a NumPy array, for cheap indexing; RNG keys stay in JAX."""
    return x if jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended) else np.asarray(x)


def _stacked(rows: Sequence[Any]) -> Any:
    is_key = jax.dtypes.issubdtype(rows[0].dtype, jax.dtypes.extended)
    return jax.numpy.stack(rows) if is_key else np.stack([np.asarray(row) for row in rows])


def is_tap(eqn: Any) -> bool:
    """Whether an equation is a tap on a value or a cotangent; taps on tangents are ignored."""
    return eqn.primitive is tap_p and eqn.params["what"] != "tangent"


class Running:
    """The calls that enclose the current equation, while a jaxpr's taps are passed in order.

    `paths` has the module path of every call.
    """

    def __init__(self, paths: Sequence[tuple[str, ...]]) -> None:
        self._paths, self._calls = paths, list[int]()

    @property
    def path(self) -> str:
        """The module path of the last call that has begun and not ended; "" outside of all calls."""
        return "/".join(self._paths[self._calls[-1]]) if self._calls else ""

    def passes(self, tap: Any) -> None:
        """Pass a tap: the first input begins its call, an output ends it."""
        label = tap.params["label"]
        if label.role == "input" and label.call not in self._calls:
            self._calls.append(label.call)
        elif label.role == "output" and label.call in self._calls:
            del self._calls[self._calls.index(label.call) :]


def _body(eqn: Any) -> Any | None:
    """The jaxpr that `eqn` evaluates on its own inputs, once or in every iteration."""
    inside = bodies(eqn)
    fits = len(inside) == 1 and len(inside[0].in_avals) == len(eqn.invars)
    return inside[0] if fits and eqn.primitive.name not in _CLOSED else None


def _count(jaxpr: Any) -> int:
    """The number of taps that can be read."""
    inside = (body for eqn in jaxpr.jaxpr.eqns if not is_tap(eqn) and (body := _body(eqn)) is not None)
    return sum(map(is_tap, jaxpr.jaxpr.eqns)) + sum(map(_count, inside))
