"""A jaxpr as one flat list of equations: calls inlined, names and barriers removed, dead code eliminated."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from jax.extend.core import ClosedJaxpr, JaxprEqn

from remat_jax import compat
from remat_jax.core.flow import CALLS
from remat_jax.core.walk import inner_jaxprs

_CALLS = CALLS | {"custom_vjp_call"}
# Primitives that return their operands unchanged.
_SAME = frozenset({"name", "optimization_barrier", "reduce_precision", "copy", "copy_p", "mul_identity", "stop_gradient"})
_SAME_VALUE = frozenset({"device_put", "sharding_constraint", "pvary", "pcast"})


@dataclass(eq=False)
class Array:
    """An array of a flat program, compared by identity. `names` are its residual names, in the order of naming.

    `share` is the fraction of the array in the memory of one device. `literal` marks a constant written in the jaxpr.
    """

    aval: Any
    names: list[str] = field(default_factory=list)
    literal: bool = False
    share: float = 1.0

    @property
    def bytes(self) -> int:
        """The array's bytes in the memory of one device; 0 if it has no storage (tokens)."""
        shape, dtype = getattr(self.aval, "shape", None), getattr(self.aval, "dtype", None)
        whole = 0 if shape is None or dtype is None else compat.array_bytes(shape, dtype)
        return whole if self.share == 1.0 else round(self.share * whole)

    @property
    def size(self) -> int:
        """The number of elements on all devices together."""
        return math.prod(getattr(self.aval, "shape", ()))


@dataclass(frozen=True, eq=False)
class FlatEqn:
    """An equation of a flat program: JAX's equation, and the arrays that it reads and writes."""

    eqn: Any
    inputs: tuple[Array, ...]
    outputs: tuple[Array, ...]

    @property
    def primitive(self) -> str:
        """The name of the equation's primitive."""
        return compat.kind(self.eqn)

    @property
    def share(self) -> float:
        """The fraction of the equation's work that one device does: the smallest share of its arrays."""
        return min((array.share for array in (*self.inputs, *self.outputs) if not array.literal), default=1.0)


@dataclass(frozen=True, eq=False)
class Flat:
    """A flat program: the equations that its outputs need, in the order of execution."""

    inputs: tuple[Array, ...]
    eqns: tuple[FlatEqn, ...]
    outputs: tuple[Array, ...]

    def copied(self, copies: dict[Array, Array]) -> Flat:
        """The same program on copies of its arrays. `copies` maps arrays to copies; missing copies are made and added."""

        def each(arrays: Iterable[Array]) -> tuple[Array, ...]:
            return tuple(copies.setdefault(array, replace(array, names=list(array.names))) for array in arrays)

        eqns = tuple(FlatEqn(eqn.eqn, each(eqn.inputs), each(eqn.outputs)) for eqn in self.eqns)
        return Flat(each(self.inputs), eqns, each(self.outputs))


def flatten(jaxpr: ClosedJaxpr) -> Flat:
    """The closed `jaxpr` as a flat program: calls are inlined; loops, branches and kernels remain single equations.

    A name (`checkpoint_name`) becomes a property of its array. Barriers and moves between memories disappear.

    >>> import jax, jax.numpy as jnp
    >>> flat = flatten(jax.make_jaxpr(lambda x: jax.jit(jnp.sin)(x) * 2)(1.0))
    >>> [one.primitive for one in flat.eqns]
    ['sin', 'mul']
    """
    inputs = tuple(Array(var.aval) for var in jaxpr.jaxpr.invars)
    eqns: list[FlatEqn] = []
    outputs = tuple(_run(jaxpr, inputs, eqns))
    return Flat(inputs, tuple(region(eqns, outputs)), outputs)


def region(eqns: Sequence[FlatEqn], wanted: Iterable[Array], given: Collection[Array] = ()) -> list[FlatEqn]:
    """The `eqns`, in order, that compute `wanted` when the arrays in `given` are available already."""
    open_, needed = {array for array in wanted if array not in given}, []
    for eqn in reversed(eqns):
        if open_.intersection(eqn.outputs):
            open_.update(array for array in eqn.inputs if array not in given)
            needed.append(eqn)
    return needed[::-1]


def _run(jaxpr: ClosedJaxpr, inputs: Sequence[Array], eqns: list[FlatEqn]) -> list[Array]:
    inner = jaxpr.jaxpr
    arrays: dict[Any, Array] = dict(zip(inner.invars, inputs, strict=True))
    arrays.update((var, Array(var.aval)) for var in inner.constvars)

    def read(atom: Any) -> Array:
        return Array(atom.aval, literal=True) if hasattr(atom, "val") else arrays[atom]

    for eqn in inner.eqns:
        arguments = [read(atom) for atom in eqn.invars]
        arrays.update(zip(eqn.outvars, _results(eqn, arguments, eqns), strict=True))
    return [read(atom) for atom in inner.outvars]


def _results(eqn: JaxprEqn, arguments: list[Array], eqns: list[FlatEqn]) -> list[Array]:
    given_name, primitive = compat.given_name(eqn), compat.kind(eqn)
    if given_name is not None:
        if given_name not in arguments[0].names:
            arguments[0].names.append(given_name)
        return arguments[:1]
    if primitive in _SAME or (primitive in _SAME_VALUE and len(arguments) == len(eqn.outvars)):
        return arguments
    body = called(eqn)
    if body is not None:
        return _run(body, arguments, eqns)
    results = [Array(var.aval) for var in eqn.outvars]
    for result, name in zip(results, _inner_names(eqn), strict=True):
        result.names += name
    eqns.append(FlatEqn(eqn, tuple(arguments), tuple(results)))
    return results


def called(eqn: JaxprEqn) -> Any | None:
    """The closed jaxpr that `eqn` runs on its own operands; None if `eqn` is not a call."""
    bodies = list(inner_jaxprs(eqn).values()) if compat.kind(eqn) in _CALLS else []
    if not bodies or isinstance(bodies[0], tuple):
        return None
    return compat.closed(bodies[0])


def _inner_names(eqn: JaxprEqn) -> list[list[str]]:
    """For each output of a `scan` or `cond`, the list of residual names that the body gives to it; else empty lists."""
    if eqn.primitive.name == "cond":
        branches = [flatten(compat.closed(branch)).outputs for branch in eqn.params["branches"]]
        return [list(dict.fromkeys(name for array in arrays for name in array.names)) for arrays in zip(*branches, strict=True)]
    if eqn.primitive.name != "scan":
        return [[] for _ in eqn.outvars]
    _, carry = compat.scan_layout(eqn)
    body = flatten(compat.closed(eqn.params["jaxpr"]))
    return [[] if index < carry else list(array.names) for index, array in enumerate(body.outputs)]
