"""Runs the output head of a traced loss in chunks of the tokens, for a model that is not edited.

    loss = f(g(hidden W, labels))          g per token, f reads sums over the tokens and small arrays per token
    loss = f(Σᵢ checkpoint(g)(hiddenᵢ W, labelsᵢ))

The loss stays the same function. `head_region` finds g in the traced loss. Each chunk is a checkpoint inside a scan, as in
`in_chunks`: its logits exist only while it runs forward or backward, and its backward pass computes them again.
"""

from __future__ import annotations

import functools
import heapq
import itertools
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import jax
from jax.extend.core import ClosedJaxpr

from remat_jax import compat
from remat_jax.core.softmax_products import TracedProduct, traced_products
from remat_jax.core.walk import of_arrays
from remat_jax.errors import ArgumentError, PlanningError
from remat_jax.train.head_chunks import ChunkedHead, Chunks
from remat_jax.train.head_program import Operation, Value, program_of, read
from remat_jax.train.head_region import NotPerToken
from remat_jax.train.parts import check_count

P = ParamSpec("P")
R = TypeVar("R")

CHUNKS = 8


def chunk_head(loss: Callable[P, R], *example_args: Any, chunks: int = CHUNKS) -> Callable[P, R]:
    """`loss` with every output head, and what it computes from the logits per token, in `chunks` chunks of the tokens.

    The result is the same function with the same gradients, up to the order of additions. It is traced at each call, so it
    takes arguments of any shape that `loss` takes. Only 1/`chunks` of the logits, and of their gradient, is in memory at a
    time. The head's matmul runs once more, in the backward pass. Sums over tokens, and the gradients of the head's weights, are
    added over the chunks in at least float32. If the chunks do not divide the tokens, the last chunk is filled up with copies
    of the last token, which are multiplied by zero.

    Args:
      loss: a function of pytrees of arrays. It may return anything but the logits.
      example_args: arguments (arrays or `jax.ShapeDtypeStruct`) with which to check the loss now, and not at the first call.
      chunks: the number of chunks; at most the number of tokens along the axis that is cut.

    Raises:
      ArgumentError: `loss` is not a function, or `chunks` is not a positive integer.
      PlanningError: the loss has no output head outside loops, or an operation that combines tokens reads the logits; the
        message names it.

    >>> import jax.numpy as jnp, optax
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

    def __init__(self, jaxpr: ClosedJaxpr, chunks: int) -> None:
        jaxpr = compat.dce(jaxpr)
        products = {id(product.eqn) for product in traced_products(jaxpr) if _may_be_head(product)}
        self.program = program_of(jaxpr, products)
        self.heads = {node: self._dependents(node) for node in self.program.nodes if id(node.eqn) in products}
        self.regions: list[Chunks] = []
        refused: list[PlanningError] = []
        for head in sorted(self.heads, key=lambda node: -node.results[0].aval.size):
            if any(head in region.heads for region in self.regions):
                continue
            try:
                self.regions.append(self._region(head, chunks))
            except PlanningError as error:
                refused.append(error)
        if not self.regions:
            raise refused[0] if refused else PlanningError(_NO_HEAD)
        for region, other in itertools.permutations(self.regions, 2):
            for value in region.region.cuts:
                if value in other.values:
                    region.region.emit(value, f"another head reads logits of {region.heads[0]}")

    def _dependents(self, head: Operation) -> set[Value]:
        """The values that depend on the logits of `head`."""
        values = set(head.results)
        for node in self.program.nodes:
            if not values.isdisjoint(node.values):
                values.update(node.results)
        return values

    def _region(self, head: Operation, chunks: int) -> Chunks:
        """The region of a head, along the last axis of the logits that has enough tokens."""
        taken = {node for region in self.regions for node in region.forward}
        found, refused = [], []
        for dim in _token_axes(head):
            try:
                found.append(self._joined(head, dim, chunks, taken))
            except NotPerToken as error:
                refused.append(error)
            if found and found[-1].length >= chunks:
                break
        if not found:
            raise PlanningError(f"the head {head} cannot run in chunks: {refused[0]}")
        return max(found, key=lambda region: min(region.length, chunks))

    def _joined(self, head: Operation, dim: int, chunks: int, taken: set[Operation]) -> Chunks:
        """The region of a head, and of the heads whose logits it reads, such as those of a teacher."""
        heads, length = [head], head.results[0].aval.shape[dim]
        region = Chunks(self.program, heads, dim, chunks, taken)
        while True:
            read = region.read_per_token
            others = [
                other for other, dependents in self.heads.items() if other not in heads and not read.isdisjoint(dependents)
            ]
            others = [other for other in others if other.results[0].aval.shape[dim : dim + 1] == (length,)]
            if not others:
                return region
            heads = [*heads, *others]
            try:
                region = Chunks(self.program, heads, dim, chunks, taken)
            except NotPerToken:
                return region

    def run(self, args: Sequence[Any]) -> list[Any]:
        """The outputs of the function for `args`."""
        env: dict[Any, Any] = {**self.program.constants, **dict(zip(self.program.inputs, args, strict=True))}
        for unit in self._ordered():
            if isinstance(unit, Chunks):
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
        needed, waiting = set(), [unit for unit in units if isinstance(unit, Operation) and unit.eqn.effects]
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


# --- heads -------------------------------------------------------------------------------------------------------------


def _may_be_head(product: TracedProduct) -> bool:
    return bool(product.classes) and not (product.in_loop or product.mixed or product.is_batched)


def _token_axes(head: Operation) -> list[int]:
    """The axes of the logits that come from the operand with more of them, the last first; then the others."""
    contracted, _ = head.eqn.params["dimension_numbers"]
    ranks = [operand.aval.ndim - len(contracted[side]) for side, operand in enumerate(head.operands)]
    left, right = range(ranks[0]), range(ranks[0], sum(ranks))
    first, second = (left, right) if len(left) >= len(right) else (right, left)
    return [*first[::-1], *second[::-1]]


_NO_HEAD = "loss: it has no output head outside loops (a matmul whose results a softmax reads), so nothing can run in chunks"
