"""Policies by layer: a traced function with marks in it (`marking`), evaluated with the i-th block under the i-th policy.

A scan over blocks is cut into consecutive scans, one for each run of rounds that are under the same policies (`segments`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from remat_jax import compat
from remat_jax.apply.audit import Audit
from remat_jax.apply.layer_marks import Block, Positions, checked_counts, count, count_in, move
from remat_jax.apply.marking import Mark, bind_mark, mark_of, vmapped
from remat_jax.apply.overlap import unlinked
from remat_jax.apply.region import bind_block
from remat_jax.apply.segments import Cut, Segment, Spans, is_opened
from remat_jax.graph import Row, plan_block
from remat_jax.graph.walk import bodies, inner_jaxprs, interpret, retrace
from remat_jax.policy import LayerPolicies, is_off


def evaluate(jaxpr: Any, args: Sequence[Any], blocks: frozenset[Block], audit: Audit) -> tuple[list[Any], Counter[Block]]:
    """The closed `jaxpr` on `args` with every mark of `blocks` run under its policy, and how many blocks there were.

    Raises:
      BlockError: there are not as many blocks as layers.
      UnsupportedError: blocks that would need different policies stand in a `while` loop.
    """
    counts = checked_counts(jaxpr, blocks)
    around = _Surroundings(apart=compat.in_loop(around_gradient=False))
    return _Resolver(blocks, audit).run(jaxpr, args, dict.fromkeys(blocks, 0), around), counts


class _Surroundings:
    """Where an equation stands.

    Attributes:
      looped: whether in a loop.
      apart: whether in one that is a loop to the compiler too, which each pass has one of.
      rows: by the id of a value, the stack that it is a row of.
      spans: in a scan, by block, the layers of all its rounds.
      idle: whether in a loop of no rounds, where there are no layers that a block could be.
    """

    def __init__(
        self,
        *,
        looped: bool = False,
        apart: bool = False,
        rows: Mapping[int, Row] | None = None,
        spans: Spans | None = None,
        idle: bool = False,
    ) -> None:
        self.looped, self.apart, self.rows, self.spans, self.idle = looped, apart, rows or {}, spans or {}, idle

    def inside(self, *, looped: bool = False) -> _Surroundings:
        """Of what stands in the body of an equation, to which values have other ids."""
        return _Surroundings(looped=self.looped or looped, apart=self.apart or looped, spans=self.spans, idle=self.idle)


class _Resolver:
    """Sets the policies of marks in forward order."""

    def __init__(self, blocks: frozenset[Block], audit: Audit) -> None:
        self.blocks, self.audit = blocks, audit

    def run(self, jaxpr: Any, args: Sequence[Any], at: Positions, around: _Surroundings) -> list[Any]:
        """Evaluate `jaxpr`, whose first blocks have the positions `at`, which are moved on."""

        def visit(eqn: Any, inputs: list[Any]) -> list[Any] | None:
            mark, passed = mark_of(eqn), count_in(eqn, self.blocks)
            if not passed:
                return None
            if mark is not None:
                with compat.eqn_context(eqn):
                    return self._mark(mark, inputs, at, around)
            if eqn.primitive.name == "scan":
                outputs = self._scan(eqn, inputs, at, around)
            elif around.rows and is_opened(eqn, self.blocks):
                with compat.eqn_context(eqn):
                    return self.run(bodies(eqn)[0], inputs, at, around)
            else:
                outputs = self._other(eqn, inputs, at, around)
            move(at, passed)
            return outputs

        return interpret(jaxpr, args, visit)

    def _mark(self, mark: Mark, inputs: list[Any], at: Positions, around: _Surroundings) -> list[Any]:
        ours = mark.marked.block in self.blocks
        place = at.get(mark.marked.block, 0)
        if ours:
            at[mark.marked.block] += 1
        rows = (
            {}
            if mark.batches
            else {nth: around.rows[id(value)] for nth, value in enumerate(inputs) if id(value) in around.rows}
        )

        # Inside the `vmap`s around the block, whose axes its collectives name.
        def run_mark(*values: Any) -> list[Any]:
            body = mark.jaxpr
            if count(body, self.blocks):
                with unlinked():
                    body = retrace(body, lambda *args: self.run(mark.jaxpr, args, at, around.inside()))
            if not ours:
                # Its policy is set by an enclosing call.
                return bind_mark(replace(mark, jaxpr=body, batches=()), values)
            return self._block(mark, body, values, place, around, rows)

        return _batched(run_mark, mark, inputs)

    def _block(
        self, mark: Mark, body: Any, values: Sequence[Any], place: int, around: _Surroundings, rows: Mapping[int, Row]
    ) -> list[Any]:
        policy, run, span = mark.marked.policy, None, None
        if around.idle:
            return compat.jaxpr_function(body)(*values)
        if isinstance(policy, LayerPolicies):
            if len(policy.ranges) > 1:
                run, span = policy.run_of(place)[0], around.spans.get(mark.marked.block, range(place, place + 1))
            policy = policy[place]
        if is_off(policy):
            return compat.jaxpr_function(body)(*values)
        assert not isinstance(policy, LayerPolicies)
        block = plan_block(body, policy, mark.path, mark.inputs)
        self.audit.saw(mark.path, block, whole=mark.made, layers=run, looped=around.looped)
        with compat.layers_scope(span):
            return bind_block(block, values, looped=True if around.looped else None, apart=around.apart, rows=rows)

    def _scan(self, eqn: Any, inputs: list[Any], at: Positions, around: _Surroundings) -> list[Any]:
        cut = Cut(eqn, self.blocks, None if around.idle else at)
        if len(cut.segments) > 1:
            with compat.eqn_context(eqn):

                def run_round(values: list[Any], segment: Segment, rows: Mapping[int, Row], spans: Spans) -> list[Any]:
                    apart = around.apart or segment.is_loop
                    inside = _Surroundings(looped=True, apart=apart, rows=rows, spans=spans)
                    return self.run(cut.body, values, dict(segment.at), inside)

                return cut.run(inputs, around.spans, run_round)
        spans = cut.spans(cut.segments[0], around.spans) if cut.segments else {}
        apart = around.apart or any(segment.is_loop for segment in cut.segments)
        inside = _Surroundings(looped=True, apart=apart, spans=spans, idle=not cut.segments)
        body = retrace(cut.body, lambda *args: self.run(cut.body, args, dict(at), inside))
        return compat.bind(eqn, inputs, jaxpr=compat.like(body, eqn.params["jaxpr"]))

    def _other(self, eqn: Any, inputs: list[Any], at: Positions, around: _Surroundings) -> list[Any]:
        """An equation with blocks inside: a call, a branch, a loop of unknown length, a block of somebody else's."""
        inside = around.inside(looped=eqn.primitive.name == "while")
        changed = {}
        for key, value in inner_jaxprs(eqn).items():
            many = isinstance(value, tuple)
            new = []
            for one in value if many else (value,):
                inner, start = compat.closed(one), dict(at)
                with compat.inner_context(eqn):
                    traced = retrace(inner, lambda *args, j=inner, s=start: self.run(j, args, s, inside))
                new.append(compat.like(traced, one))
            changed[key] = tuple(new) if many else new[0]
        return compat.bind(eqn, inputs, **changed)


def _batched(function: Any, mark: Mark, inputs: list[Any]) -> list[Any]:
    for batch in mark.batches:
        function = vmapped(function, batch, len(inputs))
    return list(function(*inputs))
