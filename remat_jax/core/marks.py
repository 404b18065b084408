"""Marks: placeholder equations for blocks in a traced function, until the layer of each block is known.

    y = mark[f](x)                            while the function is traced
    y = checkpoint(policyᵢ)(… f …)(x)         the i-th mark, when `per_layer.layered` evaluates the traced function

A policy by layer cannot be applied where a block is called: a scan traces a block once for all layers, and a `jit` that was
traced before is not traced again.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import jax
from jax.extend.core import ClosedJaxpr, JaxprEqn

from remat_jax import compat
from remat_jax.compat import rules
from remat_jax.core.walk import filled, of_some
from remat_jax.errors import UnsupportedError
from remat_jax.policy import JaxPolicy, LayerPolicies, Policy

Block = type | str | Callable[..., Any]
"""A class whose instances are called, a method of a class, a function marked by `block`, or a glob on module paths."""

CHECKPOINTS = "checkpoints"
"""Selects the function's own `jax.checkpoint` regions as blocks."""

SCANS = "scans"
"""Selects the bodies of the function's outermost scans as blocks."""

PARTS = frozenset({CHECKPOINTS, SCANS})
"""The blocks that are parts of a traced function, and no calls."""


def name_of(block: Block) -> str:
    """The name of a block in messages."""
    return block if isinstance(block, str) else block.__qualname__.rpartition("<locals>.")[2]


@dataclass(frozen=True)
class Marked:
    """A stand-in for a block's policy: a block that is traced under a `Marked` becomes a mark instead of a checkpoint.

    Attributes:
      block: the class, function or glob that the policy was given for.
      policy: the policy, or the policies by layer, that the block gets later.
      keeps: whether the model's own checkpoints around the block are kept.
    """

    block: Block
    policy: Policy | JaxPolicy | LayerPolicies
    keeps: bool = False


@dataclass(frozen=True)
class Batch:
    """A `vmap` around a block: which operands and outputs it maps (on their leading axis), its size and its axis name."""

    in_axes: tuple[int | None, ...]
    out_axes: tuple[int | None, ...]
    size: int
    name: Hashable
    spmd_name: Hashable


@dataclass(frozen=True)
class Mark:
    """A block that waits for its policy.

    Attributes:
      jaxpr: the block as a closed jaxpr, without the `vmap`s around it.
      marked: the class, function or glob that selected the block, and the policy.
      path: the block's module path.
      inputs: for each input of `jaxpr`, whether `@inputs` selects it.
      made: whether the block's parameters exist already; False while a Linen module is initialised.
      batches: the `vmap`s around the block, the innermost first.
    """

    jaxpr: ClosedJaxpr
    marked: Marked
    path: str
    inputs: tuple[bool, ...]
    made: bool
    batches: tuple[Batch, ...] = ()

    def __hash__(self) -> int:
        # `self` holds the jaxpr as long as the hash is used.
        return hash((id(self.jaxpr), self.marked, self.path))


def _evaluate(*values: Any, jaxpr: ClosedJaxpr, mark: Mark) -> list[Any]:
    return list(compat.jaxpr_function(jaxpr)(*values))


# The equation's `jaxpr` is the block under its `vmap`s. Evaluating the equation evaluates this jaxpr, without a policy.
mark_p = compat.new_primitive("remat_jax_mark", _evaluate)


def bind_mark(mark: Mark, values: Sequence[Any]) -> list[Any]:
    """The outputs of a mark that is called with `values`."""
    return list(mark_p.bind(*values, jaxpr=mark.jaxpr, mark=mark))


def mark_of(eqn: JaxprEqn) -> Mark | None:
    """The mark of an equation; None if the equation is no mark."""
    return eqn.params["mark"] if eqn.primitive is mark_p else None


def vmapped(function: Callable[..., Any], batch: Batch, size: int) -> Callable[..., list[Any]]:
    """`jax.vmap` of `function` with the axes and names of `batch`. Only the first `size` operands are mapped."""

    def run(*operands: Any) -> list[Any]:
        in_axes = batch.in_axes + (None,) * (len(operands) - size)
        named = {"axis_size": batch.size, "axis_name": batch.name, "spmd_axis_name": batch.spmd_name}
        return list(jax.vmap(lambda *args: tuple(function(*args)), in_axes, batch.out_axes, **named)(*operands))

    return run


def _abstract(*_: Any, jaxpr: ClosedJaxpr, mark: Mark) -> tuple[list[Any], Any]:
    return list(jaxpr.out_avals), jaxpr.effects


def _batch(
    axis: Any, args: Sequence[Any], axes: Sequence[int | None], *, jaxpr: ClosedJaxpr, mark: Mark
) -> tuple[list[Any], list[int | None]]:
    batched, moved, out_axes = compat.batched(jaxpr, axis, args, axes)
    in_axes = tuple(None if dim is None else 0 for dim in axes)
    batch = Batch(in_axes, tuple(out_axes), axis.size, axis.name, axis.spmd_name)
    outputs = mark_p.bind(*moved, jaxpr=batched, mark=replace(mark, batches=(*mark.batches, batch)))
    return list(outputs), out_axes


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], *, jaxpr: ClosedJaxpr, mark: Mark) -> NoReturn:
    raise UnsupportedError(
        f"block={name_of(mark.marked.block)}: policies by layer must be set before the block is differentiated. They are for "
        "what grad, value_and_grad, vjp, jvp and linearize differentiate, but not for a custom_root, nor for the rule of a "
        "custom_vjp or custom_jvp, nor for a function with a gradient inside that is differentiated outside of "
        "checkpoint_blocks. Give checkpoint_blocks the whole train step, or give this block one policy."
    )


def _transpose(cotangents: Sequence[Any], *operands: Any, jaxpr: ClosedJaxpr, mark: Mark) -> list[Any]:
    # JAX transposes the linear function of a linear solver while it traces the solver.
    places = [place for place, operand in enumerate(operands) if rules.is_undefined_primal(operand)]
    linear = of_some(compat.jaxpr_function(jaxpr), operands, places)
    transposed = jax.linear_transpose(linear, *(operands[place].aval for place in places))
    return filled([None] * len(operands), places, transposed(list(map(rules.instantiate_zeros, cotangents))))


mark_p.def_effectful_abstract_eval(_abstract)
rules.primitive_transposes[mark_p] = _transpose
rules.primitive_jvps[mark_p] = _jvp
rules.fancy_primitive_batchers[mark_p] = _batch
