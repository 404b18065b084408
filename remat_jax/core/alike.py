"""Compares two separately traced programs. If they are the same, results computed for one can be reused for the other."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from remat_jax import compat
from remat_jax.core.walk import bodies, equations

# A derivative rule may call functions with rules of their own. At most three levels of nested rules are traced and compared. At
# the fourth level, two rules count as alike only if their function recurs: it is the same program as a function at one of the
# three outer levels. For example, the rule of softmax calls softmax.
_DEEPEST = 3


class Original:
    """A program that other programs are compared with.

    Programs are alike if they have the same equations, in the same order, with the same parameters, types, module paths and
    equation contexts; source lines do not count. Functions among the parameters must be the same objects, except the rules of
    `custom_jvp`: two rules are alike if they trace to the same program.
    """

    def __init__(self, jaxpr: ClosedJaxpr) -> None:
        self.jaxpr = jaxpr
        self._rules: dict[Any, Any] = {}

    def is_like(self, jaxpr: ClosedJaxpr) -> bool:
        """Whether the closed `jaxpr` is alike."""
        return _Comparison(self._rules).programs(self.jaxpr, jaxpr)

    def folded_as(self, jaxpr: ClosedJaxpr, paths: tuple[str, str]) -> Folded | None:
        """The numbers that `jaxpr` folds into random keys; None if it is not alike in everything else.

        Flax folds a number made from a module's path into the key of each module, so layers with dropout differ in it.

        Args:
          paths: the module paths of the two programs' blocks, which may differ.
        """
        folded: dict[int, Any] = {}
        return folded if _Comparison(self._rules, paths=paths, folded=folded).programs(self.jaxpr, jaxpr) else None


Folded = Mapping[int, Any]
"""A number that the first program folds into random keys → the literal that the other folds in its place."""


def folds(eqn: JaxprEqn) -> bool:
    """Whether `eqn` folds one number, known as it is traced, into a random key."""
    return compat.kind(eqn) == "random_fold_in" and hasattr(eqn.invars[1], "val") and not eqn.invars[1].aval.shape


def holds_arrays(jaxpr: ClosedJaxpr) -> bool:
    """Whether the closed `jaxpr`, or a program inside it, has arrays as constants and so keeps them alive."""
    return any(program.consts for program in (jaxpr, *(body for eqn in equations(jaxpr) for body in bodies(eqn))))


def holds_functions(jaxpr: ClosedJaxpr) -> bool:
    """Whether a parameter of an equation is a function that may close over arrays; rules of `custom_jvp` do not count."""
    return any(
        callable(value)
        and not isinstance(value, type | jax.sharding.Mesh)
        and not (compat.is_rule(key) or compat.is_jaxpr(value))
        for eqn in equations(jaxpr)
        for key, value in compat.parameters(eqn).items()
    )


def has_plain_rules(jaxpr: ClosedJaxpr, depth: int = 0) -> bool:
    """Whether the rules of every `custom_jvp` in the closed `jaxpr` can be traced, and hold neither arrays nor functions.

    A rule that folds a number into a random key is not plain: in the rule, `Folded` would not be told from its own numbers.
    """
    rules = (_rule(eqn) for eqn in equations(jaxpr) if compat.kind(eqn) == "custom_jvp_call")
    return not any(
        rule is None
        or holds_arrays(rule)
        or holds_functions(rule)
        or any(map(folds, equations(rule)))
        or (depth < _DEEPEST and not has_plain_rules(rule, depth + 1))
        for rule in rules
    )


class _Comparison:
    """Compares two programs, variable by variable.

    Attributes:
      rules: a `custom_jvp` equation of the first program → its traced derivative rule; None if tracing failed.
      around: the functions whose rules are being compared, outermost first.
      paths: the module paths of the two programs' blocks, which may differ.
      folded: collects the numbers that are folded into random keys (`Folded`); None if these have to be equal.
    """

    def __init__(
        self,
        rules: dict[Any, Any],
        around: tuple[Any, ...] = (),
        paths: tuple[str, str] = ("", ""),
        folded: dict[int, Any] | None = None,
    ) -> None:
        self.rules, self.around, self.paths, self.folded = rules, around, paths, folded
        self.scopes = functools.cache(lambda stack: compat.moved_scopes(stack, *paths))

    def programs(self, program: Jaxpr | ClosedJaxpr, other: Jaxpr | ClosedJaxpr) -> bool:
        """Whether two jaxprs, each closed or open, are alike."""
        if program is other:
            return True
        program, other = compat.closed(program), compat.closed(other)
        if program.consts or other.consts or len(program.jaxpr.eqns) != len(other.jaxpr.eqns):
            return False
        names: dict[Any, Any] = {}
        if not _named(names, program.jaxpr.invars, other.jaxpr.invars):
            return False
        for eqn, counterpart in zip(program.jaxpr.eqns, other.jaxpr.eqns, strict=True):
            if not self._equations(eqn, counterpart, names) or not _named(names, eqn.outvars, counterpart.outvars):
                return False
        return _read_alike(names, program.jaxpr.outvars, other.jaxpr.outvars)

    def _equations(self, eqn: JaxprEqn, other: JaxprEqn, names: dict[Any, Any]) -> bool:
        params, others = compat.parameters(eqn), compat.parameters(other)
        if eqn.primitive is not other.primitive or eqn.ctx is not other.ctx or params.keys() != others.keys():
            return False
        if self.scopes(eqn.source_info.name_stack) != other.source_info.name_stack:
            return False
        if not self._operands(eqn, other, names):
            return False
        if not self._values(compat.fixed_arguments(eqn), compat.fixed_arguments(other)):
            return False
        different = [key for key, value in params.items() if not self._values(value, others[key])]
        if len(different) == 1 and compat.is_rule(different[0]) and not params.get("symbolic_zeros", True):
            return self._rules_alike(eqn, other)
        return not different

    def _operands(self, eqn: JaxprEqn, other: JaxprEqn, names: dict[Any, Any]) -> bool:
        if self.folded is None or not (folds(eqn) and folds(other)):
            return _read_alike(names, eqn.invars, other.invars)
        (key, number), (other_key, other_number) = eqn.invars, other.invars
        before = self.folded.setdefault(int(number.val), other_number)
        is_same = number.aval == other_number.aval and int(before.val) == int(other_number.val)
        return is_same and _read_alike(names, [key], [other_key])

    def _values(self, value: Any, other: Any) -> bool:
        if value is other:
            return True
        if compat.is_jaxpr(value):
            return compat.is_jaxpr(other) and self.programs(value, other)
        if type(value) is not type(other):
            return False
        if isinstance(value, tuple | list):
            return len(value) == len(other) and all(map(self._values, value, other))
        # A callable dataclass is compared by its own `==`: its fields alone do not determine what a call computes.
        if dataclasses.is_dataclass(value) and not callable(value):
            fields = [field.name for field in dataclasses.fields(value)]
            return all(self._values(getattr(value, name), getattr(other, name)) for name in fields)
        if isinstance(value, float | complex):
            return repr(value) == repr(other)
        if isinstance(value, np.generic | np.ndarray):
            return _same_array(value, other)
        # `==` of two JAX arrays is an array, not True.
        return (value == other) is True

    def _rules_alike(self, eqn: JaxprEqn, other: JaxprEqn) -> bool:
        function = bodies(eqn)[0]
        if len(self.around) == _DEEPEST:
            return any(self.programs(outer, function) for outer in self.around)
        if eqn not in self.rules:
            self.rules[eqn] = _rule(eqn)
        first, second = self.rules[eqn], _rule(other)
        inner = _Comparison(self.rules, (*self.around, function), self.paths)
        return first is not None and second is not None and inner.programs(first, second)


def _rule(eqn: JaxprEqn) -> ClosedJaxpr | None:
    """The traced derivative rule of an equation; None if tracing fails, for example for an unbound axis name."""
    primals = [atom.aval for atom in eqn.invars]

    def push(primals: list[Any], tangents: list[Any]) -> tuple[list[Any], list[Any]]:
        return jax.jvp(lambda *values: compat.bind(eqn, values), tuple(primals), tuple(tangents))

    try:
        return jax.make_jaxpr(push)(primals, [aval.to_tangent_aval() for aval in primals])
    except Exception:  # a user's rule may fail without harm if the user never differentiates the function
        return None


def _named(names: dict[Any, Any], ones: Sequence[Var], others: Sequence[Var]) -> bool:
    """Whether two lists of variables have the same types. Adds to `names`: variable in `ones` → variable in `others`."""
    if len(ones) != len(others):
        return False
    for var, other in zip(ones, others, strict=True):
        if var.aval != other.aval or var.aval.weak_type != other.aval.weak_type:
            return False
        names[var] = other
    return True


def _read_alike(names: dict[Any, Any], ones: Sequence[Var | Literal], others: Sequence[Var | Literal]) -> bool:
    """Whether two lists of operands are equal: variables according to `names`, literals by value."""
    return len(ones) == len(others) and all(_atoms(names, operand, other) for operand, other in zip(ones, others, strict=True))


def _atoms(names: dict[Any, Any], operand: Var | Literal, other: Var | Literal) -> bool:
    if not hasattr(operand, "val") or not hasattr(other, "val"):
        return not hasattr(operand, "val") and names[operand] is other
    return operand.aval == other.aval and _same_array(np.asarray(operand.val), np.asarray(other.val))


def _same_array(one: Any, other: Any) -> bool:
    """Whether two NumPy arrays or scalars are equal bit for bit. `jnp.split` gives its equation NumPy integers."""
    alike = one.dtype == other.dtype and one.shape == other.shape and not one.dtype.hasobject
    return bool(alike and one.tobytes() == other.tobytes())
