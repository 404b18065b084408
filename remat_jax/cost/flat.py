"""A jaxpr as one flat list of equations: calls taken apart, names and barriers looked through, dead code left out."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from remat_jax import compat
from remat_jax.core.walk import inner_jaxprs

# What runs its one inner jaxpr on its own operands.
_CALLS = frozenset(
    {
        "jit",
        "pjit",
        "closed_call",
        "core_call",
        "eval_jaxpr",
        "shard_map",
        "checkpoint",
        "remat",
        "remat2",
        "custom_jvp_call",
        "custom_vjp_call",
        "custom_vjp_call_jaxpr",
    }
)
# What hands its operands on as they are.
_SAME = frozenset({"name", "optimization_barrier", "reduce_precision", "copy", "copy_p", "mul_identity", "stop_gradient"})
_SAME_VALUE = frozenset({"device_put", "sharding_constraint", "pvary", "pcast"})


@dataclass(eq=False)
class Array:
    """An array of a flat program; equal to itself alone.

    Attributes:
      aval: its type.
      names: the residual names that it has, the first one first.
      literal: whether it is written in the program.
      share: how much of it one device has, of those among which the program is divided.
    """

    aval: Any
    names: list[str] = field(default_factory=list)
    literal: bool = False
    share: float = 1.0

    @property
    def bytes(self) -> int:
        """What it takes in the memory of a device; 0 for what has no storage (tokens)."""
        shape, dtype = getattr(self.aval, "shape", None), getattr(self.aval, "dtype", None)
        whole = 0 if shape is None or dtype is None else math.prod(shape) * compat.itemsize(dtype)
        return whole if self.share == 1.0 else round(self.share * whole)

    @property
    def size(self) -> int:
        """How many elements it has, on all devices together."""
        return math.prod(getattr(self.aval, "shape", ()))


@dataclass(frozen=True, eq=False)
class FlatEqn:
    """An equation of a flat program: JAX's own, and the arrays that it reads and writes here."""

    eqn: Any
    inputs: tuple[Array, ...]
    outputs: tuple[Array, ...]

    @property
    def primitive(self) -> str:
        """The primitive's name."""
        return str(self.eqn.primitive.name)

    @property
    def share(self) -> float:
        """How much of its work one device does: as of that of its arrays which is divided most."""
        return min((array.share for array in (*self.inputs, *self.outputs) if not array.literal), default=1.0)


@dataclass(frozen=True, eq=False)
class Flat:
    """A flat program.

    Attributes:
      inputs, outputs: those of the jaxpr.
      eqns: in the order of execution; only what an output needs.
    """

    inputs: tuple[Array, ...]
    eqns: tuple[FlatEqn, ...]
    outputs: tuple[Array, ...]

    def copied(self, copies: dict[Array, Array]) -> Flat:
        """The same program with arrays of its own; `copies` has those that were made before, and gets the new ones."""

        def each(arrays: Iterable[Array]) -> tuple[Array, ...]:
            return tuple(copies.setdefault(one, replace(one, names=list(one.names))) for one in arrays)

        eqns = tuple(FlatEqn(one.eqn, each(one.inputs), each(one.outputs)) for one in self.eqns)
        return Flat(each(self.inputs), eqns, each(self.outputs))


def flatten(jaxpr: Any) -> Flat:
    """The closed `jaxpr` as a flat program.

    What stands in `jit`, `checkpoint`, custom derivatives and `shard_map` stands in the one list. Loops, branches and kernels
    stay whole. A name (`checkpoint_name`) is a property of its array and no equation, and so is what only holds the compiler
    back or moves an array between memories.

    >>> import jax, jax.numpy as jnp
    >>> flat = flatten(jax.make_jaxpr(lambda x: jax.jit(jnp.sin)(x) * 2)(1.0))
    >>> [one.primitive for one in flat.eqns]
    ['sin', 'mul']
    """
    inputs = tuple(Array(var.aval) for var in jaxpr.jaxpr.invars)
    eqns: list[FlatEqn] = []
    outputs = tuple(_run(jaxpr, inputs, eqns))
    return Flat(inputs, tuple(live(eqns, outputs)), outputs)


def live(eqns: Sequence[FlatEqn], outputs: Iterable[Array]) -> Iterator[FlatEqn]:
    """Those of `eqns` that `outputs` need, in their order."""
    wanted, found = set(outputs), []
    for one in reversed(eqns):
        if wanted.intersection(one.outputs):
            wanted.update(one.inputs)
            found.append(one)
    return reversed(found)


def region(eqns: Sequence[FlatEqn], wanted: Iterable[Array], given: Collection[Array]) -> list[FlatEqn]:
    """Those of `eqns` that compute `wanted` from `given`, in their order; what is given is not computed."""
    open_, found = {one for one in wanted if one not in given}, []
    for one in reversed(eqns):
        if open_.intersection(one.outputs):
            open_.update(array for array in one.inputs if array not in given)
            found.append(one)
    return found[::-1]


def _run(jaxpr: Any, inputs: Sequence[Array], eqns: list[FlatEqn]) -> list[Array]:
    inner = jaxpr.jaxpr
    known: dict[Any, Array] = dict(zip(inner.invars, inputs, strict=True))
    known.update((var, Array(var.aval)) for var in inner.constvars)

    def read(atom: Any) -> Array:
        return Array(atom.aval, literal=True) if hasattr(atom, "val") else known[atom]

    for eqn in inner.eqns:
        arguments = [read(atom) for atom in eqn.invars]
        known.update(zip(eqn.outvars, _results(eqn, arguments, eqns), strict=True))
    return [read(atom) for atom in inner.outvars]


def _results(eqn: Any, arguments: list[Array], eqns: list[FlatEqn]) -> list[Array]:
    given, primitive = compat.given_name(eqn), eqn.primitive.name
    if given is not None:
        if given not in arguments[0].names:
            arguments[0].names.append(given)
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


def called(eqn: Any) -> Any | None:
    """The closed jaxpr that `eqn` runs on its own operands; None if it is no call."""
    bodies = list(inner_jaxprs(eqn).values()) if compat.kind(eqn) in _CALLS else []
    if not bodies or isinstance(bodies[0], tuple):
        return None
    return compat.closed(bodies[0])


def _inner_names(eqn: Any) -> list[list[str]]:
    """For each output of a loop or branch, the names that its array has inside: a residual made there is named there."""
    if eqn.primitive.name == "cond":
        branches = [flatten(compat.closed(one)).outputs for one in eqn.params["branches"]]
        return [list(dict.fromkeys(name for array in arrays for name in array.names)) for arrays in zip(*branches, strict=True)]
    if eqn.primitive.name != "scan":
        return [[] for _ in eqn.outvars]
    _, carry = compat.scan_layout(eqn)
    body = flatten(compat.closed(eqn.params["jaxpr"]))
    return [[] if index < carry else list(array.names) for index, array in enumerate(body.outputs)]
