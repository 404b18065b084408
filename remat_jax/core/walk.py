"""Evaluating a jaxpr equation by equation, with some equations replaced, and looking at the jaxprs inside equations."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax

from remat_jax import compat

Visit = Callable[[Any, list[Any]], "list[Any] | None"]


def interpret(jaxpr: Any, args: Sequence[Any], visit: Visit) -> list[Any]:
    """Evaluate the closed `jaxpr` on `args`. `visit(eqn, inputs)` returns the equation's outputs, or None to bind it as is."""
    env = values_of_inputs(jaxpr, args)
    evaluate_equations(jaxpr.jaxpr.eqns, env, visit)
    return [value_of(atom, env) for atom in jaxpr.jaxpr.outvars]


def values_of_inputs(jaxpr: Any, args: Sequence[Any]) -> dict[Any, Any]:
    """The constants and arguments of the closed `jaxpr`: variable → value."""
    env: dict[Any, Any] = dict(zip(jaxpr.jaxpr.constvars, jaxpr.consts, strict=True))
    env.update(zip(jaxpr.jaxpr.invars, args, strict=True))
    return env


def value_of(atom: Any, env: Mapping[Any, Any]) -> Any:
    """The value of a variable or a literal."""
    return atom.val if hasattr(atom, "val") else env[atom]


def evaluate_equations(eqns: Iterable[Any], env: dict[Any, Any], visit: Visit) -> None:
    """Evaluate `eqns` in order, as `interpret` does. `env` has the values of variables, and their outputs are added to it."""
    for eqn in eqns:
        inputs = [value_of(atom, env) for atom in eqn.invars]
        outputs = visit(eqn, inputs)
        if outputs is None:
            outputs = compat.bind(eqn, inputs)
        env.update(zip(eqn.outvars, outputs, strict=True))


def retrace(jaxpr: Any, function: Callable[..., Any]) -> Any:
    """The closed jaxpr of `function` on the types of `jaxpr`'s inputs. Constants that JAX hoists stay constants."""
    return jax.make_jaxpr(function)(*jaxpr.in_avals)


def of_some(function: Callable[..., Any], arguments: Sequence[Any], places: Sequence[int]) -> Callable[..., Any]:
    """`function` as a function of the arguments at `places`. Its other arguments are fixed.

    >>> of_some(lambda *numbers: numbers, [1, 2, 3], [0, 2])(7, 8)
    (7, 2, 8)
    """

    def function_of_some(*changed: Any) -> Any:
        filled = list(arguments)
        for place, value in zip(places, changed, strict=True):
            filled[place] = value
        return function(*filled)

    return function_of_some


def of_arrays(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Callable[..., Any], list[Any]]:
    """The call `fn(*args, **kwargs)` as a function of the arrays in its arguments, and these arrays. Other values are fixed."""
    leaves, treedef = jax.tree.flatten((args, kwargs))
    places = [place for place, leaf in enumerate(leaves) if compat.is_array(leaf)]

    def of_leaves(*filled: Any) -> Any:
        positional, named = jax.tree.unflatten(treedef, filled)
        return fn(*positional, **named)

    return of_some(of_leaves, leaves, places), [leaves[place] for place in places]


def inner_jaxprs(eqn: Any) -> dict[str, Any]:
    """The parameters of `eqn` that are jaxprs, hold a jaxpr, or are tuples of jaxprs (the branches of a `cond`)."""
    hidden = compat.hidden_body(eqn)
    jaxprs = {} if hidden is None else {"_prim": hidden}
    for key, value in eqn.params.items():
        if compat.is_jaxpr(value) or (isinstance(value, tuple) and value and all(map(compat.is_jaxpr, value))):
            jaxprs[key] = value
    return jaxprs


def bodies(eqn: Any) -> list[Any]:
    """The closed jaxprs inside an equation: a called function, the body of a loop, branches."""
    values = inner_jaxprs(eqn).values()
    return [compat.closed(one) for value in values for one in (value if isinstance(value, tuple) else (value,))]


def equations(jaxpr: Any) -> Iterator[Any]:
    """Every equation of the closed `jaxpr` at any depth. An equation comes before the equations inside it."""
    for eqn in jaxpr.jaxpr.eqns:
        yield eqn
        for body in bodies(eqn):
            yield from equations(body)


def given_names(jaxpr: Any) -> Iterator[str]:
    """The names that `checkpoint_name` gives in the closed `jaxpr` at any depth."""
    return (name for eqn in equations(jaxpr) if (name := compat.given_name(eqn)) is not None)


def holds_block(eqn: Any) -> bool:
    """Whether `eqn` contains a checkpointed block of `remat_jax`, at any depth."""
    return any(compat.is_block(one) or holds_block(one) for body in bodies(eqn) for one in body.jaxpr.eqns)


def block_under_checkpoint(jaxpr: Any) -> bool:
    """Whether a checkpoint from elsewhere contains a block of `remat_jax`, anywhere in the closed `jaxpr`."""
    return checkpoints_around_blocks(jaxpr) > 0


def checkpoints_around_blocks(jaxpr: Any) -> int:
    """How many checkpoints from elsewhere in the closed `jaxpr` contain a block of `remat_jax`."""
    return sum(1 for eqn in equations(jaxpr) if compat.is_checkpoint(eqn) and holds_block(eqn))


def map_inner(eqn: Any, change: Callable[[Any], Any]) -> dict[str, Any]:
    """The jaxpr parameters of `eqn` with `change` applied to each closed jaxpr, each still in its original form."""

    def one(value: Any) -> Any:
        changed = change(compat.closed(value))
        return compat.like(changed, value)

    return {key: tuple(map(one, value)) if isinstance(value, tuple) else one(value) for key, value in inner_jaxprs(eqn).items()}
