"""Evaluates a traced function with marks (`core.marks`): the i-th mark becomes its block under the i-th policy.

A scan over blocks becomes consecutive scans, one for each run of iterations under the same policies (`runs`). Each group of
blocks gets one more checkpoint around it (`groups`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from jax.extend.core import ClosedJaxpr, JaxprEqn

from remat_jax import compat
from remat_jax.apply.audit import Audit
from remat_jax.apply.binding import bind_block
from remat_jax.apply.per_layer.groups import FULL, EquationGroup, Groups, in_parts, run_group
from remat_jax.apply.per_layer.positions import Positions, checked_counts, count, count_in, marks
from remat_jax.apply.per_layer.runs import Cut, Segment, Spans, is_opened
from remat_jax.core import StackRow, block_under_policy
from remat_jax.core.marks import Block, Mark, bind_mark, mark_of, vmapped
from remat_jax.core.shared import note_loop_inputs
from remat_jax.core.tied_chain import unlinked
from remat_jax.core.walk import (
    Visit,
    bodies,
    evaluate_equations,
    is_differentiated,
    rebind,
    retrace,
    value_of,
    values_of_inputs,
)
from remat_jax.identity import ByIdentity
from remat_jax.policy import LayerPolicies, is_off


def evaluate(
    jaxpr: ClosedJaxpr, args: Sequence[Any], blocks: frozenset[Block], audit: Audit
) -> tuple[list[Any], Counter[Block]]:
    """The outputs of the closed `jaxpr` on `args` with each mark of `blocks` under its policy, and each block's call count.

    Raises:
      BlockError: a block is called more or less often than it has policies.
      UnsupportedError: blocks with policies by layer are in a `while` loop, or a group of layers begins or ends inside a loop,
        a call or a branch.
    """
    counts = checked_counts(jaxpr, blocks)
    around = _Surroundings(apart=compat.in_loop(around_gradient=False))
    grouped = {
        mark.marked.block: mark.marked.policy
        for mark in marks(jaxpr)
        if mark.marked.block in blocks and isinstance(mark.marked.policy, LayerPolicies) and mark.marked.policy.groups
    }
    return _Resolver(blocks, audit, grouped).run(jaxpr, args, Counter(), around), counts


@dataclass(frozen=True)
class _Surroundings:
    """The surroundings of an equation.

    Attributes:
      looped: whether the equation is in a loop.
      apart: whether forward and backward pass each have a loop of their own around the equation. False if XLA removes the loop
        (one iteration) or the gradient is taken inside it.
      rows: a value that is a row of a stack → the stack and the index.
      spans: for each block, the layers of all iterations of the scan together; empty outside scans.
      idle: whether the equation is in a loop without iterations, or in a part of a linear solver that JAX does not
        differentiate. The blocks there do not count as layers.
      groups: the groups of layers that contain the equation.
      scans: how many scans are around the equation.
    """

    looped: bool = False
    apart: bool = False
    rows: ByIdentity[StackRow] = field(default_factory=ByIdentity)
    spans: Spans = field(default_factory=dict)
    idle: bool = False
    groups: Groups = frozenset()
    scans: int = 0

    def inside(self, *, looped: bool = False) -> _Surroundings:
        """The surroundings in the body of an equation, without `rows`: the body has other values."""
        return replace(self, looped=self.looped or looped, apart=self.apart or looped, rows=ByIdentity())

    def in_group(self, groups: Groups) -> _Surroundings:
        """The surroundings inside `groups`. `apart` is False: one iteration does a group's recomputation and backward pass."""
        return replace(self, apart=False, rows=ByIdentity(), groups=self.groups | groups)


@dataclass(frozen=True)
class _Resolver:
    """Evaluates the marks of `blocks` under their policies; other marks are kept. `grouped` has the policies with groups."""

    blocks: frozenset[Block]
    audit: Audit
    grouped: Mapping[Block, LayerPolicies]

    def run(self, jaxpr: ClosedJaxpr, args: Sequence[Any], at: Positions, around: _Surroundings) -> list[Any]:
        """Evaluate `jaxpr`. `at` counts the calls of each block before `jaxpr`; the calls in `jaxpr` are added to it."""
        eqns = jaxpr.jaxpr.eqns
        counts, starts = [count_in(eqn, self.blocks) for eqn in eqns], []
        for passed in counts:
            starts.append(at.copy())
            at.update(passed)
        first = {eqn: start for eqn, start, passed in zip(eqns, starts, counts, strict=True) if passed}
        grouped = {} if around.idle else self.grouped
        env = values_of_inputs(jaxpr, args)
        for part in in_parts(jaxpr, starts, counts, grouped, around.groups) if grouped else [eqns]:
            if isinstance(part, EquationGroup):
                self._group(part, env, first, around)
            else:
                evaluate_equations(part, env, self._visitor(first, around))
        return [value_of(atom, env) for atom in jaxpr.jaxpr.outvars]

    def _visitor(self, first: Mapping[Any, Positions], around: _Surroundings) -> Visit:
        """Returns a function that evaluates equations. `first`: an equation with blocks → the `Positions` before it."""

        def visit(eqn: JaxprEqn, inputs: list[Any]) -> list[Any] | None:
            if eqn not in first:
                return None
            mark, at = mark_of(eqn), first[eqn].copy()
            if mark is not None:
                with compat.eqn_context(eqn):
                    return self._mark(mark, inputs, at, around)
            if eqn.primitive.name == "scan":
                return self._scan(eqn, inputs, at, around)
            if around.rows and is_opened(eqn, self.blocks):
                with compat.eqn_context(eqn):
                    return self.run(bodies(eqn)[0], inputs, at, around)
            return self._other(eqn, inputs, at, around)

        return visit

    def _group(self, group: EquationGroup, env: dict[Any, Any], first: Mapping[int, Positions], around: _Surroundings) -> None:
        visit = self._visitor(first, around.in_group(group.groups))

        def layers(*values: Any) -> list[Any]:
            inner = dict(zip(group.inputs, values, strict=True))
            evaluate_equations(group.eqns, inner, visit)
            return [inner[var] for var in group.outputs]

        values = [env[var] for var in group.inputs]
        outputs = run_group(layers, values, looped=around.looped or None, apart=around.apart, rows=_rows(values, around))
        env.update(zip(group.outputs, outputs, strict=True))

    def _mark(self, mark: Mark, inputs: list[Any], at: Positions, around: _Surroundings) -> list[Any]:
        ours = mark.marked.block in self.blocks
        place = at[mark.marked.block]
        at[mark.marked.block] += 1
        rows = {} if mark.batches else _rows(inputs, around)

        # `run_mark` runs inside the `vmap`s around the block, because collectives in the block name the axes of the `vmap`s.
        def run_mark(*values: Any) -> list[Any]:
            body = mark.jaxpr
            if count(body, self.blocks):
                with unlinked():
                    body = retrace(body, lambda *args: self.run(mark.jaxpr, args, at, around.inside()))
            if not ours:
                # The block's policy comes from an enclosing `checkpoint_blocks`.
                return bind_mark(replace(mark, jaxpr=body, batches=()), values)
            return self._block(mark, body, values, place, around, rows)

        run: Callable[..., list[Any]] = run_mark
        for batch in mark.batches:
            run = vmapped(run, batch, len(inputs))
        return list(run(*inputs))

    def _block(
        self,
        mark: Mark,
        body: ClosedJaxpr,
        values: Sequence[Any],
        place: int,
        around: _Surroundings,
        rows: Mapping[int, StackRow],
    ) -> list[Any]:
        policy, run, span, alone = mark.marked.policy, None, None, False
        if around.idle:
            return compat.jaxpr_function(body)(*values)
        if isinstance(policy, LayerPolicies):
            if len(policy.ranges) > 1:
                run, span = policy.run_of(place)[0], around.spans.get(mark.marked.block, range(place, place + 1))
            group, policy = policy.group_of(place), policy[place]
            alone = group is not None and len(group) == 1
        if is_off(policy) and not alone:
            return compat.jaxpr_function(body)(*values)
        assert not isinstance(policy, LayerPolicies)
        if not is_off(policy):
            block = block_under_policy(body, policy, mark.path, mark.inputs)
            self.audit.saw(mark.path, block, whole=mark.made, layers=run, looped=around.looped)
        if alone:
            block = block_under_policy(body, FULL, mark.path, mark.inputs)
        with compat.layers_scope(span):
            return bind_block(block, values, looped=around.looped or None, apart=around.apart, rows=rows, scans=around.scans)

    def _scan(self, eqn: JaxprEqn, inputs: list[Any], at: Positions, around: _Surroundings) -> list[Any]:
        cut = Cut(eqn, self.blocks, None if around.idle else at, around.groups)
        if len(cut.segments) > 1 or any(segment.group for segment in cut.segments):
            with compat.eqn_context(eqn):

                def run_round(values: list[Any], segment: Segment, rows: ByIdentity[StackRow], spans: Spans) -> list[Any]:
                    apart = segment.is_loop or (around.apart and not segment.group)
                    groups = around.groups | segment.groups
                    inside = _Surroundings(
                        looped=True, apart=apart, rows=rows, spans=spans, groups=groups, scans=around.scans + 1
                    )
                    return self.run(cut.body, values, segment.at.copy(), inside)

                return cut.run(inputs, around.spans, run_round, apart=around.apart)
        spans = cut.spans(cut.segments[0], around.spans) if cut.segments else {}
        apart = around.apart or any(segment.is_loop for segment in cut.segments)
        idle, scans = not cut.segments, around.scans + 1
        inside = _Surroundings(looped=True, apart=apart, spans=spans, idle=idle, groups=around.groups, scans=scans)

        def one_round(*args: Any) -> list[Any]:
            note_loop_inputs(eqn, args)
            return self.run(cut.body, args, at.copy(), inside)

        return rebind(eqn, inputs, lambda _, body: retrace(body, one_round))

    def _other(self, eqn: JaxprEqn, inputs: list[Any], at: Positions, around: _Surroundings) -> list[Any]:
        """Evaluate any other equation with blocks inside, such as a call, a branch or a `while` loop."""
        around = around.inside(looped=eqn.primitive.name == "while")

        def inside(_: str, body: ClosedJaxpr) -> ClosedJaxpr:
            here = around if is_differentiated(eqn, body) else replace(around, idle=True)
            return retrace(body, lambda *args: self.run(body, args, at.copy(), here))

        return rebind(eqn, inputs, inside)


def _rows(values: Sequence[Any], around: _Surroundings) -> dict[int, StackRow]:
    """The values that are rows of a stack: index among `values` → row."""
    return {nth: around.rows[value] for nth, value in enumerate(values) if value in around.rows}
