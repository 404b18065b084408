"""Names every array of a block by its module path, its primitive and a counter: `module/path:primitive#k`.

For example, a block at `layers_0` has the input `layers_0:input#0`, the first matmul of its submodule `up` is
`layers_0/up:dot_general#0`, and the second addition in the block itself is `layers_0:add#1`. For each path and primitive, k
starts at 0 and follows the order of execution. A user's own `checkpoint_name` replaces the automatic name.

A JAX policy sees primitives but no module paths, so it can select a single array only by its name.

`name_residuals` names the arrays of the block f before differentiation, so their names do not depend on how f is
differentiated. `name_linearised` names the arrays that derivative rules add (the mask of a ReLU, the log-sum-exp of an
attention kernel). It also moves names in the linearisation `(x, ẋ) ↦ (f(x), f_lin(ẋ))`. The derivative rules of exp, tanh and
softmax read the output of the function; after the move they read the named array:

    a = exp(b);  n = checkpoint_name(a, …);  ȧ = a ḃ      as JAX traces it: a policy that saves n still recomputes a
    n = checkpoint_name(exp(b), …);          ȧ = n ḃ      after the name has moved to the equation of exp

If fewer inputs are differentiated, derivative rules compute fewer arrays, which would shift the counters. So every
linearisation takes its names from the linearisation along all inputs. The first layer, whose input has no gradient, then has
the same names as later layers.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, Var

from remat_jax import compat
from remat_jax.core.flow import all_inputs, flagged, has, inner_flags
from remat_jax.core.matmuls import has_batch_dims
from remat_jax.core.walk import bodies, interpret, rebind, retrace
from remat_jax.policy import Candidate

# JAX's partial evaluation applies a checkpoint's policy also to the equations inside these primitives. `checkpoint` is one of
# them, so an outer policy reaches into a nested checkpoint. Inside other primitives with a body (`while`, `pallas_call`) a
# policy keeps nothing; it can keep only their outputs.
_CALLS = frozenset({"jit", "call", "checkpoint"})
_CONTROL = frozenset({"scan", "cond", "shard_map"})
# A complex array is named on its real and imaginary parts. The `complex` equation that joins them needs no name.
_UNNAMED = _CALLS | {"complex"}


@dataclass(frozen=True)
class Named:
    """A jaxpr with every array named, and the properties of the named arrays.

    Attributes:
      made: returns `jaxpr`; it is called once, when `jaxpr` is first read.
      path: the block's module path, with which every automatic name begins.
      candidates: name → the properties of the array that selectors match. The arrays are in the order of execution.
      shapes: name → the array's shape; inside a scan, its shape in one iteration.
      counts: `module/path:primitive` → how many automatic names begin with it.
      inputs: the name of each input of the block's jaxpr; None for parameters and RNG keys.
      values: the value numbering of the named arrays, from which another linearisation takes names; None if the names come
        from an identical block at another path (`core/repeated.py`).
    """

    made: Callable[[], ClosedJaxpr]
    path: str
    candidates: dict[str, Candidate]
    shapes: dict[str, tuple[int, ...]]
    counts: Counter[str] = field(default_factory=Counter)
    inputs: tuple[str | None, ...] = ()
    values: _Values | None = None

    @functools.cached_property
    def jaxpr(self) -> ClosedJaxpr:
        """The closed jaxpr. Its results are bit-equal to those of the unnamed jaxpr."""
        return self.made()


def name_residuals(jaxpr: ClosedJaxpr, path: str, inputs: Sequence[bool]) -> Named:
    """Name the inputs of the block `jaxpr` at the module path `path`, and every array that it computes.

    Args:
      inputs: for each input of `jaxpr`, whether it is an input of the block and not a parameter or an RNG key.
    """
    namer = _Namer(path, {}, Counter())
    names = [namer.next("/".join(namer.path), "input") if is_input else None for is_input in inputs]
    candidates = [None if name is None else Candidate(name, "input", is_input=True) for name in names]

    def named(*args: Any) -> list[Any]:
        args = tuple(namer.name(arg, candidate) if candidate else arg for arg, candidate in zip(args, candidates, strict=True))
        return namer.run(jaxpr, args, outer=(), primal_only=[True] * len(args))

    kept = tuple(name if can_be_named(aval) else None for name, aval in zip(names, jaxpr.in_avals, strict=True))
    return replace(namer.finished(retrace(jaxpr, named)), inputs=kept)


def name_linearised(named: Named, linearised: ClosedJaxpr, primals: int, whole: Named | None = None) -> Named:
    """Name the arrays that derivative rules add to the linearisation of `named`, and move the names of the block's arrays.

    The move is described at the top of this module.

    Args:
      linearised: the closed jaxpr from primals and tangents to outputs and their tangents.
      primals: how many of the first inputs of `linearised` are primals. Only arrays that depend on primals alone get names.
      whole: the linearisation along all inputs, if `linearised` is along some inputs only. Equal values get the same names.
    """
    values = _Values() if whole is None else _Values(whole.values)
    namer = _Namer(named.path, named.candidates, Counter((whole or named).counts), values)
    of_primals = [index < primals for index in range(len(linearised.in_avals))]
    jaxpr = retrace(linearised, lambda *args: namer.run(linearised, args, outer=(), primal_only=of_primals))
    return namer.finished(jaxpr)


def can_be_named(value: object) -> bool:
    """Whether a policy can keep `value`. It cannot keep RNG keys, tokens, references and arrays of dtype float0."""
    dtype = getattr(value, "dtype", None)
    return dtype is not None and not jnp.issubdtype(dtype, jax.dtypes.extended) and dtype != jax.dtypes.float0


class _Values:
    """Numbers a program's values: equal operations on equal values have equal numbers. A named value is numbered by its name.

    If the values of another program (`whole`) are given, each value gets the name of an equal value in `whole`. Each
    name is used once.
    """

    def __init__(self, whole: _Values | None = None) -> None:
        self._numbers: dict[Any, int] = {} if whole is None else whole._numbers
        self.names: dict[Var, list[str]] = {}
        self._unused = {} if whole is None else {value: list(names) for value, names in whole.names.items()}

    def number(self, *key: Any) -> int:
        """The number of the value that `key` describes."""
        return self._numbers.setdefault(key, len(self._numbers))

    def of_outputs(self, eqn: JaxprEqn, inputs: Sequence[int]) -> list[int]:
        """The numbers of an equation's outputs, from the numbers of its inputs."""
        params = () if bodies(eqn) else tuple((key, _hashable(value)) for key, value in eqn.params.items())
        return [self.number(compat.kind(eqn), place, params, *inputs) for place in range(len(eqn.outvars))]

    def of_inner(self, eqn: JaxprEqn, inputs: Sequence[int], primal_only: Sequence[bool]) -> list[int]:
        """The numbers of an inner jaxpr's inputs. The inputs of a call have the numbers of its operands.

        In a loop or branch, the inputs that depend on primals only (`primal_only`) are numbered by their position among these
        inputs; all other inputs share one number.
        """
        if compat.kind(eqn) in _CALLS and len(inputs) == len(primal_only):
            return list(inputs)
        places = (place if flag else -1 for place, flag in zip(itertools.accumulate(primal_only), primal_only, strict=True))
        return [self.number(compat.kind(eqn), "inner", place) for place in places]

    def name(self, value: tuple[int, str], new: Callable[[], str]) -> str:
        """The next unused name that `whole` gives to an equal value; if there is none, `new()`."""
        unused = self._unused.get(value)
        name = unused.pop(0) if unused else new()
        self.names.setdefault(value, []).append(name)
        return name


def _hashable(value: object) -> object:
    try:
        hash(value)
    except TypeError:
        return type(value)
    return value


class _Namer:
    """Evaluates jaxprs with every array named, and records the names."""

    def __init__(self, path: str, before: dict[str, Candidate], counts: Counter[str], values: _Values | None = None) -> None:
        self.path = tuple(part for part in path.split("/") if part)
        self.before, self.counts, self.values = before, counts, values or _Values()
        self.candidates: dict[str, Candidate] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}

    def finished(self, jaxpr: ClosedJaxpr) -> Named:
        """`jaxpr`, which was traced while `run` named its arrays, with the names that `run` recorded."""
        return Named(lambda: jaxpr, "/".join(self.path), self.candidates, self.shapes, self.counts, values=self.values)

    def run(
        self,
        jaxpr: ClosedJaxpr,
        args: Sequence[Any],
        outer: tuple[str, ...],
        primal_only: Sequence[bool],
        numbers: Sequence[int] = (),
    ) -> list[Any]:
        """Evaluate `jaxpr` and name its arrays.

        Args:
          outer: the module path of `jaxpr` inside the block; empty for the block itself.
          primal_only: for each input, whether it depends on primals only.
          numbers: the value number of each input; empty to number the inputs by their index.
        """
        names = _given_names(jaxpr)
        fixed = flagged(jaxpr, primal_only, all_inputs)
        number = dict(zip(jaxpr.jaxpr.invars, numbers or map(self.values.number, itertools.count()), strict=False))

        def number_of(atom: Var | Literal) -> int:
            if hasattr(atom, "val"):
                return self.values.number("literal", str(atom.val))
            return number[atom] if atom in number else self.values.number("constant")

        def visit(eqn: JaxprEqn, inputs: list[Any]) -> list[Any]:
            path = self._relative(outer + compat.scopes(eqn))
            flags = [has(atom, fixed) for atom in eqn.invars]
            operands = [number_of(atom) for atom in eqn.invars]
            for var, value in zip(eqn.outvars, self.values.of_outputs(eqn, operands), strict=True):
                number[var] = self.values.number(*names[var]) if var in names else value

            def inside(key: str, body: ClosedJaxpr) -> ClosedJaxpr:
                primal_only = inner_flags(eqn, key, body, flags, all_inputs)
                inner_numbers = self.values.of_inner(eqn, operands, primal_only)
                return retrace(body, lambda *args: self.run(body, args, path, primal_only, numbers=inner_numbers))

            if compat.given_name(eqn) is not None:
                outputs = inputs
            elif compat.kind(eqn) in _CALLS | _CONTROL:
                outputs = rebind(eqn, inputs, inside)
            else:
                outputs = compat.bind(eqn, inputs)
            with compat.eqn_context(eqn):
                return [
                    self._named(eqn, number[var], out, path, names.get(var, ()), var in fixed)
                    for var, out in zip(eqn.outvars, outputs, strict=True)
                ]

        named_args = [self._given(arg, names.get(var, ()), None) for var, arg in zip(jaxpr.jaxpr.invars, args, strict=True)]
        return interpret(jaxpr, named_args, visit)

    def _named(
        self, eqn: JaxprEqn, number: int, value: Any, path: tuple[str, ...], names: Sequence[str], primal_only: bool
    ) -> Any:
        if names:
            return self._given(value, names, eqn)
        where, primitive = "/".join((*self.path, *path)), compat.kind(eqn)
        if not primal_only or primitive in _UNNAMED or compat.given_name(eqn) is not None:
            return value
        name = self.values.name((number, where), lambda: self.next(where, primitive))
        return self.name(value, _candidate(name, eqn))

    def _given(self, value: Any, names: Sequence[str], producer: JaxprEqn | None) -> Any:
        for name in names:
            value = self.name(value, self.before.get(name) or _user_named(name, producer))
        return value

    def _relative(self, path: tuple[str, ...]) -> tuple[str, ...]:
        """`path` without the block's own scope at its beginning. If Linen has lifted the block, this scope is there twice."""
        # The path of a method ends with its name, `layers_0.encode`.
        block = self.path[-1].partition(".")[0] if self.path else ""
        for _ in range(2):
            if path and block and (path[0] == block or path[0].startswith(block + ".")):
                path = path[1:]
        return path

    def next(self, path: str, label: str) -> str:
        """The next automatic name `path:label#k`."""
        base = f"{path}:{label}"
        self.counts[base] += 1
        return f"{base}#{self.counts[base] - 1}"

    def name(self, value: Any, candidate: Candidate) -> Any:
        """`value`, named as the candidate if it can be named."""
        if not can_be_named(value):
            return value
        self.candidates.setdefault(candidate.name, candidate)
        self.shapes.setdefault(candidate.name, tuple(value.shape))
        if jnp.iscomplexobj(value):
            # The real and the imaginary part are fetched from the host one after the other, so that the backward pass needs
            # less device memory: 33.6 instead of 37.8 MB for three blocks, each with a complex array of 8 MB.
            return lax.complex(*(checkpoint_name(part(value), candidate.name) for part in (lax.real, lax.imag)))
        return checkpoint_name(value, candidate.name)


def _given_names(jaxpr: ClosedJaxpr) -> dict[Var, list[str]]:
    """Variable → the names that `jaxpr` gives it. A complex variable's names are on its real and imaginary parts."""
    names: dict[Var, list[str]] = {}
    for eqn in jaxpr.jaxpr.eqns:
        name = compat.given_name(eqn)
        if name is not None and not hasattr(eqn.invars[0], "val"):
            names.setdefault(eqn.invars[0], []).append(name)
    parts: dict[Var, dict[str, list[str]]] = {}
    for eqn in jaxpr.jaxpr.eqns:
        if eqn.primitive.name in ("real", "imag") and eqn.outvars[0] in names:
            parts.setdefault(eqn.invars[0], {})[eqn.primitive.name] = names[eqn.outvars[0]]
    return {var: of["real"] for var, of in parts.items() if of.get("real") == of.get("imag")} | names


def _user_named(name: str, producer: JaxprEqn | None) -> Candidate:
    """The candidate for an array that a user named: an output of the equation `producer`, or an input if `producer` is None.

    The candidate has the primitive of `producer`, so that `@dots` selects a matmul with a user's name.
    """
    if producer is None:
        return Candidate(name, "name", user_named=True)
    return replace(_candidate(name, producer), user_named=True)


def _candidate(name: str, eqn: JaxprEqn) -> Candidate:
    avals = [atom.aval for atom in eqn.invars]
    return Candidate(name, compat.kind(eqn), has_batch_dims=has_batch_dims(eqn.primitive.name, avals, eqn.params))
