"""Finds where a value of a jaxpr comes from, through calls, scans, copies and barriers, to the equation that computed it."""

from __future__ import annotations

import math
import weakref
from dataclasses import dataclass, replace
from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from remat_jax import compat
from remat_jax.core.flow import CALLS
from remat_jax.core.shared import is_taken, offloaded_name
from remat_jax.core.walk import bodies

# Primitives whose output counts as the same array as their input: copies to the host, barriers, rounding of saved arrays.
_SAME = frozenset(
    {"device_put", "reduce_precision", "copy", "optimization_barrier", "mul_identity", "stop_gradient", "shared_input_choice"}
)
_CALLS = CALLS | {"custom_vjp_call"}


@dataclass(frozen=True)
class Origin:
    """The origin of an array.

    Attributes:
      key: equal for values that are the same array.
      kind: `argument`, `constant`, `named` (it has a residual name), `carry` (the stacked carry of a scan), or `equation`.
      name: the residual name; without one, `module/path:primitive`.
      source: the user's source line.
      scanned: whether the array is a scan's stacked output, with one row for each iteration.
      layers: the layers to which the array belongs, if it was traced for some layers only; else None.
      aliases: other residual names of the same array: a block's input is often the output of the previous block.
      named_input: if the array is an input of the jaxpr that got its name there, the index of the input.
    """

    key: Any
    kind: str
    name: str
    source: str = ""
    scanned: bool = False
    layers: range | None = None
    aliases: tuple[str, ...] = ()
    named_input: int | None = None


Trail = list[tuple[Jaxpr, Var, tuple[str, ...]]]
"""The variables that are one array: the open jaxpr of each, the variable, and the scopes around the jaxpr."""


def origin(
    jaxpr: Jaxpr, atom: Var | Literal, outer: tuple[str, ...] = (), layers: range | None = None, trail: Trail | None = None
) -> Origin:
    """The origin of `atom`, a variable or literal of the open `jaxpr`, which was traced in the scopes `outer`, for `layers`.

    The variables that are the same array are added to `trail`, from `atom` to the one that the array's equation computes.
    """
    makers = makers_of(jaxpr)
    trail = [] if trail is None else trail
    while not hasattr(atom, "val"):
        trail.append((jaxpr, atom, outer))
        if atom in jaxpr.invars:
            return Origin(("argument", jaxpr.invars.index(atom)), "argument", f"argument {jaxpr.invars.index(atom)}")
        if atom in jaxpr.constvars:
            return Origin(("constant", atom), "constant", "constant")
        eqn = makers[atom]
        index = eqn.outvars.index(atom)
        if is_taken(eqn) is False or _is_unread_slice(eqn):
            return Origin(("unread", atom), "constant", "unread")
        name = offloaded_name(eqn) or compat.given_name(eqn)
        here = compat.layers_of(eqn) or layers
        if name is not None:
            under = origin(jaxpr, eqn.invars[0], outer, layers, trail)
            aliases = (under.name, *under.aliases) if under.kind == "named" else ()
            if aliases and ":custom_jvp_call#" in name:
                # An output of a checkpointed block has two names. The inner name is that of the equation that computes the
                # output. The outer name `name` only says that a `custom_jvp_call` computes the array.
                return replace(under, key=atom, layers=under.layers or here, aliases=(name, *under.aliases))
            source = compat.source_line(makers.get(eqn.invars[0]) or eqn)
            named_input = under.key[1] if under.kind == "argument" else under.named_input
            return Origin(atom, "named", name, source, layers=here, aliases=aliases, named_input=named_input)
        if eqn.primitive.name in _SAME or _divides_a_stack(eqn):
            atom = eqn.invars[index]
        elif compat.kind(eqn) in _CALLS:
            body = bodies(eqn)[0].jaxpr
            inner = origin(body, body.outvars[index], outer + compat.scopes(eqn), here, trail)
            if inner.kind != "argument":
                inner = replace(inner, key=(atom, inner.key))
                place = inner.named_input
                return inner if place is None else _with_names_of(origin(jaxpr, eqn.invars[place], outer, layers), inner)
            atom = eqn.invars[inner.key[1]]
        elif eqn.primitive.name == "scan":
            inner = _through_scan(eqn, index, outer + compat.scopes(eqn), here, trail)
            if inner.kind != "argument":
                # A scan returns its final carry first, then its stacked outputs.
                is_stacked = index >= compat.scan_layout(eqn)[1]
                return replace(inner, key=(atom, inner.key), scanned=inner.scanned or is_stacked, named_input=None)
            atom = eqn.invars[inner.key[1]]
        else:
            return _made_here(eqn, atom, outer + compat.scopes(eqn), here, trail)
    return Origin(("literal", id(atom)), "constant", "literal")  # the jaxpr holds the literal, which has no hash


def output_names(jaxpr: Jaxpr) -> frozenset[str]:
    """All names of the outputs of the open `jaxpr`."""
    sources = [origin(jaxpr, atom) for atom in jaxpr.outvars]
    return frozenset(name for source in sources for name in (source.name, *source.aliases))


# Open jaxpr → the result of `makers_of`.
_known_makers: weakref.WeakKeyDictionary[Any, dict[Any, Any]] = weakref.WeakKeyDictionary()


def makers_of(jaxpr: Jaxpr) -> dict[Any, Any]:
    """Variable → the equation of the open `jaxpr` that computes it."""
    if jaxpr not in _known_makers:
        _known_makers[jaxpr] = {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}
    return _known_makers[jaxpr]


def _with_names_of(operand: Origin, inner: Origin) -> Origin:
    """The origin `inner` of an output of a call, which is an input of the call that got its name there: `operand` outside."""
    names = (operand.name, *operand.aliases) if operand.kind == "named" else ()
    place = operand.key[1] if operand.kind == "argument" else operand.named_input
    return replace(inner, aliases=(*inner.aliases, *names), named_input=place)


def _is_unread_slice(eqn: JaxprEqn) -> bool:
    """Whether an equation slices a stack for a scan over some layers. Such a slice is dead code: blocks read the stack."""
    return eqn.primitive.name == "slice" and compat.layers_of(eqn) is not None


def _divides_a_stack(eqn: JaxprEqn) -> bool:
    """Whether an equation reshapes a stack into groups of rows for a scan over some layers. The two count as one array."""
    if eqn.primitive.name != "reshape" or compat.layers_of(eqn) is None:
        return False
    before, after = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    return bool(before) and after[2:] == before[1:] and math.prod(after[:2]) == before[0]


def _made_here(eqn: JaxprEqn, atom: Var, path: tuple[str, ...], layers: range | None, trail: Trail) -> Origin:
    """The origin of an equation's output. An output of a `cond` has the names from all its branches."""
    branches = [body.jaxpr for body in bodies(eqn)] if eqn.primitive.name == "cond" else []
    trails: list[Trail] = [[] for _ in branches]
    origins = [
        origin(branch, branch.outvars[eqn.outvars.index(atom)], path, layers, inside)
        for branch, inside in zip(branches, trails, strict=True)
    ]
    # The other branches return zeros in the array's place, which are made in no scope.
    deepest: Trail = max(trails, key=_depth, default=[])
    trail += deepest
    named = [source for source in origins if source.kind == "named"]
    if named:
        names = dict.fromkeys(name for source in named for name in (source.name, *source.aliases))
        return replace(named[0], key=(atom, named[0].key), aliases=tuple(names)[1:], named_input=None)
    return Origin(atom, "equation", f"{'/'.join(path)}:{compat.kind(eqn)}", compat.source_line(eqn), layers=layers)


def _depth(trail: Trail) -> int:
    """The number of scopes of the equation that computes the last variable of a trail."""
    if not trail:
        return 0
    jaxpr, var, outer = trail[-1]
    maker = makers_of(jaxpr).get(var)
    return len(outer) + (0 if maker is None else len(compat.scopes(maker)))


def _through_scan(eqn: JaxprEqn, index: int, path: tuple[str, ...], layers: range | None, trail: Trail) -> Origin:
    """The origin of output `index` of a scan.

    If the output is one of the scan's constant operands, or a row of a scanned operand, the kind is `argument`, and `key[1]` is
    the operand's index.
    """
    body = bodies(eqn)[0].jaxpr
    consts, carry = compat.scan_layout(eqn)
    inner = origin(body, body.outvars[index], path, layers, trail)
    if inner.kind != "argument":
        return inner
    operand = inner.key[1]
    if consts <= operand < consts + carry:
        name = f"{'/'.join(path) or 'scan'}:carry#{operand - consts}"
        return Origin(("carry", operand), "carry", name, compat.source_line(eqn), layers=layers)
    return inner


def is_on_host(atom: Var) -> bool:
    """Whether a variable of a jaxpr is in host memory."""
    space = getattr(atom.aval, "memory_space", None)
    return getattr(space, "name", str(space)).lower().endswith("host")
