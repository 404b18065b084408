"""The functions that JAX differentiates while a function is traced under policies by layer."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr

from remat_jax import compat

Types = tuple[jax.ShapeDtypeStruct, ...]


@dataclass(frozen=True)
class Gradient:
    """A function that is differentiated while another is traced.

    Attributes:
      jaxpr: the function as a closed jaxpr with marks, which takes `frozen`, then `trained`.
      frozen, trained: the types of the arrays that it closes over, and of those along which it is differentiated.
      outputs: how many of its outputs are differentiated; the others are aux.
      scope: the named scope of its equations in the program that takes the gradient.
      where: why its arrays are not those of the whole step; empty if they are.
    """

    jaxpr: ClosedJaxpr
    frozen: Types
    trained: Types
    outputs: int
    scope: str
    where: str


_noted: ContextVar[list[Gradient] | None] = ContextVar("noted", default=None)
_depth: ContextVar[int] = ContextVar("depth", default=0)
_numbers = itertools.count()


@contextlib.contextmanager
def noting_gradients() -> Iterator[list[Gradient]]:
    """Collects the functions that are differentiated inside this context while policies by layer are set, in order."""
    gradients: list[Gradient] = []
    with compat.setting(_noted, gradients):
        yield gradients


def new_scope() -> str | None:
    """A name for the scope of a gradient that is about to be evaluated; None if gradients are not noted."""
    return None if _noted.get() is None else f"gradient{next(_numbers)}"


def inside_gradient() -> contextlib.AbstractContextManager[None]:
    """A context in which a differentiated function is traced."""
    return compat.setting(_depth, _depth.get() + 1)


def note(jaxpr: ClosedJaxpr, outputs: Any, scope: str | None) -> None:
    """Note the gradient of a traced function whose differentiated outputs are `outputs`."""
    notes = _noted.get()
    if notes is None or scope is None:
        return
    jaxpr, consts = compat.hoist_consts(jaxpr)
    types = tuple(jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in jaxpr.in_avals)
    count = sum(map(compat.is_operand, jax.tree.leaves(outputs)))
    notes.append(Gradient(jaxpr, types[: len(consts)], types[len(consts) :], count, scope, _where(jaxpr)))


def _where(jaxpr: ClosedJaxpr) -> str:
    if _depth.get():
        return "inside another gradient (a gradient penalty, a derivative along the inputs)"
    if compat.in_part_of_arrays():
        return "inside a vmap or a shard_map"
    return "of a function that uses a mutable array (jax.new_ref)" if compat.uses_references(jaxpr) else ""
