"""Giving every array of a block a name made of its module path, its primitive and a counter.

A name is what a checkpoint policy can hold on to: JAX's own policies see only primitives. The name of an array is
`module/path:primitive#k`, k counting from 0 in the order of execution; a user's own `checkpoint_name` takes its place.

Names are given twice. First to what the block computes, so that they do not depend on how it is differentiated. Then, in its
linearisation, to what the derivative rules compute beside it (the mask of a ReLU, the log-sum-exp of an attention kernel), and
there a name moves to where its array is made: a rule that reads its own output (exp, tanh, softmax) reads the named array too.
Without that, JAX would save the named copy and compute the array again for the rule.

Of what the derivative rules compute there is more the more inputs are differentiated. An array has the name that it has where
all are: a layer whose input has no gradient names its arrays as the next layer does.
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

from remat_jax import compat
from remat_jax.core.flow import flagged, has, inner_flags
from remat_jax.core.walk import inner_jaxprs, interpret, retrace
from remat_jax.policy import Candidate

# JAX's partial evaluation asks the policy about the equations inside these, in another checkpoint too. What is inside anything
# else (`while`, kernels) it takes as a whole: only the outputs can be named.
_CALLS = frozenset({"jit", "pjit", "closed_call", "core_call", "eval_jaxpr", "checkpoint", "remat", "remat2"})
_CONTROL = frozenset({"scan", "cond", "shard_map"})
# The two parts of a complex array have its name: together they are that array again.
_UNNAMED = _CALLS | {"complex"}


@dataclass(frozen=True)
class Named:
    """A jaxpr with every array named, and what each name stands for.

    Attributes:
      made: makes `jaxpr` when it is first asked for.
      path: the block's module path.
      candidates: name → what selectors see of it, in the order of execution.
      shapes: name → the shape of the array (of a scanned one: in one round).
      counts: how many names each `module/path:primitive` has.
      inputs: for each input of the block's jaxpr its name, None of parameters and keys.
      values: of a linearisation, which values its names stand for.
    """

    made: Callable[[], Any]
    path: str
    candidates: dict[str, Candidate]
    shapes: dict[str, tuple[int, ...]]
    counts: Counter[str] = field(default_factory=Counter)
    inputs: tuple[str | None, ...] = ()
    values: _Values | None = None

    @functools.cached_property
    def jaxpr(self) -> Any:
        """The closed jaxpr; it computes what the unnamed one computes, bit for bit."""
        return self.made()


def name_residuals(jaxpr: Any, path: str, inputs: Sequence[bool]) -> Named:
    """Name every array that the block `jaxpr` makes, and its inputs.

    Args:
      jaxpr: the block as a closed jaxpr.
      path: the block's module path; it leads every automatic name.
      inputs: for each input of `jaxpr`, whether it is an input of the block (and not a parameter or an RNG key).
    """
    namer = _Namer(path, {}, Counter())
    names = [namer.input_name() if is_input else None for is_input in inputs]

    def named(*args: Any) -> list[Any]:
        args = tuple(arg if name is None else namer.input(arg, name) for arg, name in zip(args, names, strict=True))
        return namer.run(jaxpr, args, (), [True] * len(args))

    kept = [name if name is None or can_be_named(aval) else None for name, aval in zip(names, jaxpr.in_avals, strict=True)]
    return replace(namer.finished(retrace(jaxpr, named)), inputs=tuple(kept))


def name_linearised(named: Named, linearised: Any, primals: int, whole: Named | None = None) -> Named:
    """Name what the derivative rules made, in the jaxpr of `named`'s forward-mode derivative, and move the names it has.

    Args:
      linearised: the closed jaxpr of primals and tangents to both.
      primals: how many of its inputs are primals; only what depends on nothing else can be kept for a backward pass.
      whole: the linearisation along all inputs, where this one is along some: equal values have its names.
    """
    values = _Values() if whole is None else _Values(whole.values)
    namer = _Namer(named.path, named.candidates, Counter((whole or named).counts), values)
    known = [index < primals for index in range(len(linearised.in_avals))]
    jaxpr = retrace(linearised, lambda *args: namer.run(linearised, args, (), known))
    return namer.finished(jaxpr)


def can_be_named(value: Any) -> bool:
    """Whether a policy can keep `value`: RNG keys, tokens and references have no storage that could be moved."""
    dtype = getattr(value, "dtype", None)
    return dtype is not None and not jnp.issubdtype(dtype, jax.dtypes.extended) and dtype != jax.dtypes.float0


def _is_known(eqn: Any, flags: list[bool]) -> bool:
    return all(flags)


class _Values:
    """Numbers for values: equal for the same operation on equal values. What has a name goes by that.

    Args:
      whole: another program's values, whose names equal values take, each once.
    """

    def __init__(self, whole: _Values | None = None) -> None:
        self._numbers: dict[Any, int] = {} if whole is None else whole._numbers
        self.names: dict[Any, list[str]] = {}
        self._left = {} if whole is None else {value: list(names) for value, names in whole.names.items()}

    def number(self, *key: Any) -> int:
        """The number of a value that is described by `key`."""
        return self._numbers.setdefault(key, len(self._numbers))

    def of_outputs(self, eqn: Any, inputs: Sequence[int]) -> list[int]:
        """The numbers of an equation's outputs, from those of its inputs."""
        params = () if inner_jaxprs(eqn) else tuple((key, _hashable(value)) for key, value in eqn.params.items())
        return [self.number(eqn.primitive.name, place, params, *inputs) for place in range(len(eqn.outvars))]

    def of_inner(self, eqn: Any, inputs: Sequence[int], known: Sequence[bool]) -> list[int]:
        """The numbers of the inputs of a jaxpr inside an equation; of what a loop carries, by their place among the known."""
        if eqn.primitive.name in _CALLS and len(inputs) == len(known):
            return list(inputs)
        places = (place if flag else -1 for place, flag in zip(itertools.accumulate(known), known, strict=True))
        return [self.number(eqn.primitive.name, "inner", place) for place in places]

    def name(self, value: tuple[int, str], new: Callable[[], str]) -> str:
        """The name that a value had, or a new one."""
        left = self._left.get(value)
        name = left.pop(0) if left else new()
        self.names.setdefault(value, []).append(name)
        return name


def _hashable(value: Any) -> Any:
    try:
        hash(value)
    except TypeError:
        return type(value)
    return value


class _Namer:
    """Names handed out so far."""

    def __init__(self, path: str, before: dict[str, Candidate], counts: Counter[str], values: _Values | None = None) -> None:
        self.path = tuple(part for part in path.split("/") if part)
        self.before, self.counts, self.values = before, counts, values or _Values()
        self.candidates: dict[str, Candidate] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}

    def finished(self, jaxpr: Any) -> Named:
        return Named(lambda: jaxpr, "/".join(self.path), self.candidates, self.shapes, self.counts, values=self.values)

    def input_name(self) -> str:
        return self._next("/".join(self.path), "input")

    def input(self, value: Any, name: str) -> Any:
        return self._name(value, Candidate(name, "input", is_input=True))

    def run(
        self, jaxpr: Any, args: Sequence[Any], outer: tuple[str, ...], known: Sequence[bool], numbers: Sequence[int] = ()
    ) -> list[Any]:
        """Evaluate `jaxpr` on `args` with the names in it; `known` says which inputs depend on primals only.

        `numbers` are those of the inputs' values, by place where there are none.
        """
        given = _given_names(jaxpr)
        fixed = flagged(jaxpr, known, _is_known)
        number = dict(zip(jaxpr.jaxpr.invars, numbers or map(self.values.number, itertools.count()), strict=False))

        def number_of(atom: Any) -> int:
            if hasattr(atom, "val"):
                return self.values.number("literal", str(atom.val))
            return number[atom] if atom in number else self.values.number("constant")

        def visit(eqn: Any, inputs: list[Any]) -> list[Any]:
            path = self._relative(outer + compat.scopes(eqn))
            flags = [has(atom, fixed) for atom in eqn.invars]
            primitive = eqn.primitive.name
            operands = [number_of(atom) for atom in eqn.invars]
            for var, value in zip(eqn.outvars, self.values.of_outputs(eqn, operands), strict=True):
                number[var] = self.values.number(*given[var]) if var in given else value
            if compat.given_name(eqn) is not None:
                outputs = inputs
            elif primitive in _CALLS or primitive in _CONTROL:
                outputs = compat.bind(eqn, inputs, **self._inside(eqn, flags, path, operands))
            else:
                outputs = compat.bind(eqn, inputs)
            with compat.eqn_context(eqn):
                return [
                    self._named(eqn, number[var], out, path, given.get(var, ()), var in fixed)
                    for var, out in zip(eqn.outvars, outputs, strict=True)
                ]

        named_args = [self._given(arg, given.get(var, ()), None) for var, arg in zip(jaxpr.jaxpr.invars, args, strict=True)]
        return interpret(jaxpr, named_args, visit)

    def _named(self, eqn: Any, number: int, value: Any, path: tuple[str, ...], names: Sequence[str], known: bool) -> Any:
        if names:
            return self._given(value, names, eqn)
        if not known or eqn.primitive.name in _UNNAMED or compat.given_name(eqn) is not None:
            return value
        where, primitive = "/".join((*self.path, *path)), eqn.primitive.name
        name = self.values.name((number, where), lambda: self._next(where, primitive))
        return self._name(value, Candidate(name, eqn.primitive.name, has_batch_dims=_has_batch_dims(eqn)))

    def _given(self, value: Any, names: Sequence[str], producer: Any) -> Any:
        for name in names:
            value = self._name(value, self.before.get(name) or _user_named(name, producer))
        return value

    def _inside(self, eqn: Any, flags: list[bool], path: tuple[str, ...], numbers: Sequence[int]) -> dict[str, Any]:
        changed = {}
        for key, value in inner_jaxprs(eqn).items():
            many = isinstance(value, tuple)
            new = []
            for one in value if many else (value,):
                inner = compat.closed(one)
                known = inner_flags(eqn, key, inner, flags, _is_known)
                inside = self.values.of_inner(eqn, numbers, known)
                with compat.inner_context(eqn):
                    renamed = retrace(inner, lambda *args, j=inner, k=known, n=inside: self.run(j, args, path, k, n))
                new.append(compat.like(renamed, one))
            changed[key] = tuple(new) if many else new[0]
        return changed

    def _relative(self, path: tuple[str, ...]) -> tuple[str, ...]:
        """`path` inside the block: Linen opens the block's own scope again, twice when it is lifted."""
        own = self.path[-1] if self.path else ""
        for _ in range(2):
            if path and own and (path[0] == own or path[0].startswith(own + ".")):
                path = path[1:]
        return path

    def _next(self, path: str, label: str) -> str:
        base = f"{path}:{label}"
        self.counts[base] += 1
        return f"{base}#{self.counts[base] - 1}"

    def _name(self, value: Any, candidate: Candidate) -> Any:
        if not can_be_named(value):
            return value
        self.candidates.setdefault(candidate.name, candidate)
        self.shapes.setdefault(candidate.name, tuple(value.shape))
        if jnp.iscomplexobj(value):
            # Kept as two real arrays: JAX rounds what a checkpoint keeps, and cannot round complex numbers.
            return lax.complex(*(checkpoint_name(part(value), candidate.name) for part in (lax.real, lax.imag)))
        return checkpoint_name(value, candidate.name)


def _given_names(jaxpr: Any) -> dict[Any, list[str]]:
    """The names that a variable is given in `jaxpr`: its only ones, wherever it is read; a complex one's are on its parts."""
    found: dict[Any, list[str]] = {}
    for eqn in jaxpr.jaxpr.eqns:
        name = compat.given_name(eqn)
        if name is not None and not hasattr(eqn.invars[0], "val"):
            found.setdefault(eqn.invars[0], []).append(name)
    parts: dict[Any, dict[str, list[str]]] = {}
    for eqn in jaxpr.jaxpr.eqns:
        if eqn.primitive.name in ("real", "imag") and eqn.outvars[0] in found:
            parts.setdefault(eqn.invars[0], {})[eqn.primitive.name] = found[eqn.outvars[0]]
    return {var: of["real"] for var, of in parts.items() if of.get("real") == of.get("imag")} | found


def _user_named(name: str, producer: Any) -> Candidate:
    """A user's name on what `producer` makes (None: on an input), so that `@dots` still finds a named dot."""
    if producer is None:
        return Candidate(name, "name", user_named=True)
    return Candidate(name, producer.primitive.name, has_batch_dims=_has_batch_dims(producer), user_named=True)


def _has_batch_dims(eqn: Any) -> bool:
    if eqn.primitive.name == "scaled_matmul_wrapper":
        return bool(eqn.invars[0].aval.shape[0] != 1)
    if eqn.primitive.name != "dot_general":
        return False
    _, (lhs_batch, rhs_batch) = eqn.params["dimension_numbers"]
    return bool(lhs_batch or rhs_batch)
