"""Whether two programs that were traced apart are the same: what one of them became can then stand for the other."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import numpy as np

from remat_jax import compat
from remat_jax.core.walk import equations

# How many rules may stand in each other; what differs only in deeper ones is not seen, if the functions are alike.
_DEEPEST = 3
_RULE = "jvp_jaxpr_fun"


class Original:
    """A program that others are compared with.

    Two programs are alike if they have the same equations, in the same order, with the same parameters, types, module paths
    and contexts; source lines do not count. A function among the parameters is only like itself, but for the rule of a
    `custom_jvp`, which is like one that is traced to the same program.
    """

    def __init__(self, jaxpr: Any) -> None:
        self.jaxpr = jaxpr
        self._rules: dict[int, Any] = {}

    def is_like(self, jaxpr: Any, paths: tuple[str, str] = ("", "")) -> bool:
        """Whether the closed `jaxpr` is the same program; of blocks at two module `paths`, these may differ."""
        return _Comparison(self._rules, paths=paths).programs(self.jaxpr, jaxpr)


def holds_arrays(jaxpr: Any) -> bool:
    """Whether the closed `jaxpr` keeps arrays alive, its own or those of a program inside it."""
    inner = (value for eqn in equations(jaxpr) for value in eqn.params.values())
    programs = (one for value in inner for one in (value if isinstance(value, tuple) else (value,)) if compat.is_jaxpr(one))
    return any(compat.closed(one).consts for one in (jaxpr, *programs))


def holds_functions(jaxpr: Any) -> bool:
    """Whether a function stands among the parameters of the closed `jaxpr`, but for the rules of a `custom_jvp`.

    A callback, the rules of a `custom_vjp`, a policy of `jax.checkpoint`: what they do and which arrays they keep alive the
    program does not say.
    """
    return any(
        callable(value) and not isinstance(value, type | jax.sharding.Mesh) and key != _RULE and not compat.is_jaxpr(value)
        for eqn in equations(jaxpr)
        for key, value in eqn.params.items()
    )


def has_plain_rules(jaxpr: Any, depth: int = 0) -> bool:
    """Whether the rules of every `custom_jvp` in the closed `jaxpr` can be traced, and hold neither arrays nor functions."""
    for eqn in equations(jaxpr):
        if eqn.primitive.name == "custom_jvp_call":
            rule = _rule(eqn)
            if rule is None or holds_arrays(rule) or holds_functions(rule):
                return False
            if depth < _DEEPEST and not has_plain_rules(rule, depth + 1):
                return False
    return True


class _Comparison:
    """Of one program with another, variable by variable.

    Attributes:
      rules: what the derivative rules of the first one were traced to, by their equations.
      around: the functions whose rules are being compared: a rule may call its own function (that of a softmax does).
      scopes: the name stack of the second program for one of the first.
    """

    def __init__(self, rules: dict[int, Any], around: tuple[Any, ...] = (), paths: tuple[str, str] = ("", "")) -> None:
        self.rules, self.around, self.paths = rules, around, paths
        self.scopes = functools.cache(lambda stack: compat.moved_scopes(stack, *paths))

    def programs(self, one: Any, other: Any) -> bool:
        """Whether the closed or open jaxprs are alike."""
        if one is other:
            return True
        one, other = compat.closed(one), compat.closed(other)
        sizes = [(len(jaxpr.jaxpr.invars), len(jaxpr.jaxpr.outvars), len(jaxpr.jaxpr.eqns)) for jaxpr in (one, other)]
        if one.consts or other.consts or sizes[0] != sizes[1]:
            return False
        names: dict[Any, Any] = {}
        if not _named(names, one.jaxpr.invars, other.jaxpr.invars):
            return False
        for eqn, fellow in zip(one.jaxpr.eqns, other.jaxpr.eqns, strict=True):
            if not self._equations(eqn, fellow, names) or not _named(names, eqn.outvars, fellow.outvars):
                return False
        return _read_alike(names, one.jaxpr.outvars, other.jaxpr.outvars)

    def _equations(self, one: Any, other: Any, names: dict[Any, Any]) -> bool:
        if one.primitive is not other.primitive or one.ctx is not other.ctx or set(one.params) != set(other.params):
            return False
        if self.scopes(one.source_info.name_stack) != other.source_info.name_stack:
            return False
        if not _read_alike(names, one.invars, other.invars):
            return False
        different = [key for key, value in one.params.items() if not self._values(value, other.params[key])]
        if one.primitive.name == "custom_jvp_call" and different == [_RULE] and not one.params["symbolic_zeros"]:
            return self._rules_alike(one, other)
        return not different

    def _values(self, one: Any, other: Any) -> bool:
        if one is other:
            return True
        if compat.is_jaxpr(one):
            return compat.is_jaxpr(other) and self.programs(one, other)
        if type(one) is not type(other):
            return False
        if isinstance(one, tuple | list):
            return len(one) == len(other) and all(map(self._values, one, other))
        # Of a callable its own equality counts: that of `eq=False` is identity, and what it does is not all in its fields.
        if dataclasses.is_dataclass(one) and not callable(one):
            fields = [field.name for field in dataclasses.fields(one)]
            return all(self._values(getattr(one, name), getattr(other, name)) for name in fields)
        if isinstance(one, float | complex):
            return repr(one) == repr(other)
        # An array is not equal to another one, but an array of answers.
        return (one == other) is True

    def _rules_alike(self, one: Any, other: Any) -> bool:
        function = one.params["call_jaxpr"]
        if len(self.around) == _DEEPEST:
            return any(self.programs(outer, function) for outer in self.around)
        if id(one) not in self.rules:
            self.rules[id(one)] = _rule(one)
        known, traced = self.rules[id(one)], _rule(other)
        inner = _Comparison(self.rules, (*self.around, function), self.paths)
        return known is not None and traced is not None and inner.programs(known, traced)


def _rule(eqn: Any) -> Any:
    """What the derivative rule of an equation is traced to; None where it cannot be: over an axis that is not there, say."""
    primals = [atom.aval for atom in eqn.invars]

    def push(primals: list[Any], tangents: list[Any]) -> Any:
        return jax.jvp(lambda *values: compat.bind(eqn, values), tuple(primals), tuple(tangents))

    try:
        return jax.make_jaxpr(push)(primals, [aval.to_tangent_aval() for aval in primals])
    except Exception:  # the rule is the user's, and nobody may have asked for a derivative: one that raises is like no other
        return None


def _named(names: dict[Any, Any], ones: Any, others: Any) -> bool:
    """Whether variables have the same types; the first ones then stand for the others in `names`."""
    for one, other in zip(ones, others, strict=True):
        if one.aval != other.aval or one.aval.weak_type != other.aval.weak_type:
            return False
        names[one] = other
    return True


def _read_alike(names: dict[Any, Any], ones: Any, others: Any) -> bool:
    """Whether the same variables and equal numbers are read."""
    return len(ones) == len(others) and all(_atoms(names, one, other) for one, other in zip(ones, others, strict=True))


def _atoms(names: dict[Any, Any], one: Any, other: Any) -> bool:
    if not hasattr(one, "val") or not hasattr(other, "val"):
        return not hasattr(one, "val") and names[one] is other
    values = [np.asarray(atom.val) for atom in (one, other)]
    return one.aval == other.aval and values[0].dtype == values[1].dtype and values[0].tobytes() == values[1].tobytes()
