"""Policies by layer: a traced function with marks in it (`marking`), evaluated with the i-th block under the i-th policy.

A scan over blocks is cut into consecutive scans, one for each run of rounds that are under the same policies. Each hands its
carry to the next; what was scanned is sliced, what comes out is joined. Compiled as it stands, the slices of the stacked
parameters would be copies that live through the whole step. So a block reads its parameters from the whole stack, by the index
of the round and inside its own checkpoint (`graph.block`); of the slices only the derivatives are used, and never their values.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from remat_jax import compat
from remat_jax.apply.audit import Audit
from remat_jax.apply.marking import Mark, mark_of, vmapped
from remat_jax.apply.overlap import unlinked
from remat_jax.apply.region import bind_block
from remat_jax.errors import BlockError, UnsupportedError
from remat_jax.graph import Row, plan_block
from remat_jax.graph.walk import bodies, equations, inner_jaxprs, interpret, retrace
from remat_jax.policy import LayerPolicies, Policy, is_off

Block = type | str
Positions = dict[Block, int]
Group = tuple[int, int, Positions]

# JAX differentiates these by rules of their own: what stands inside is never reached.
_OPAQUE = ("custom_jvp_call", "custom_vjp_call")


def evaluate(jaxpr: Any, args: Sequence[Any], blocks: frozenset[Block], audit: Audit) -> tuple[list[Any], Counter[Block]]:
    """The closed `jaxpr` on `args` with every mark of `blocks` run under its policy, and how many blocks there were.

    Raises:
      BlockError: there are not as many blocks as layers.
      UnsupportedError: blocks that would need different policies stand in a `while` loop or in nested scans.
    """
    for eqn in equations(jaxpr):
        if eqn.primitive.name == "while":
            _refuse_while(eqn, blocks)
    counts = _count(jaxpr, blocks)
    for marked in {mark.marked for mark in _marks(jaxpr) if mark.marked.block in blocks}:
        if isinstance(marked.policy, LayerPolicies) and marked.policy.layers != counts[marked.block]:
            raise BlockError(_another_number(marked.block, marked.policy, counts[marked.block]))
    return _Resolver(blocks, audit).run(jaxpr, args, dict.fromkeys(blocks, 0), looped=False), counts


def name_of(block: Block) -> str:
    """What messages call a block."""
    return block if isinstance(block, str) else block.__name__


def _another_number(block: Block, policies: LayerPolicies, found: int) -> str:
    times = "once" if found == 1 else f"{found} times"
    return (
        f"block={name_of(block)}: policy={str(policies)!r} is for {policies.layers} layers, and the block is called {times}. "
        f"Give policies for {found}: each call counts, also those of a model that is run twice."
    )


def _marks(jaxpr: Any) -> Iterator[Mark]:
    for eqn in jaxpr.jaxpr.eqns:
        mark = mark_of(eqn)
        if mark is not None:
            yield mark
            yield from _marks(mark.jaxpr)
        elif not eqn.primitive.name.startswith(_OPAQUE):
            for body in bodies(eqn):
                yield from _marks(body)


def _count(jaxpr: Any, blocks: frozenset[Block]) -> Counter[Block]:
    """How often each of `blocks` runs in one evaluation; in a `while` loop, once."""
    total: Counter[Block] = Counter()
    for eqn in jaxpr.jaxpr.eqns:
        total.update(_count_in(eqn, blocks))
    return total


def _count_in(eqn: Any, blocks: frozenset[Block]) -> Counter[Block]:
    mark = mark_of(eqn)
    if mark is not None:
        return Counter([mark.marked.block] if mark.marked.block in blocks else []) + _count(mark.jaxpr, blocks)
    if eqn.primitive.name.startswith(_OPAQUE):
        return Counter()
    inside = [_count(body, blocks) for body in bodies(eqn)]
    if eqn.primitive.name == "cond":
        # One branch runs; where they have different numbers of blocks, a position is left free in the others.
        return Counter({block: max(one[block] for one in inside) for block in blocks if any(one[block] for one in inside)})
    rounds = eqn.params["length"] if eqn.primitive.name == "scan" else 1
    return Counter({block: rounds * sum(one[block] for one in inside) for block in blocks if any(one[block] for one in inside)})


class _Resolver:
    """Sets the policies of marks in forward order."""

    def __init__(self, blocks: frozenset[Block], audit: Audit) -> None:
        self.blocks, self.audit = blocks, audit

    def run(
        self,
        jaxpr: Any,
        args: Sequence[Any],
        at: Positions,
        *,
        looped: bool,
        rows: Mapping[int, Row] | None = None,
        spans: Mapping[Block, range] | None = None,
    ) -> list[Any]:
        """Evaluate `jaxpr`, whose first blocks have the positions `at`.

        Args:
          at: by block, the position of the next one; moved on.
          looped: whether this is in a loop.
          rows: by the id of a value, the stack that it is a row of.
          spans: in a scan, by block, the layers of all its rounds.
        """

        def visit(eqn: Any, inputs: list[Any]) -> list[Any] | None:
            mark = mark_of(eqn)
            if mark is not None and mark.marked.block in self.blocks:
                with compat.eqn_context(eqn):
                    return self._block(mark, inputs, at, looped, rows or {}, spans or {})
            count = _count_in(eqn, self.blocks)
            if not count:
                return None
            if eqn.primitive.name == "scan":
                return self._scan(eqn, inputs, at, count)
            return self._other(eqn, inputs, at, count, looped, spans)

        return interpret(jaxpr, args, visit)

    def _block(
        self,
        mark: Mark,
        inputs: list[Any],
        at: Positions,
        looped: bool,
        rows: Mapping[int, Row],
        spans: Mapping[Block, range],
    ) -> list[Any]:
        policy, place, run, span = mark.marked.policy, at[mark.marked.block], None, None
        if isinstance(policy, LayerPolicies):
            if len(policy.runs) > 1:
                run, span = policy.run_of(place)[0], spans.get(mark.marked.block, range(place, place + 1))
            policy = policy[place]
        at[mark.marked.block] += 1
        found = {} if mark.batches else {place: rows[id(value)] for place, value in enumerate(inputs) if id(value) in rows}

        # Inside the `vmap`s around the block, whose axes its collectives name.
        def run_block(*values: Any) -> list[Any]:
            body = mark.jaxpr
            if _count(body, self.blocks):
                with unlinked():
                    body = retrace(body, lambda *args: self.run(mark.jaxpr, args, at, looped=looped, spans=spans))
            if is_off(policy):
                return compat.jaxpr_function(body)(*values)
            assert not isinstance(policy, LayerPolicies)
            block = plan_block(body, policy, mark.path, mark.inputs)
            self.audit.saw(mark.path, block, whole=mark.made, layers=run, looped=looped)
            with compat.layers_scope(span):
                return bind_block(block, values, looped=True if looped else None, rows=found)

        return _batched(run_block, mark, inputs)

    def _scan(self, eqn: Any, inputs: list[Any], at: Positions, count: Counter[Block]) -> list[Any]:
        body, rounds = compat.closed(eqn.params["jaxpr"]), eqn.params["length"]
        groups = self._groups(body, at, rounds)
        if len(groups) <= 1:
            spans = {block: range(at[block], at[block] + number) for block, number in count.items()}

            def plain(*args: Any) -> list[Any]:
                return self.run(body, args, dict(at), looped=True, spans=spans)

            outputs = compat.bind(eqn, inputs, jaxpr=compat.like(retrace(body, plain), eqn.params["jaxpr"]))
        else:
            self._refuse_nested(body)
            with compat.eqn_context(eqn):
                outputs = self._segments(eqn, body, inputs, groups)
        _move(at, count)
        return outputs

    def _groups(self, body: Any, at: Positions, rounds: int) -> list[Group]:
        """Consecutive rounds under the same policies: the first, the one after the last, and the positions of the first."""
        each = _count(body, self.blocks)
        policies = {mark.marked.block: mark.marked.policy for mark in _marks(body)}

        def under(index: int) -> list[Any]:
            return [
                [policy[at[block] + index * each[block] + nth] for nth in range(each[block])]
                for block, policy in policies.items()
                if block in each and isinstance(policy, LayerPolicies)
            ]

        groups = []
        for _, alike in itertools.groupby(range(rounds), key=under):
            members = list(alike)
            start = {block: position + members[0] * each[block] for block, position in at.items()}
            groups.append((members[0], members[-1] + 1, start))
        return groups

    def _refuse_nested(self, body: Any) -> None:
        for eqn in body.jaxpr.eqns:
            found = _loop_with_marks(eqn, self.blocks)
            if found is not None:
                raise UnsupportedError(
                    f"block={name_of(found)}: it is called in a scan inside a scan, where layers cannot have policies of their "
                    "own. Give all its layers the same policy, or use one scan over all layers, such as nn.scan for "
                    "nn.remat_scan."
                )

    def _segments(self, eqn: Any, body: Any, inputs: list[Any], groups: list[Group]) -> list[Any]:
        consts, carried = compat.scan_layout(eqn)
        fixed, carry, stacks = inputs[:consts], inputs[consts : consts + carried], inputs[consts + carried :]
        read_again = self._only_in_blocks(body)[consts + carried :]
        whole = [jax.lax.stop_gradient(stack) if yes else None for stack, yes in zip(stacks, read_again, strict=True)]
        results = []
        for group in groups:
            read = whole if self._keeps_no_rows(body, group[2]) else [None] * len(stacks)
            carry, out = self._segment(eqn, body, group, fixed, carry, list(zip(stacks, read, strict=True)))
            results.append(out)
        ordered = results[::-1] if eqn.params["reverse"] else results
        return [*carry, *(jax.lax.concatenate(parts, 0) for parts in zip(*ordered, strict=True))]

    def _segment(
        self, eqn: Any, body: Any, group: Group, fixed: list[Any], carry: list[Any], stacks: list[tuple[Any, Any]]
    ) -> tuple[list[Any], list[Any]]:
        """One of the scans that a scan is cut into: its carry, and its stacked outputs.

        Args:
          stacks: what is scanned, each with the stack that blocks read its rows from, or None where they do not.
        """
        first, end, at = group
        rounds, reverse = eqn.params["length"], eqn.params["reverse"]
        low, high = (rounds - end, rounds - first) if reverse else (first, end)
        each = _count(body, self.blocks)
        spans = {block: range(at[block], at[block] + number * (end - first)) for block, number in each.items()}

        def step(carry: list[Any], row: Any) -> tuple[list[Any], list[Any]]:
            index, slices = row
            rows = {id(one): Row(stack, index) for one, (_, stack) in zip(slices, stacks, strict=True) if stack is not None}
            outputs = self.run(body, [*fixed, *carry, *slices], dict(at), looped=True, rows=rows, spans=spans)
            return outputs[: len(carry)], outputs[len(carry) :]

        def cut(stack: Any) -> Any:
            return jax.lax.slice_in_dim(stack, low, high)

        plain = [cut(stack) if read is None else None for stack, read in stacks]
        # A slice in this scope is one that nobody reads (`graph.origins`).
        with compat.layers_scope(next(iter(spans.values()))):
            index = cut(jax.lax.iota(jnp.int32, rounds))
            slices = [cut(stack) if one is None else one for (stack, _), one in zip(stacks, plain, strict=True)]
            unroll = min(eqn.params["unroll"], high - low)
            result: tuple[list[Any], list[Any]] = jax.lax.scan(
                step, carry, (index, slices), length=high - low, reverse=reverse, unroll=unroll
            )
        return result

    def _only_in_blocks(self, body: Any) -> list[bool]:
        """For each input of a scan's body, whether it is read by blocks and nothing else, and can be read again anywhere."""
        read = {atom for atom in body.jaxpr.outvars if not hasattr(atom, "val")}
        in_blocks: set[Any] = set()
        for eqn in body.jaxpr.eqns:
            mark = mark_of(eqn)
            ours = mark is not None and mark.marked.block in self.blocks and not mark.batches
            (in_blocks if ours else read).update(atom for atom in eqn.invars if not hasattr(atom, "val"))
        return [var in in_blocks - read and bool(jnp.issubdtype(var.aval.dtype, jnp.number)) for var in body.jaxpr.invars]

    def _keeps_no_rows(self, body: Any, at: Positions) -> bool:
        """Whether the blocks of a round have policies under which a row that is read again is never kept."""
        each = _count(body, self.blocks)
        for marked in {mark.marked for mark in _marks(body) if mark.marked.block in self.blocks}:
            first, policy = at[marked.block], marked.policy
            layers = range(first, first + each[marked.block])
            policies = [policy[layer] for layer in layers] if isinstance(policy, LayerPolicies) else [policy]
            if not all(isinstance(one, Policy) and not is_off(one) for one in policies):
                return False
        return True

    def _other(
        self,
        eqn: Any,
        inputs: list[Any],
        at: Positions,
        count: Counter[Block],
        looped: bool,
        spans: Mapping[Block, range] | None,
    ) -> list[Any]:
        """An equation with blocks inside: a call, a branch, a loop of unknown length, a block of somebody else's."""
        looped = looped or eqn.primitive.name == "while"
        changed = {}
        for key, value in inner_jaxprs(eqn).items():
            many = isinstance(value, tuple)
            new = []
            for one in value if many else (value,):
                inner, start = compat.closed(one), dict(at)
                with compat.inner_context(eqn):
                    traced = retrace(inner, lambda *args, j=inner, s=start: self.run(j, args, s, looped=looped, spans=spans))
                new.append(compat.like(traced, one))
            changed[key] = tuple(new) if many else new[0]
        _move(at, count)
        return compat.bind(eqn, inputs, **changed)


def _refuse_while(eqn: Any, blocks: frozenset[Block]) -> None:
    for mark in (mark for body in bodies(eqn) for mark in _marks(body)):
        if mark.marked.block in blocks and isinstance(mark.marked.policy, LayerPolicies):
            raise UnsupportedError(
                f"block={name_of(mark.marked.block)}: it is called in a while loop, and nobody knows how many layers that is. "
                "Give it one policy, or use a scan: jax.lax.scan, or a fori_loop whose bounds are Python numbers."
            )


def _batched(function: Any, mark: Mark, inputs: list[Any]) -> list[Any]:
    for batch in mark.batches:
        function = vmapped(function, batch, len(inputs))
    return list(function(*inputs))


def _move(at: Positions, count: Counter[Block]) -> None:
    for block, number in count.items():
        at[block] += number


def _loop_with_marks(eqn: Any, blocks: frozenset[Block]) -> Block | None:
    """A block that stands in a scan in `eqn`, or in `eqn` itself if that is one."""
    count = _count_in(eqn, blocks)
    if not count or mark_of(eqn) is not None:
        return None
    if eqn.primitive.name == "scan":
        return next(iter(count))
    inside = (_loop_with_marks(one, blocks) for body in bodies(eqn) for one in body.jaxpr.eqns)
    return next((block for block in inside if block is not None), None)
