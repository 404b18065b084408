"""The operations of Pallas kernels, counted in their traced bodies."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn

from remat_jax import compat
from remat_jax.core.matmuls import eqn_flops
from remat_jax.core.walk import bodies, executed_bodies
from remat_jax.cost.count import over_bodies

_LARGEST_GRID = 10**7
"""For a grid with more programs, the index of a `cond` is not evaluated."""


def named_kernels(jaxpr: ClosedJaxpr) -> dict[str, float]:
    """A dict from Pallas kernel name to operations per call. A name is left out if its kernels differ in operations."""
    flops_by_name: dict[str, set[float]] = {}
    for eqn, operands in _kernels(jaxpr, dict(zip(jaxpr.jaxpr.constvars, jaxpr.consts, strict=True))):
        flops_by_name.setdefault(str(eqn.params.get("name")), set()).add(pallas_flops(eqn, operands))
    return {name: several.pop() for name, several in flops_by_name.items() if len(several) == 1}


def _kernels(jaxpr: ClosedJaxpr, constants: Mapping[Any, Any]) -> Iterator[tuple[Any, dict[int, Any]]]:
    """Every `pallas_call` in the closed `jaxpr` at any depth, with its constant operands by position."""
    for eqn in jaxpr.jaxpr.eqns:
        operands = {place: constants[atom] for place, atom in enumerate(eqn.invars) if _is_key(atom) and atom in constants}
        if eqn.primitive.name == "pallas_call":
            yield eqn, operands
            continue
        for body in bodies(eqn):
            inner = dict(zip(body.jaxpr.constvars, body.consts, strict=True))
            # The operands of a `cond` begin with its index, those of most others are the inputs of their bodies.
            first = len(eqn.invars) - len(body.jaxpr.invars)
            for place, value in operands.items():
                variable = body.jaxpr.invars[place - first] if first in (0, 1) and place >= first else None
                # A scan passes a row of an operand, and a `shard_map` a part.
                if variable is not None and variable.aval.shape == np.shape(value):
                    inner[variable] = value
            yield from _kernels(body, inner)


def _is_key(atom: Any) -> bool:
    return not hasattr(atom, "val")


def pallas_flops(eqn: JaxprEqn, operands: Mapping[int, Any] | None = None) -> float:
    """The operations of a `pallas_call`: its `cost_estimate`, or those of its matmuls. `operands` are the known ones."""
    estimate = eqn.params.get("cost_estimate")
    if estimate is not None:
        return float(estimate.flops)
    mapping = eqn.params["grid_mapping"]
    programs = math.prod(size for size in mapping.grid if isinstance(size, int))
    # The body does not see the axes that `vmap` has added.
    grid = tuple(size for axis, size in enumerate(mapping.grid) if axis not in mapping.vmapped_dims)
    known = grid if all(isinstance(size, int) for size in grid) else ()
    return float(programs * kernel_flops(compat.closed(eqn.params["jaxpr"]), known, operands))


def kernel_flops(jaxpr: ClosedJaxpr, grid: tuple[int, ...] = (), operands: Mapping[int, Any] | None = None) -> float:
    """The operations of the matmuls in the body of a Pallas kernel: the mean over the programs of its grid.

    A loop of unknown length is assumed to run until it has read its arrays once. If its bounds depend
    on the program's index in the grid, as in causal attention, it is assumed to run half of these iterations. The branches of a
    `cond` count as often as they run, if the branch follows from the program's index in the grid and from constant `operands`,
    as in splash attention, whose mask is a table of blocks. Otherwise the costliest branch counts.
    """
    total = 0.0
    varying: set[Any] = set()
    scalars = _Scalars(grid, dict(zip(jaxpr.jaxpr.invars, map((operands or {}).get, range(len(jaxpr.in_avals))), strict=True)))
    for eqn in jaxpr.jaxpr.eqns:
        scalars.read(eqn)
        varies = [atom for atom in eqn.invars if _is_key(atom) and atom in varying]
        if eqn.primitive.name == "program_id" or varies:
            varying.update(eqn.outvars)
        if eqn.primitive.name == "while":
            body = compat.closed(eqn.params["body_jaxpr"])
            bounded = any(not atom.aval.shape and atom.aval.dtype == "int32" for atom in varies)
            total += kernel_flops(body) * _rounds(body) // (2 if bounded else 1)
        elif eqn.primitive.name == "cond" and (chosen := scalars.value(eqn.invars[0])) is not None:
            branches = [kernel_flops(body) for body in executed_bodies(eqn)]
            total += float(np.mean(np.asarray(branches)[np.clip(chosen, 0, len(branches) - 1)]))
        else:
            total += eqn_flops(eqn) + over_bodies(eqn, lambda body: int(kernel_flops(body)))
    return total


class _Scalars:
    """The scalars of a kernel's body that follow from the program's index and from constant tables, for all programs.

    A value is an array of the grid's shape.
    """

    def __init__(self, grid: tuple[int, ...], tables: Mapping[Any, Any]) -> None:
        self.grid, self.tables = grid, tables
        self.values: dict[Any, Any] = {}

    def value(self, atom: Any) -> Any:
        """The value of an atom; None if it is unknown."""
        return atom.val if not _is_key(atom) else self.values.get(atom)

    def read(self, eqn: JaxprEqn) -> None:
        """Add the result of `eqn`, if it is a scalar that is known."""
        if len(eqn.outvars) != 1 or eqn.outvars[0].aval.shape or not 0 < math.prod(self.grid) <= _LARGEST_GRID:
            return
        name, params = eqn.primitive.name, eqn.params
        if name == "program_id" and params["axis"] < len(self.grid):
            self.values[eqn.outvars[0]] = np.indices(self.grid, dtype=np.int32, sparse=True)[params["axis"]]
        elif name == "num_programs" and params["axis"] < len(self.grid):
            self.values[eqn.outvars[0]] = np.int32(self.grid[params["axis"]])
        elif name == "get":
            table, at = self.tables.get(eqn.invars[0]), [self.value(atom) for atom in eqn.invars[1:]]
            # One number for each axis, so that the result is a scalar. A kernel may read past the table, and ignore the result.
            if table is not None and len(at) == np.ndim(table) and all(index is not None for index in at):
                places = (np.clip(index, 0, size - 1) for index, size in zip(at, np.shape(table), strict=True))
                self.values[eqn.outvars[0]] = np.asarray(table)[tuple(places)]
        elif eqn.invars and all(not atom.aval.shape for atom in eqn.invars) and name in _ELEMENTWISE:
            inputs = [self.value(atom) for atom in eqn.invars]
            if all(value is not None for value in inputs):
                self.values[eqn.outvars[0]] = _ELEMENTWISE[name](eqn, *map(np.asarray, inputs))


_ELEMENTWISE: dict[str, Any] = {
    **{
        name: (lambda _, *xs, fn=fn: fn(*xs))
        for name, fn in {
            "add": np.add,
            "sub": np.subtract,
            "mul": np.multiply,
            "max": np.maximum,
            "min": np.minimum,
            "neg": np.negative,
            "eq": np.equal,
            "ne": np.not_equal,
            "lt": np.less,
            "le": np.less_equal,
            "gt": np.greater,
            "ge": np.greater_equal,
            "and": np.bitwise_and,
            "or": np.bitwise_or,
            "not": np.invert,
        }.items()
    },
    "convert_element_type": lambda eqn, x: x.astype(eqn.params["new_dtype"]),
}
"""The scalar operations of which branches usually depend."""


def _rounds(body: ClosedJaxpr) -> int:
    """The number of iterations in which a loop reads each of its arrays once."""
    rounds = [1]
    for eqn in body.jaxpr.eqns:
        reads = eqn.invars and eqn.outvars and type(eqn.invars[0].aval).__name__ == "AbstractRef"
        part = math.prod(eqn.outvars[0].aval.shape) if reads else 0
        if part:
            rounds.append(math.prod(eqn.invars[0].aval.shape) // part)
    return max(rounds)
