"""Reading a row from its stack where the row is used, so that neither the row nor a slice of the stack is kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core as jex
from jax.interpreters import ad, batching, mlir


@dataclass(frozen=True)
class StackRow:
    """The stack and the index from which a value can be read again.

    Attributes:
      stack: the stack, which is alive in any case. Gradients flow through the row, not through the stack.
      index: the index of the row.
    """

    stack: Any
    index: Any


# `(row, stack, index)` → the row, read from the stack. Its derivatives, of any order, are with respect to `row`. So the
# gradients of a scan's rows are stacked as in any scan, instead of added in every iteration to an array as large as the stack.
# The value of `row` is not used: the compiler drops its computation as dead code.
read_row_p = jex.Primitive("read_row")


def read_row(row: Any, stack: Any, index: Any) -> Any:
    """`stack[index]`, differentiated as `row`."""
    return read_row_p.bind(row, stack, index)


def _read(row: Any, stack: Any, index: Any) -> Any:
    return jax.lax.dynamic_index_in_dim(stack, index, keepdims=False, allow_negative_indices=False)


def _jvp(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
    return read_row_p.bind(*primals), tangents[0]


def _batch(args: Sequence[Any], dims: Sequence[Any]) -> tuple[Any, Any]:
    row, stack, index = args
    if dims[1] is None or dims[2] is not None:
        # `row` itself has the right value.
        return row, dims[0]
    size = stack.shape[dims[1]]
    row = jnp.broadcast_to(row, (size, *row.shape)) if dims[0] is None else jnp.moveaxis(row, dims[0], 0)
    return read_row(row, jnp.moveaxis(stack, dims[1], 1), index), 0


read_row_p.def_impl(_read)
read_row_p.to_lojax = _read
read_row_p.def_abstract_eval(lambda row, stack, index: row)
mlir.register_lowering(read_row_p, mlir.lower_fun(_read, multiple_results=False))
ad.primitive_jvps[read_row_p] = _jvp
batching.primitive_batchers[read_row_p] = _batch
