"""Evaluates a jaxpr equation by equation, with some equations replaced, and finds the jaxprs inside equations."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, Var

from remat_jax import compat

Visit = Callable[[JaxprEqn, list[Any]], "list[Any] | None"]


def interpret(jaxpr: ClosedJaxpr, args: Sequence[Any], visit: Visit) -> list[Any]:
    """Evaluate the closed `jaxpr` on `args`. `visit(eqn, inputs)` returns the outputs; if None, `eqn` is bound unchanged."""
    env = values_of_inputs(jaxpr, args)
    evaluate_equations(jaxpr.jaxpr.eqns, env, visit)
    return [value_of(atom, env) for atom in jaxpr.jaxpr.outvars]


def values_of_inputs(jaxpr: ClosedJaxpr, args: Sequence[Any]) -> dict[Var, Any]:
    """The constants and arguments of the closed `jaxpr`: variable → value."""
    env: dict[Var, Any] = dict(zip(jaxpr.jaxpr.constvars, jaxpr.consts, strict=True))
    env.update(zip(jaxpr.jaxpr.invars, args, strict=True))
    return env


def value_of(atom: Var | Literal, env: Mapping[Var, Any]) -> Any:
    """The value of a variable or a literal."""
    return atom.val if hasattr(atom, "val") else env[atom]


def variables(atoms: Iterable[Var | Literal]) -> list[Var]:
    """The variables among `atoms`, without the literals."""
    return [atom for atom in atoms if not hasattr(atom, "val")]


def evaluate_equations(eqns: Iterable[JaxprEqn], env: dict[Var, Any], visit: Visit) -> None:
    """Evaluate `eqns` in order, as `interpret` does. `env` maps variables to values; the outputs are added to it."""
    for eqn in eqns:
        inputs = [value_of(atom, env) for atom in eqn.invars]
        outputs = visit(eqn, inputs)
        if outputs is None:
            outputs = compat.bind(eqn, inputs)
        env.update(zip(eqn.outvars, outputs, strict=True))


def retrace(jaxpr: ClosedJaxpr, function: Callable[..., Any]) -> ClosedJaxpr:
    """The closed jaxpr of `function` on the input types of `jaxpr`. Its `consts` are the constants that JAX hoists."""
    return jax.make_jaxpr(function)(*jaxpr.in_avals)


def filled(values: Sequence[Any], places: Sequence[int], others: Sequence[Any]) -> list[Any]:
    """A copy of `values` that has `others[i]` at index `places[i]`."""
    result = list(values)
    for place, value in zip(places, others, strict=True):
        result[place] = value
    return result


def of_some(function: Callable[..., Any], arguments: Sequence[Any], places: Sequence[int]) -> Callable[..., Any]:
    """`function` as a function of the arguments at `places`. Its other arguments are fixed.

    >>> of_some(lambda *numbers: numbers, [1, 2, 3], [0, 2])(7, 8)
    (7, 2, 8)
    """
    return lambda *changed: function(*filled(arguments, places, changed))


def of_arrays(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Callable[..., Any], list[Any]]:
    """The call `fn(*args, **kwargs)` as a function of the arrays in its arguments, and these arrays. Other values are fixed.

    NumPy values of rank 0 are no arrays here (`compat.is_operand`).
    """
    leaves, treedef = jax.tree.flatten((args, kwargs))
    places = [place for place, leaf in enumerate(leaves) if compat.is_operand(leaf)]

    def of_leaves(*leaves: Any) -> Any:
        positional, named = jax.tree.unflatten(treedef, leaves)
        return fn(*positional, **named)

    return of_some(of_leaves, leaves, places), [leaves[place] for place in places]


def inner_jaxprs(eqn: JaxprEqn) -> dict[str, Any]:
    """The jaxprs of `eqn`: parameter (`compat.parameters`) → jaxpr or tuple (branches of a `cond`)."""
    jaxprs = {}
    for key, value in compat.parameters(eqn).items():
        if compat.is_jaxpr(value):
            jaxprs[key] = value
        elif isinstance(value, tuple):
            # A `custom_linear_solve` that cannot be transposed has None in place of two of its jaxprs.
            inside = tuple(part for part in value if part is not None)
            if inside and all(map(compat.is_jaxpr, inside)):
                jaxprs[key] = inside
    return jaxprs


def bodies(eqn: JaxprEqn) -> list[ClosedJaxpr]:
    """The closed jaxprs inside an equation: a called function, the body of a loop, branches."""
    values = inner_jaxprs(eqn).values()
    return [compat.closed(body) for value in values for body in (value if isinstance(value, tuple) else (value,))]


def executed_bodies(eqn: JaxprEqn) -> list[ClosedJaxpr]:
    """The closed jaxprs inside an equation that run with it. Of a linear solver's four only its solution runs."""
    is_solve = eqn.primitive.name == "custom_linear_solve"
    return [compat.closed(eqn.params["jaxprs"].solve)] if is_solve else bodies(eqn)


def differentiated_bodies(eqn: JaxprEqn) -> list[ClosedJaxpr]:
    """The closed jaxprs inside an equation that JAX differentiates. A policy has an effect only there.

    JAX differentiates functions with a custom derivative by their rules, and of a linear solver only the linear function.
    """
    if compat.has_own_derivative(eqn):
        return []
    is_solve = eqn.primitive.name == "custom_linear_solve"
    return [compat.closed(eqn.params["jaxprs"].matvec)] if is_solve else bodies(eqn)


def is_differentiated(eqn: JaxprEqn, body: ClosedJaxpr) -> bool:
    """Whether the closed jaxpr `body` inside `eqn` is one of its `differentiated_bodies`."""
    return any(body.jaxpr is other.jaxpr for other in differentiated_bodies(eqn))


def equations(jaxpr: ClosedJaxpr, inside: Callable[[JaxprEqn], Iterable[ClosedJaxpr]] = bodies) -> Iterator[JaxprEqn]:
    """Every equation of the closed `jaxpr` at any depth. An equation comes before the equations inside it."""
    for eqn in jaxpr.jaxpr.eqns:
        yield eqn
        for body in inside(eqn):
            yield from equations(body, inside)


def given_names(jaxpr: ClosedJaxpr) -> Iterator[str]:
    """The names of all `checkpoint_name` equations in the closed `jaxpr`, at any depth."""
    return (name for eqn in equations(jaxpr) if (name := compat.given_name(eqn)) is not None)


def checkpoints_around_blocks(jaxpr: ClosedJaxpr) -> int:
    """How many checkpoint regions, at any depth of the closed `jaxpr`, contain a block of `remat_jax`."""
    regions = [bodies(eqn) for eqn in equations(jaxpr) if compat.is_checkpoint(eqn)]
    return sum(any(compat.is_block(eqn) for body in inside for eqn in equations(body)) for inside in regions)


def map_inner(eqn: JaxprEqn, change: Callable[[ClosedJaxpr], ClosedJaxpr]) -> dict[str, Any]:
    """The jaxpr parameters of `eqn` with `change` applied to each closed jaxpr. Open jaxprs stay open."""
    return _map_inner(eqn, lambda _, body: change(body))


def _map_inner(eqn: JaxprEqn, change: Callable[[str, ClosedJaxpr], ClosedJaxpr]) -> dict[str, Any]:
    return replace_inner(eqn, lambda key, body: compat.like(change(key, compat.closed(body)), body))


def replace_inner(eqn: JaxprEqn, change: Callable[[str, ClosedJaxpr], ClosedJaxpr]) -> dict[str, Any]:
    """The jaxpr parameters of `eqn` with `change(parameter, body)` in place of each jaxpr `body`, open or closed."""
    return {
        # A tuple of jaxprs keeps its class (the four jaxprs of a `custom_linear_solve` are a named tuple) and its Nones.
        key: jax.tree.map(functools.partial(change, key), eqn.params.get(key, body), is_leaf=compat.is_jaxpr)
        if isinstance(body, tuple)
        else change(key, body)
        for key, body in inner_jaxprs(eqn).items()
    }


def rebind(eqn: JaxprEqn, inputs: Sequence[Any], change: Callable[[str, ClosedJaxpr], ClosedJaxpr]) -> list[Any]:
    """Evaluate `eqn` on `inputs` with `change(parameter, body)` in place of each closed jaxpr inside it."""
    with compat.inner_context(eqn):
        changed = _map_inner(eqn, change)
    return compat.bind(eqn, inputs, **changed)
