"""Runs the output head of a traced loss in chunks of the tokens, for a model that is not edited. The loss stays the same function.

    loss = f(g(hidden W, labels))          g per token, f reads sums over the tokens and small arrays per token
    loss = f(Σᵢ checkpoint(g)(hiddenᵢ W, labelsᵢ))

`head_region` finds g in the traced loss. Each chunk is a checkpoint inside a scan, as in `in_chunks`: its logits exist only while
it runs forward or backward, and its backward pass computes them again.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp

from remat_jax import compat
from remat_jax.core.axes import Cut, passage
from remat_jax.core.softmax_products import TracedProduct, traced_products
from remat_jax.core.walk import of_arrays
from remat_jax.cost.cost import Cost, jaxpr_cost
from remat_jax.errors import ArgumentError, PlanningError
from remat_jax.train import sums
from remat_jax.train.head_program import Node, Program, Value, program_of, read
from remat_jax.train.head_region import Key, NotPerToken, Region, Step
from remat_jax.train.parts import check_count, cut_axis

P = ParamSpec("P")
R = TypeVar("R")

CHUNKS = 8


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

    @property
    def freed_bytes(self) -> int:
        """The bytes of logits that are no longer in memory. Their gradient, if it is an array of its own, frees as many."""
        return self.logits_bytes - math.ceil(self.logits_bytes / self.chunks)


def chunk_head(loss: Callable[P, R], *example_args: Any, chunks: int = CHUNKS) -> Callable[P, R]:
    """`loss` with every output head, and what it computes from the logits per token, in `chunks` chunks of the tokens.

    The result is the same function with the same gradients, up to the order of additions. It is traced at each call, so it takes
    arguments of any shape that `loss` takes. Only 1/`chunks` of the logits, and of their gradient, is in memory at a time. The
    head's matmul runs once more, in the backward pass. Sums over tokens, and the gradients of the head's weights, are added over
    the chunks in at least float32. If the chunks do not divide the tokens, the last chunk is filled up with copies of the last
    token, which are multiplied by zero.

    Args:
      loss: a function of pytrees of arrays. It may return anything but the logits.
      example_args: arguments (arrays or `jax.ShapeDtypeStruct`) with which to check the loss now, and not at the first call.
      chunks: the number of chunks; at most the number of tokens along the axis that is cut.

    Raises:
      ArgumentError: `loss` is not a function, or `chunks` is not a positive integer.
      PlanningError: the loss has no output head outside loops, or an operation that combines tokens reads the logits; the
        message names it.

    >>> import optax
    >>> def loss(w, x, labels):
    ...     return optax.softmax_cross_entropy_with_integer_labels(x @ w, labels).mean()
    >>> w, x, labels = jnp.ones((4, 50)), jnp.ones((2, 16, 4)), jnp.zeros((2, 16), int)
    >>> chunked = chunk_head(loss, w, x, labels)
    >>> bool(jnp.allclose(jax.grad(chunked)(w, x, labels), jax.grad(loss)(w, x, labels)))
    True
    """
    if not callable(loss):
        raise ArgumentError(f"loss={loss!r}: expected a function, such as loss(params, *batch)")
    check_count(chunks, "chunks")
    if example_args:
        chunked_heads(loss, *example_args, chunks=chunks)

    @functools.wraps(loss)
    def chunked(*args: P.args, **kwargs: P.kwargs) -> R:
        of_leaves, arrays = of_arrays(loss, args, kwargs)
        jaxpr, shape = jax.make_jaxpr(of_leaves, return_shape=True)(*arrays)
        outputs = _Plan(jaxpr, chunks).run(arrays)
        return jax.tree.unflatten(jax.tree.structure(shape), outputs)

    return chunked


def chunked_heads(loss: Callable[..., Any], *args: Any, chunks: int = CHUNKS) -> tuple[ChunkedHead, ...]:
    """The heads that `chunk_head` runs in chunks, the largest first. Nothing is run; raises the same errors."""
    of_leaves, arrays = of_arrays(loss, args, {})
    return tuple(region.facts() for region in _Plan(jax.make_jaxpr(of_leaves)(*arrays), chunks).regions)


class _Plan:
    """The regions of a closed jaxpr that run in chunks, and the order of all operations."""

    def __init__(self, jaxpr: Any, chunks: int) -> None:
        jaxpr = compat.dce(jaxpr)
        products = {id(product.eqn): product for product in traced_products(jaxpr) if _may_be_head(product)}
        self.program = program_of(jaxpr, products)
        heads = [node for node in self.program.nodes if id(node.eqn) in products]
        self.regions: list[_Chunks] = []
        refused: list[PlanningError] = []
        for head in sorted(heads, key=lambda node: -node.results[0].aval.size):
            try:
                region = self._region(head, chunks)
            except PlanningError as error:
                refused.append(error)
            else:
                self.regions += [region] if region is not None else []
        if not self.regions:
            raise refused[0] if refused else PlanningError(_NO_HEAD)
        for region, other in itertools.permutations(self.regions, 2):
            for value in other.values:
                if value in region.region.cuts:
                    region.region.emit(value, f"another head reads {value.aval.dtype}{list(value.aval.shape)} of {region.head}")

    def _region(self, head: Node, chunks: int) -> _Chunks | None:
        """The region of a head, along the last axis of the logits that has enough tokens; None if other regions contain it."""
        taken = {step.node for region in self.regions for step in region.region.steps.values()}
        readers = [node for node in self.program.nodes if head.results[0] in node.values]
        if head in taken and taken.issuperset(readers):
            return None
        of_others = {node for region in self.regions for node in region.forward}
        found, refused = [], []
        for dim in _token_axes(head):
            try:
                found.append(_Chunks(self.program, head, dim, chunks, of_others))
            except NotPerToken as error:
                refused.append(error)
            if found and found[-1].length >= chunks:
                break
        if not found:
            raise PlanningError(
                f"the head {head} cannot run in chunks: {refused[0] if refused else 'its logits have one axis'}"
            )
        return max(found, key=lambda region: min(region.length, chunks))

    def run(self, args: Sequence[Any]) -> list[Any]:
        """The outputs of the function for `args`."""
        env: dict[Any, Any] = {**self.program.constants, **dict(zip(self.program.inputs, args, strict=True))}
        for unit in self._ordered():
            if isinstance(unit, _Chunks):
                env.update(unit.run(env))
            else:
                env.update(zip(unit.results, unit.run([read(each, env) for each in unit.operands]), strict=True))
        return [read(each, env) for each in self.program.outputs]

    def _ordered(self) -> list[Any]:
        """All nodes and regions that the outputs need, each after what it reads, otherwise in the order of the program."""
        place = {node: number for number, node in enumerate(self.program.nodes)}
        inside = {node for region in self.regions for node in region.forward}
        units: list[Any] = [node for node in self.program.nodes if node not in inside]
        order = {unit: place[unit] for unit in units}
        for region in self.regions:
            order[region] = max(place[node] for node in region.forward)
        units += self.regions
        maker = {value: unit for unit in units for value in unit.results}
        needed, waiting = set(), [unit for unit in units if isinstance(unit, Node) and unit.eqn.effects]
        waiting += [maker[value] for value in self.program.outputs if isinstance(value, Value) and value in maker]
        while waiting:
            unit = waiting.pop()
            if unit not in needed:
                needed.add(unit)
                waiting += [maker[value] for value in unit.values if value in maker]
        readers: dict[Any, list[Any]] = {unit: [] for unit in needed}
        missing = {}
        for unit in needed:
            before = {maker[value] for value in unit.values if value in maker}
            missing[unit] = len(before)
            for other in before:
                readers[other].append(unit)
        ready = [(order[unit], id(unit), unit) for unit in needed if not missing[unit]]
        heapq.heapify(ready)
        ordered = []
        while ready:
            unit = heapq.heappop(ready)[2]
            ordered.append(unit)
            for other in readers[unit]:
                missing[other] -= 1
                if not missing[other]:
                    heapq.heappush(ready, (order[other], id(other), other))
        if len(ordered) < len(needed):
            raise PlanningError("two heads of the loss read each other's results, so neither can run in chunks")
        return ordered


class _Chunks:
    """A head and what the loss computes from its logits per token, in chunks along the dimension `dim` of the logits."""

    def __init__(self, program: Program, head: Node, dim: int, chunks: int, taken: set[Node]) -> None:
        logits = head.results[0]
        classes = max(size for each, size in enumerate(logits.aval.shape) if each != dim)
        self.head, self.dim = head, dim
        large = max(logits.aval.size // classes, logits.aval.size // 8)
        self.region = Region(program, {logits: Cut(dim)}, logits.aval.shape[dim], large=large, taken=taken)
        through = passage(head.eqn, 0, Cut(dim), logits.aval.shape[dim], of_result=True)
        assert through is not None
        self.region.find(Step(head, through))
        self.forward = {step.node for step in self.region.steps.values() if not step.node.results or self._is_own(step.node)}
        self.length = self.region.lengths[-1]
        self.size = math.ceil(self.length / min(chunks, self.length))
        """The number of tokens (along the axis) in a chunk."""
        self.chunks = math.ceil(self.length / self.size)

    def _is_own(self, node: Node) -> bool:
        return any(value in self.region.cuts or value in self.region.sums for value in node.results)

    @property
    def results(self) -> list[Value]:
        """What other operations may read: sums over the tokens, and small arrays per token."""
        return [*self.region.sums, *self.region.emitted]

    @property
    def values(self) -> list[Value]:
        """What the region reads."""
        return list(dict.fromkeys(value for value, _ in self.region.frontier))

    def facts(self) -> ChunkedHead:
        logits = self.head.results[0].aval
        made = [value.aval for value in self.region.cuts if jnp.issubdtype(value.aval.dtype, jnp.floating)]
        widest = max(compat.itemsize(aval.dtype) for aval in made if 2 * aval.size >= logits.size)
        types = [[_struct(value, cut, self) for value, cut in keys] for keys in (self._cut, self._whole)]
        one = jaxpr_cost(jax.make_jaxpr(lambda cut, whole: self._one_chunk(cut, whole, None))(*types))
        source = compat.source_line(self.head.eqn)
        size = logits.size * self.length // self.region.lengths[0] * widest
        return ChunkedHead(logits.shape, str(logits.dtype), source, self.dim, self.chunks, size, one.times(self.chunks))

    @property
    def _cut(self) -> list[Key]:
        return [(value, cut) for value, cut in self.region.frontier if cut is not None]

    @property
    def _whole(self) -> list[Key]:
        return [(value, None) for value, cut in self.region.frontier if cut is None]

    def _one_chunk(self, cut: Sequence[Any], whole: Sequence[Any], valid: Any) -> tuple[list[Any], list[Any]]:
        """The sums over the tokens of one chunk, and its small arrays per token."""
        env = {**dict(zip(self._cut, cut, strict=True)), **dict(zip(self._whole, whole, strict=True))}
        self.region.run(env, self.size, valid)
        totals = [env[value, None] for value in self.region.sums]
        return [total.astype(sums.wide(total.dtype)) for total in totals], [env[key] for key in self.region.emitted.items()]

    def run(self, env: dict[Any, Any]) -> dict[Any, Any]:
        """Evaluate the region; `env` has the values that it reads."""
        padding = self.chunks * self.size - self.length
        parts = [self._parts(env[value], cut) for value, cut in self._cut]
        whole = [env[value] for value, _ in self._whole]
        gathered = [_gathering(value) for value in whole]
        exists = jnp.arange(self.chunks * self.size).reshape(self.size, self.chunks).T < self.length if padding else None

        def one_chunk(chunk: Any, valid: Any) -> Any:
            cut = [_merged(part, cut) for part, (_, cut) in zip(chunk, self._cut, strict=True)]
            return self._one_chunk(cut, [_gathered(*pair) for pair in zip(whole, gathered, strict=True)], valid)

        with compat.eqn_context(self.head.eqn):
            body = compat.chunk_checkpoint(one_chunk)
            _, (totals, rows) = jax.lax.scan(lambda _, chunk: (None, body(*chunk)), None, (parts, exists))
        results: dict[Any, Any] = {}
        for value, total in zip(self.region.sums, totals, strict=True):
            results[value] = jnp.sum(total, 0).astype(value.aval.dtype)
        for (value, cut), row in zip(self.region.emitted.items(), rows, strict=True):
            results[value] = self._whole_again(row, cut)
        return results

    def _parts(self, array: Any, cut: Cut) -> Any:
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

    def _whole_again(self, rows: Any, cut: Cut) -> Any:
        """The array of which `rows` are the chunks, with a leading axis of chunks."""
        shape, dim = rows.shape[1:], cut.dim
        rows = rows.reshape(self.chunks, *shape[:dim], cut.outer, self.size, cut.inner, *shape[dim + 1 :])
        array = jnp.moveaxis(rows, 0, dim + 2)
        array = array.reshape(*shape[:dim], cut.outer, self.chunks * self.size, cut.inner, *shape[dim + 1 :])
        array = jax.lax.slice_in_dim(array, 0, self.length, axis=dim + 1)
        return array.reshape(*shape[:dim], cut.size(self.length), *shape[dim + 1 :])


def _merged(part: Any, cut: Cut) -> Any:
    if cut.outer * cut.inner == 1:
        return part
    return part.reshape(*part.shape[: cut.dim], -1, *part.shape[cut.dim + 3 :])


def _struct(value: Value, cut: Cut | None, chunks: _Chunks) -> Any:
    shape = list(value.aval.shape)
    if cut is not None:
        shape[cut.dim] = cut.size(chunks.size)
    return jax.ShapeDtypeStruct(tuple(shape), value.aval.dtype)


# --- gradients of arrays that all chunks read --------------------------------------------------------------------------


def _gathering(value: Any) -> Any:
    """For a float narrower than float32: zeros in float32, in which the gradients of the chunks are added up; else None.

    The zeros are a function of `value` with the derivative of a cast, and `_gathered` reads them.
    """
    dtype = jnp.result_type(value)
    if not jnp.issubdtype(dtype, jnp.floating) or sums.wide(dtype) == dtype:
        return None
    gathering = jax.custom_jvp(lambda value: jnp.zeros(value.shape, sums.wide(value.dtype)))
    gathering.defjvp(lambda primals, tangents: (gathering(*primals), tangents[0].astype(sums.wide(dtype))))
    return gathering(value)


def _gathered(value: Any, zeros: Any) -> Any:
    """`value`, whose gradient flows to `zeros` instead."""
    if zeros is None:
        return value
    gathered = jax.custom_jvp(lambda value, _: value)
    gathered.defjvp(lambda primals, tangents: (primals[0], tangents[1].astype(primals[0].dtype)))
    return gathered(value, zeros)


# --- heads -------------------------------------------------------------------------------------------------------------


def _may_be_head(product: TracedProduct) -> bool:
    return bool(product.classes) and not product.in_loop and not product.mixed


def _token_axes(head: Node) -> list[int]:
    """The axes of the logits that come from the operand with more of them, the last first; then the others."""
    contracted, batch = head.eqn.params["dimension_numbers"]
    ranks = [operand.aval.ndim - len(contracted[side]) - len(batch[side]) for side, operand in enumerate(head.operands)]
    batched = list(range(len(batch[0])))
    left = [len(batched) + each for each in range(ranks[0])]
    right = [len(batched) + ranks[0] + each for each in range(ranks[1])]
    first, second = (left, right) if len(left) >= len(right) else (right, left)
    return [*first[::-1], *second[::-1], *batched[::-1]]


_NO_HEAD = "loss: it has no output head outside loops (a matmul whose results a softmax reads), so nothing can run in chunks"
