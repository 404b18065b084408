"""Finds the marks of a traced function, and counts how often each block runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from jax.extend.core import ClosedJaxpr, JaxprEqn

from remat_jax.core.marks import Block, Mark, mark_of, name_of
from remat_jax.core.walk import bodies, differentiated_bodies, equations
from remat_jax.errors import BlockError, UnsupportedError
from remat_jax.policy import LayerPolicies

Positions = Counter[Block]
"""For each block: the number of its calls before the current equation."""


def checked_counts(jaxpr: ClosedJaxpr, blocks: frozenset[Block]) -> Counter[Block]:
    """How often each of `blocks` runs in one evaluation of the closed `jaxpr`, checked against its policies.

    Raises:
      BlockError: a block is called more or less often than it has policies.
      UnsupportedError: a block with policies by layer is in a `while` loop.
    """
    for eqn in equations(jaxpr, differentiated_bodies):
        if eqn.primitive.name == "while":
            _refuse_while(eqn, blocks)
    counts = count(jaxpr, blocks)
    for marked in {mark.marked for mark in marks(jaxpr) if mark.marked.block in blocks}:
        if isinstance(marked.policy, LayerPolicies) and marked.policy.layers != counts[marked.block]:
            raise BlockError(_another_number(marked.block, marked.policy, counts[marked.block]))
    return counts


def _another_number(block: Block, policies: LayerPolicies, calls: int) -> str:
    times = "once" if calls == 1 else f"{calls} times"
    return (
        f"block={name_of(block)}: policy={str(policies)!r} has policies for {policies.layers} layers, but the block is called "
        f"{times}. Give policies for {calls} calls. Every call counts: if the model runs twice, each layer counts twice."
    )


def _refuse_while(eqn: JaxprEqn, blocks: frozenset[Block]) -> None:
    for mark in (mark for body in bodies(eqn) for mark in marks(body)):
        if mark.marked.block in blocks and isinstance(mark.marked.policy, LayerPolicies):
            raise UnsupportedError(
                f"block={name_of(mark.marked.block)}: it is called in a while loop, so the number of layers is unknown. Give "
                "it one policy, or call it in jax.lax.scan or in a fori_loop whose bounds are Python numbers."
            )


def marks(jaxpr: ClosedJaxpr) -> Iterator[Mark]:
    """Every mark in the closed `jaxpr` that JAX differentiates, at any depth, also inside other marks."""
    for eqn in jaxpr.jaxpr.eqns:
        mark = mark_of(eqn)
        if mark is not None:
            yield mark
            yield from marks(mark.jaxpr)
        else:
            for body in differentiated_bodies(eqn):
                yield from marks(body)


def count(jaxpr: ClosedJaxpr, blocks: frozenset[Block]) -> Counter[Block]:
    """How often each of `blocks` runs in one evaluation of the closed `jaxpr`. A `while` loop counts as one iteration."""
    total: Counter[Block] = Counter()
    for eqn in jaxpr.jaxpr.eqns:
        total.update(count_in(eqn, blocks))
    return total


def count_in(eqn: JaxprEqn, blocks: frozenset[Block]) -> Counter[Block]:
    """How often each of `blocks` runs in one equation. A block that is present but never runs has the count 0."""
    mark = mark_of(eqn)
    if mark is not None:
        return Counter([mark.marked.block] if mark.marked.block in blocks else []) + count(mark.jaxpr, blocks)
    inside = [count(body, blocks) for body in differentiated_bodies(eqn)]
    there = {block for counts in inside for block in counts}
    if eqn.primitive.name == "cond":
        # The branch with the most calls of a block counts. If a branch with fewer calls runs, some policies stay unused.
        return Counter({block: max(counts[block] for counts in inside) for block in there})
    rounds = eqn.params["length"] if eqn.primitive.name == "scan" else 1
    return Counter({block: rounds * sum(counts[block] for counts in inside) for block in there})
