"""What a policy of JAX, a function, selects: JAX asks the function about one equation at a time, and so does this module."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax._src import ad_checkpoint as _ad_checkpoint
from jax._src.interpreters import partial_eval as _pe
from jax.core import ShapedArray
from jax.extend.core import ClosedJaxpr

from remat_jax.compat.equations import given_name, is_jaxpr, kind, parameters
from remat_jax.compat.jaxprs import closed

OFFLOAD = _pe.Offloadable(src="device", dst="pinned_host")
"""The value that a JAX policy returns to offload an array."""

_UNLIKELY_NAME = "remat_jax: no array has this name"
# How many attributes, closures and containers deep names are looked for, and the largest container that is read.
_DEPTH, _MOST = 6, 1000


@dataclass(frozen=True)
class Selects:
    """The kinds of arrays that a JAX policy selects, whether or not a model has such arrays.

    Attributes:
      saved, offloaded: the names that the policy saves and offloads.
      any_name: whether it keeps every name except a few.
      products: the kinds of matrix products that it keeps.
      offloads_products: whether it offloads these products.
      everything: whether it also keeps arrays of other kinds; the other attributes are then empty.
    """

    saved: frozenset[str] = frozenset()
    offloaded: frozenset[str] = frozenset()
    any_name: bool = False
    products: tuple[str, ...] = ()
    offloads_products: bool = False
    everything: bool = False


def selects(policy: Callable[..., Any]) -> Selects:
    """What a JAX policy selects, found by asking it about one equation of each kind.

    >>> import jax
    >>> selects(jax.checkpoint_policies.save_only_these_names("hidden")).saved
    frozenset({'hidden'})
    >>> selects(jax.checkpoint_policies.dots_saveable).products
    ('dot_general', 'batched dot_general')
    """
    try:
        return _selects(policy)
    except Exception:  # a user's policy may refuse equations that its model does not have
        return Selects()


def _selects(policy: Callable[..., Any]) -> Selects:
    matrix, stack = ShapedArray((8, 8), jnp.dtype("float32")), ShapedArray((2, 8, 8), jnp.dtype("float32"))
    if _verdict(policy, lax.sin_p, matrix, accuracy=None):
        return Selects(everything=True)
    any_name = bool(_verdict(policy, _ad_checkpoint.name_p, matrix, name=_UNLIKELY_NAME))
    verdicts: dict[str, str | None] = {}
    for name in () if any_name else set(_strings(policy, _DEPTH, set())):
        verdicts[name] = _verdict(policy, _ad_checkpoint.name_p, matrix, name=name)
    operands = {"precision": None, "preferred_element_type": None, "out_sharding": None}
    products = {
        "dot_general": _verdict(
            policy, lax.dot_general_p, matrix, matrix, dimension_numbers=(((1,), (0,)), ((), ())), **operands
        ),
        "batched dot_general": _verdict(
            policy, lax.dot_general_p, stack, stack, dimension_numbers=(((2,), (1,)), ((0,), (0,))), **operands
        ),
    }
    return Selects(
        frozenset(name for name, action in verdicts.items() if action == "save"),
        frozenset(name for name, action in verdicts.items() if action == "offload"),
        any_name,
        tuple(kind for kind, action in products.items() if action),
        "offload" in products.values(),
    )


def _verdict(policy: Callable[..., Any], primitive: Any, *avals: Any, **params: Any) -> str | None:
    answer = policy(primitive, *avals, **params)
    if isinstance(answer, _pe.Offloadable):
        return "offload"
    return "save" if answer is True or answer is _pe.Saveable else None


def _strings(value: Any, depth: int, seen: set[int]) -> Iterator[str]:
    """The strings in a policy: in its attributes, closure, arguments and code, and in the functions that these hold."""
    if isinstance(value, str):
        yield value
    elif depth and id(value) not in seen and not isinstance(value, type | types.ModuleType):
        seen.add(id(value))
        for held in _held(value):
            yield from _strings(held, depth - 1, seen)


def _held(value: Any) -> Iterator[Any]:
    if isinstance(value, functools.partial):
        yield from (value.func, value.args, value.keywords)
    elif isinstance(value, types.CodeType):
        yield value.co_consts
    elif inspect.isfunction(value):
        names = inspect.getclosurevars(value)
        yield from (value.__code__, value.__defaults__, value.__kwdefaults__)
        yield from (*names.nonlocals.values(), *names.globals.values())
    elif inspect.ismethod(value):
        yield from (value.__self__, value.__func__)
    elif isinstance(value, Mapping):
        yield from (*value.keys(), *value.values()) if len(value) <= _MOST else ()
    elif isinstance(value, set | frozenset | list | tuple):
        yield from value if len(value) <= _MOST else ()
    else:
        yield from getattr(value, "__dict__", {}).values()
        yield from (getattr(value, slot, None) for slot in getattr(type(value), "__slots__", ()))
        if callable(value) and inspect.isfunction(type(value).__call__):
            yield type(value).__call__


def names_in(policy: Any) -> frozenset[str]:
    """The names that a JAX policy keeps, and the names that JAX's `save_any_names_but_these(…)` was made with.

    >>> import jax
    >>> sorted(names_in(jax.checkpoint_policies.save_only_these_names("scores", "hidden")))
    ['hidden', 'scores']
    """
    kept = selects(policy)
    is_jax = (getattr(policy, "__module__", "") or "").startswith("jax.") or type(policy).__module__.startswith("jax.")
    held = inspect.getclosurevars(policy).nonlocals if inspect.isfunction(policy) else getattr(policy, "__dict__", {})
    excluded = _strings([*held.values()], _DEPTH, set()) if is_jax and kept.any_name else ()
    return kept.saved | kept.offloaded | frozenset(excluded)


def selected_in(policy: Callable[..., Any], jaxpr: ClosedJaxpr) -> Iterator[tuple[str, bool, bool]]:
    """Yield (name, whether the name was given, whether it is offloaded) for each array of `jaxpr` that a JAX policy keeps.

    Arrays at any depth count. An array without a given name has the name of its primitive.
    """
    for eqn in jaxpr.jaxpr.eqns:
        action, name = _verdict(policy, eqn.primitive, *(atom.aval for atom in eqn.invars), **eqn.params), given_name(eqn)
        if action:
            yield name or kind(eqn), name is not None, action == "offload"
        for value in parameters(eqn).values():
            for inner in value if isinstance(value, tuple) else (value,):
                if is_jaxpr(inner):
                    yield from selected_in(policy, closed(inner))


def offloaded_by(policy: Callable[..., Any], jaxpr: ClosedJaxpr) -> list[str]:
    """For each array in `jaxpr`, at any depth, that the JAX policy would offload: its name, else the name of its primitive."""
    return [name for name, _, is_offloaded in selected_in(policy, jaxpr) if is_offloaded]
