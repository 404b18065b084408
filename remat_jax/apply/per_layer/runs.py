"""Cuts a scan over blocks into consecutive scans, one for each run of iterations under the same policies.

    c, y = scan(f, c, x)  →  c, y₁ = scan(f under policy 1, c, x[:n]);  c, y₂ = scan(f under policy 2, c, x[n:]);  y = [y₁, y₂]

A scan is also cut at `LayerPolicies.cuts`. Iterations in groups become a scan of groups (`groups.scan_of_groups`).

Slices of stacked parameters would be copies that are alive during the whole step. So a block reads its parameters from the
whole stack, by the iteration's index and inside its own checkpoint (`core.stack_rows`). The scan still takes slices, so that
gradients flow through them; nothing reads the values of the slices, so the compiler drops them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, JaxprEqn

from remat_jax import compat
from remat_jax.apply.per_layer.groups import Groups, RoundGroups, scan_of_groups
from remat_jax.apply.per_layer.positions import Positions, count, count_in, marks
from remat_jax.core import StackRow
from remat_jax.core.marks import Block, mark_of
from remat_jax.core.walk import bodies, variables
from remat_jax.identity import ByIdentity
from remat_jax.policy import LayerPolicies, Policy, is_off

Spans = Mapping[Block, range]


@dataclass(frozen=True)
class Segment:
    """Consecutive iterations of a scan under the same policies: from `first` up to `end`.

    Attributes:
      at: how often each block was called before the first iteration.
      is_loop: whether the compiler keeps the loop. It removes a loop of one iteration, even one left by unrolling.
      group: the number of iterations that form one group; None without groups.
      groups: the groups that the segment's iterations form, each as its block and the range of its layers.
    """

    first: int
    end: int
    at: Positions
    is_loop: bool
    group: int | None = None
    groups: Groups = frozenset()


RunRound = Callable[[list[Any], Segment, ByIdentity[StackRow], Spans], list[Any]]
"""`run(inputs, segment, rows, spans)` traces the body of a segment's scan, once for all iterations of the segment."""


class Cut:
    """A scan over blocks, and its segments in forward order.

    `at` is the number of calls of each block before the scan; None if the scan is inside a loop without iterations. There are
    no segments if `at` is None or the scan has no iterations.
    """

    def __init__(self, eqn: JaxprEqn, blocks: frozenset[Block], at: Positions | None, groups: Groups) -> None:
        self.eqn, self.blocks = eqn, blocks
        self.body = compat.closed(eqn.params["jaxpr"])
        self.each = count(self.body, blocks)
        self.segments = [] if at is None else self._segments(at, groups)

    def _segments(self, at: Positions, outer: Groups) -> list[Segment]:
        policies = {mark.marked.block: mark.marked.policy for mark in marks(self.body)}
        grouped = RoundGroups(self.eqn.params["length"], at, self.each, policies, outer)

        by_layer = [
            (block, policy) for block, policy in policies.items() if block in self.each and isinstance(policy, LayerPolicies)
        ]

        def segment_key(index: int) -> object:
            """A key that is equal for two iterations if they have equal policies, the same cuts before them, and equal groups
            (`RoundGroups.like`)."""
            policies_and_cuts = []
            for block, policy in by_layer:
                first, number = at[block] + index * self.each[block], self.each[block]
                passed = sum(cut <= first for cut in policy.cuts)
                policies_and_cuts.append(([policy[layer] for layer in range(first, first + number)], passed))
            return policies_and_cuts, grouped.like(index)

        segments = []
        for _, alike in itertools.groupby(range(self.eqn.params["length"]), key=segment_key):
            first, *rest = alike
            end = first + 1 + len(rest)
            start = at.copy()
            start.update({block: first * number for block, number in self.each.items()})
            group, groups = grouped.of(first, end)
            unroll = self.eqn.params["unroll"]
            # An `unroll` of 0 unrolls everything. If `unroll` does not divide the length, the rest is unrolled after the loop.
            is_loop = unroll > 0 and (group or end - first) // unroll > 1
            segments.append(Segment(first, end, start, is_loop, group, groups))
        return segments

    def spans(self, segment: Segment, around: Spans) -> dict[Block, range]:
        """For each block, the layers of all iterations of a segment. The spans of an outer scan, `around`, take precedence."""
        rounds = segment.end - segment.first
        layers = {block: range(segment.at[block], segment.at[block] + number * rounds) for block, number in self.each.items()}
        return layers | {block: outer for block, outer in around.items() if block in layers}

    def run(self, inputs: Sequence[Any], around: Spans, run_round: RunRound, *, apart: bool) -> list[Any]:
        """The outputs of the scan, computed by one scan for each segment; for `apart` see `bind_block`."""
        consts, carried = compat.scan_layout(self.eqn)
        fixed, carry, stacks = inputs[:consts], list(inputs[consts : consts + carried]), inputs[consts + carried :]
        read_again = only_in_blocks(self.body, self.blocks)[consts + carried :]
        whole = [jax.lax.stop_gradient(stack) if yes else None for stack, yes in zip(stacks, read_again, strict=True)]
        results = []
        for segment in self.segments:
            read = whole if self._keeps_no_rows(segment) else [None] * len(stacks)
            operands = list(zip(stacks, read, strict=True))
            carry, out = self._scan(segment, self.spans(segment, around), run_round, fixed, carry, operands, apart)
            results.append(out)
        ordered = results[::-1] if self.eqn.params["reverse"] else results
        return [*carry, *(jax.lax.concatenate(parts, 0) for parts in zip(*ordered, strict=True))]

    def _scan(
        self,
        segment: Segment,
        spans: Spans,
        run_round: RunRound,
        fixed: Sequence[Any],
        carry: list[Any],
        stacks: Sequence[tuple[Any, Any]],
        apart: bool,
    ) -> tuple[list[Any], list[Any]]:
        """Run one segment. Returns its final carry and its stacked outputs.

        Args:
          stacks: the scanned operands, each with the stack from which blocks read rows (None: blocks read the scan's slices).
        """
        rounds, reverse = self.eqn.params["length"], self.eqn.params["reverse"]
        low, high = (rounds - segment.end, rounds - segment.first) if reverse else (segment.first, segment.end)

        def one_round(carry: list[Any], index_and_slices: tuple[Any, list[Any]]) -> tuple[list[Any], list[Any]]:
            index, slices = index_and_slices
            with_stack = zip(slices, stacks, strict=True)
            rows = ByIdentity((row, StackRow(stack, index)) for row, (_, stack) in with_stack if stack is not None)
            outputs = run_round([*fixed, *carry, *slices], segment, rows, spans)
            return outputs[: len(carry)], outputs[len(carry) :]

        def cut(stack: jax.Array) -> jax.Array:
            # JAX would save a slice of full length as another array.
            return stack if (low, high) == (0, rounds) else jax.lax.slice_in_dim(stack, low, high)

        plain = [cut(stack) if read is None else None for stack, read in stacks]
        # `core.origins` uses this scope to recognise slices that nothing reads.
        with compat.layers_scope(next(iter(spans.values()))):
            index = jax.lax.slice_in_dim(jax.lax.iota(jnp.int32, rounds), low, high)
            slices = [cut(stack) if unread is None else unread for (stack, _), unread in zip(stacks, plain, strict=True)]
            options = {"reverse": reverse, "unroll": min(self.eqn.params["unroll"], segment.group or high - low)}
            if segment.group:
                return scan_of_groups(one_round, carry, [index, *slices], segment.group, apart, options)
            result: tuple[list[Any], list[Any]] = jax.lax.scan(one_round, carry, (index, slices), length=high - low, **options)
        return result

    def _keeps_no_rows(self, segment: Segment) -> bool:
        """Whether blocks may read rows from their stacks: no block of an iteration has a policy that can save a row."""
        for marked in {mark.marked for mark in marks(self.body) if mark.marked.block in self.blocks}:
            first, policy = segment.at[marked.block], marked.policy
            layers = range(first, first + self.each[marked.block])
            policies = [policy[layer] for layer in layers] if isinstance(policy, LayerPolicies) else [policy]
            if not all(isinstance(of_layer, Policy) and not is_off(of_layer) for of_layer in policies):
                return False
        return True


def only_in_blocks(body: ClosedJaxpr, blocks: frozenset[Block]) -> list[bool]:
    """For each input of the closed `body`, whether blocks can read it from a stack: it is numeric, and only blocks read it.

    Equations whose results nothing reads do not count: a block takes over the views of its parameters (`apply.region`).
    """
    body = compat.dce(body)
    read = set(variables(body.jaxpr.outvars))
    in_blocks: set[Any] = set()
    for eqn in body.jaxpr.eqns:
        for atom, ours in zip(eqn.invars, _by_blocks(eqn, blocks), strict=True):
            if not hasattr(atom, "val"):
                (in_blocks if ours else read).add(atom)
    return [var in in_blocks - read and bool(jnp.issubdtype(var.aval.dtype, jnp.number)) for var in body.jaxpr.invars]


def _by_blocks(eqn: JaxprEqn, blocks: frozenset[Block]) -> list[bool]:
    """For each operand of `eqn`, whether only blocks read it."""
    mark = mark_of(eqn)
    if mark is not None:
        return [mark.marked.block in blocks and not mark.batches] * len(eqn.invars)
    if is_opened(eqn, blocks):
        return only_in_blocks(bodies(eqn)[0], blocks)
    return [False] * len(eqn.invars)


def is_opened(eqn: JaxprEqn, blocks: frozenset[Block]) -> bool:
    """Whether `eqn` is a `jit` without options that contains blocks, so that its body can be inlined in a scan."""
    return compat.is_plain_jit(eqn) and bool(count_in(eqn, blocks))
