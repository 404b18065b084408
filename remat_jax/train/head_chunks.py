"""Evaluates the region of an output head in chunks of the tokens: a scan whose body is a checkpoint."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from remat_jax import compat
from remat_jax.core.axes import AxisPlace, passage
from remat_jax.cost.cost import Cost, jaxpr_cost
from remat_jax.train import sums
from remat_jax.train.head_program import Operation, Program, Value
from remat_jax.train.head_region import Key, RegionStep, TokenRegion
from remat_jax.train.head_rules import step_of_call
from remat_jax.train.parts import cut_axis


@dataclass(frozen=True)
class ChunkedHead:
    """An output head that runs in chunks.

    Attributes:
      shape: the shape of the logits, on all devices together.
      dtype: the dtype in which the matmul returns them.
      source: the user's line of the matmul.
      axis: the axis of the logits along which the chunks are cut.
      chunks: the number of chunks.
      logits_bytes: the bytes of all logits, in the widest dtype in which the loss reads them.
      recomputed: the cost of computing the logits, and what the loss computes from them, once more.
    """

    shape: tuple[int, ...]
    dtype: str
    source: str
    axis: int
    chunks: int
    logits_bytes: int
    recomputed: Cost


class Chunks:
    """Heads and what the loss computes from their logits per token, in chunks along the dimension `dim` of the logits."""

    def __init__(self, program: Program, heads: list[Operation], dim: int, chunks: int, taken: set[Operation]) -> None:
        logits = heads[0].results[0].aval
        classes = max([1, *(size for each, size in enumerate(logits.shape) if each != dim)])
        self.heads, self.dim = heads, dim
        large = max(logits.size // classes, logits.size // 8)
        given = {head.results[0]: AxisPlace(dim) for head in heads}
        self.region = TokenRegion(program, given, logits.shape[dim], large=large, taken=taken, calls=step_of_call)
        passages = [passage(head.eqn, 0, AxisPlace(dim), logits.shape[dim], of_result=True) for head in heads]
        self.region.find(
            [RegionStep(head, through) for head, through in zip(heads, passages, strict=True) if through is not None]
        )
        self.forward = {step.node for step in self.region.steps.values() if self._is_own(step.node)}
        self.length = self.region.lengths[-1]
        self.size = math.ceil(self.length / min(chunks, self.length))
        """The number of tokens (along the axis) in a chunk."""
        self.chunks = math.ceil(self.length / self.size)

    def _is_own(self, node: Operation) -> bool:
        return any(value in self.region.cuts or value in self.region.sums for value in node.results)

    @property
    def results(self) -> list[Value]:
        """What other operations may read: sums over the tokens, and small arrays per token."""
        return [*self.region.sums, *self.region.emitted]

    @property
    def values(self) -> list[Value]:
        """What the region reads."""
        return list(dict.fromkeys(value for value, _ in self.region.frontier))

    @property
    def read_per_token(self) -> set[Value]:
        """The values with a token axis that the region reads or computes."""
        steps = ((step.node.results, step.through.results) for step in self.region.steps.values())
        keys = [*self.region.frontier, *(key for pair in steps for key in zip(*pair, strict=True))]
        return {value for value, cut in keys if cut is not None}

    def facts(self) -> ChunkedHead:
        """The figures of the heads."""
        logits = self.heads[0].results[0].aval
        made = [value.aval for value in self.region.cuts if jnp.issubdtype(value.aval.dtype, jnp.floating)]
        widest = max(jnp.dtype(aval.dtype).itemsize for aval in made if 2 * aval.size >= logits.size)
        types = [[_struct(value, cut, self) for value, cut in keys] for keys in (self._cut, self._whole)]
        one = jaxpr_cost(jax.make_jaxpr(lambda cut, whole: self._one_chunk(cut, whole, None))(*types))
        source = compat.source_line(self.heads[0].eqn)
        size = sum(head.results[0].aval.size for head in self.heads) * self.length // self.region.lengths[0] * widest
        return ChunkedHead(logits.shape, str(logits.dtype), source, self.dim, self.chunks, size, one.times(self.chunks))

    @property
    def _cut(self) -> list[tuple[Value, AxisPlace]]:
        return [(value, cut) for value, cut in self.region.frontier if cut is not None]

    @property
    def _whole(self) -> list[Key]:
        return [(value, None) for value, cut in self.region.frontier if cut is None]

    def _one_chunk(self, cut: Sequence[Any], whole: Sequence[Any], valid: Any) -> tuple[list[Any], list[Any]]:
        """The sums over the tokens of one chunk, and its small arrays per token."""
        env: dict[Key, Any] = dict(zip([*self._cut, *self._whole], [*cut, *whole], strict=True))
        self.region.run(env, self.size, valid)
        totals = [env[value, None] for value in self.region.sums]
        return [total.astype(sums.wide(total.dtype)) for total in totals], [env[key] for key in self.region.emitted.items()]

    def run(self, env: dict[Any, Any]) -> dict[Any, Any]:
        """Evaluate the region; `env` has the values that it reads."""
        padding = self.chunks * self.size - self.length
        parts = [self._parts(env[value], cut) for value, cut in self._cut]
        whole = [env[value] for value, _ in self._whole]
        gathered = list(map(sums.companion, whole))
        exists = jnp.arange(self.chunks * self.size).reshape(self.size, self.chunks).T < self.length if padding else None

        def one_chunk(chunk: Any, valid: Any) -> Any:
            cut = [_merged(part, cut) for part, (_, cut) in zip(chunk, self._cut, strict=True)]
            return self._one_chunk(cut, list(map(sums.with_companion, whole, gathered)), valid)

        with compat.eqn_context(self.heads[0].eqn):
            body = compat.chunk_checkpoint(one_chunk)
            _, (totals, rows) = jax.lax.scan(lambda _, chunk: (None, body(*chunk)), None, (parts, exists))
        results: dict[Any, Any] = {}
        for value, total in zip(self.region.sums, totals, strict=True):
            results[value] = jnp.sum(total, 0).astype(value.aval.dtype)
        for (value, cut), row in zip(self.region.emitted.items(), rows, strict=True):
            results[value] = self._whole_again(row, cut)
        return results

    def _parts(self, array: Any, cut: AxisPlace) -> Any:
        """`array` in chunks: a new leading axis of chunks. Chunk i has the positions i, i + n, … of the token axis."""
        shape, dim = jnp.shape(array), cut.dim
        if cut.outer * cut.inner > 1:
            array = jnp.reshape(array, (*shape[:dim], cut.outer, -1, cut.inner, *shape[dim + 1 :]))
            dim += 1
        if cut.stage < len(self.region.lengths) - 1:
            start, limit, stride = self.region.window
            array = jax.lax.slice_in_dim(array, start, limit, stride, dim)
        padding = self.chunks * self.size - self.length
        if padding:
            last = jax.lax.slice_in_dim(array, self.length - 1, self.length, axis=dim)
            array = jax.lax.concatenate([array, *[last] * padding], dim)
        return jnp.moveaxis(cut_axis(array, self.chunks, dim), dim + 1, 0)

    def _whole_again(self, rows: Any, cut: AxisPlace) -> Any:
        """The array of which `rows` are the chunks, with a leading axis of chunks."""
        shape, dim = rows.shape[1:], cut.dim
        rows = rows.reshape(self.chunks, *shape[:dim], cut.outer, self.size, cut.inner, *shape[dim + 1 :])
        array = jnp.moveaxis(rows, 0, dim + 2)
        array = array.reshape(*shape[:dim], cut.outer, self.chunks * self.size, cut.inner, *shape[dim + 1 :])
        array = jax.lax.slice_in_dim(array, 0, self.length, axis=dim + 1)
        return array.reshape(*shape[:dim], cut.size(self.length), *shape[dim + 1 :])


def _merged(part: Any, cut: AxisPlace) -> Any:
    if cut.outer * cut.inner == 1:
        return part
    return part.reshape(*part.shape[: cut.dim], -1, *part.shape[cut.dim + 3 :])


def _struct(value: Value, cut: AxisPlace | None, chunks: Chunks) -> Any:
    shape = list(value.aval.shape)
    if cut is not None:
        shape[cut.dim] = cut.size(chunks.size)
    return jax.ShapeDtypeStruct(tuple(shape), value.aval.dtype)
