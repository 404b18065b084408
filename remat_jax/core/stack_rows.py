"""Reads a row from its stack where the row is used, so that neither the row nor a slice of the stack becomes a residual."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from remat_jax import compat
from remat_jax.compat import rules


@dataclass(frozen=True)
class StackRow:
    """The source of a row: the row is `stack[index]`. Gradients flow through the row's value, not through the stack."""

    stack: jax.Array
    index: jax.Array


def read_row(row: jax.Array, stack: jax.Array, index: jax.Array) -> jax.Array:
    """`stack[index]`, differentiated as `row`."""
    return read_row_p.bind(row, stack, index)


def _read(row: jax.Array, stack: jax.Array, index: jax.Array) -> jax.Array:
    return jax.lax.dynamic_index_in_dim(stack, index, keepdims=False, allow_negative_indices=False)


# read_row(row, stack, index) = stack[index], with the tangent of `row`. So a scan stacks the gradients of its rows, as usual;
# the derivative of `stack[index]` would add an array as large as the stack in every iteration. The value of `row` is not
# used, so the compiler drops its computation as dead code.
read_row_p = compat.new_primitive("read_row", _read, multiple_results=False)


def _jvp(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
    return read_row_p.bind(*primals), tangents[0]


def _batch(args: Sequence[Any], dims: Sequence[Any]) -> tuple[Any, Any]:
    row, stack, index = args
    if dims[1] is None or dims[2] is not None:
        # The batched `row` has the value `stack[index]`.
        return row, dims[0]
    size = stack.shape[dims[1]]
    row = jnp.broadcast_to(row, (size, *row.shape)) if dims[0] is None else jnp.moveaxis(row, dims[0], 0)
    return read_row(row, jnp.moveaxis(stack, dims[1], 1), index), 0


read_row_p.def_abstract_eval(lambda row, stack, index: row)
rules.primitive_jvps[read_row_p] = _jvp
rules.primitive_batchers[read_row_p] = _batch
