"""Propagates a boolean property of values through a jaxpr, from inputs to outputs, into calls, scans and branches."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, Var

from remat_jax import compat
from remat_jax.core.walk import bodies

# Equations of these kinds evaluate their one inner jaxpr on their own operands, and their outputs depend on nothing else.
CALLS = frozenset({"jit", "call", "shard_map", "checkpoint", "custom_jvp_call"})

Leaf = Callable[[JaxprEqn, list[bool]], bool]
"""`leaf(eqn, flags)`: whether the outputs of an equation have the property, given whether its inputs have it."""


def flagged(jaxpr: ClosedJaxpr, flags: Sequence[bool], leaf: Leaf) -> set[Var]:
    """The variables of the closed `jaxpr` that have the property, given which inputs have it. Constants always have it."""
    flagged_vars = set(jaxpr.jaxpr.constvars)
    flagged_vars.update(var for var, flag in zip(jaxpr.jaxpr.invars, flags, strict=True) if flag)
    for eqn in jaxpr.jaxpr.eqns:
        outputs = _outputs(eqn, [has(atom, flagged_vars) for atom in eqn.invars], leaf)
        flagged_vars.update(var for var, flag in zip(eqn.outvars, outputs, strict=True) if flag)
    return flagged_vars


def has(atom: Var | Literal, flagged_vars: set[Var]) -> bool:
    """Whether an operand has the property: it is flagged, or a literal."""
    return hasattr(atom, "val") or atom in flagged_vars


def all_inputs(eqn: JaxprEqn, flags: list[bool]) -> bool:
    """A `Leaf`: the outputs of an equation have the property if all its inputs have it."""
    return all(flags)


def inner_flags(eqn: JaxprEqn, key: str, inner: ClosedJaxpr, flags: Sequence[bool], leaf: Leaf) -> list[bool]:
    """Whether each input of `inner`, the jaxpr parameter `key` of `eqn`, has the property.

    A scan's carry has the property if its initial value has it and every iteration preserves it. A `while` carry never has it.
    An input that is no operand of `eqn` does not have it either.
    """
    name = eqn.primitive.name
    if name == "cond":
        return list(flags[1:])
    if name == "while":
        of_body = key == "body_jaxpr"
        skip = eqn.params["cond_nconsts"] if of_body else 0
        consts = eqn.params["body_nconsts" if of_body else "cond_nconsts"]
        return [*flags[skip : skip + consts], *[False] * (len(inner.in_avals) - consts)]
    if name == "custom_linear_solve":
        # The operands are the constants of its four jaxprs, the differentiated one first, and then the right-hand side.
        lengths = eqn.params["const_lengths"]
        flags = [*flags[: lengths[0]], *flags[sum(lengths) :]]
    if name != "scan":
        return list(flags) if len(flags) == len(inner.in_avals) else [False] * len(inner.in_avals)
    consts, carry = compat.scan_layout(eqn)
    current = list(flags)
    while True:
        after = _output_flags(inner, current, leaf)[:carry]
        kept = [before and now for before, now in zip(current[consts : consts + carry], after, strict=True)]
        if kept == current[consts : consts + carry]:
            return current
        current[consts : consts + carry] = kept


def _outputs(eqn: JaxprEqn, flags: list[bool], leaf: Leaf) -> list[bool]:
    name, inside = compat.kind(eqn), bodies(eqn)
    if leaf(eqn, flags):
        return [True] * len(eqn.outvars)
    if name in CALLS and inside:
        return _output_flags(inside[0], flags, leaf)
    if name == "scan":
        return _output_flags(inside[0], inner_flags(eqn, "jaxpr", inside[0], flags, leaf), leaf)
    if name == "cond" and flags[0]:
        branches = [_output_flags(branch, flags[1:], leaf) for branch in inside]
        return [all(column) for column in zip(*branches, strict=True)]
    return [False] * len(eqn.outvars)


def _output_flags(jaxpr: ClosedJaxpr, flags: Sequence[bool], leaf: Leaf) -> list[bool]:
    flagged_vars = flagged(jaxpr, flags, leaf)
    return [has(atom, flagged_vars) for atom in jaxpr.jaxpr.outvars]
