"""Reading a row of a stack where it is used, so that no copy of it is kept: neither the row nor a slice of the stack."""

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
    """Where a value that is a row of a stack can be read again.

    Attributes:
      stack: the stack, which lives anyway; no gradient is taken of it.
      index: which row.
    """

    stack: Any
    index: Any


# `(row, stack, index)` → the row, read from the stack. Its derivative is that of `row`, to any order, so that the gradients of
# a scan's rows come out as those of any scan: stacked, and not added up in an array as large as the stack, round by round.
# The value of `row` is not used, and what made it is dead code for the compiler.
read_row_p = jex.Primitive("read_row")


def read_row(row: Any, stack: Any, index: Any) -> Any:
    """`row`, whose value is `stack[index]`, read there."""
    return read_row_p.bind(row, stack, index)


def _read(row: Any, stack: Any, index: Any) -> Any:
    return jax.lax.dynamic_index_in_dim(stack, index, keepdims=False, allow_negative_indices=False)


def _jvp(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
    return read_row_p.bind(*primals), tangents[0]


def _batch(args: Sequence[Any], dims: Sequence[Any]) -> tuple[Any, Any]:
    row, stack, index = args
    if dims[1] is None or dims[2] is not None:
        # The value of `row` is right as well.
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
