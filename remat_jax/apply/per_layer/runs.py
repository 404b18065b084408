"""Cutting a scan over blocks into consecutive scans, one for each run of rounds that are under the same policies.

It is cut where `LayerPolicies.cuts` says so, too. Rounds in groups (`LayerPolicies.groups`) become a scan of groups
(`scanned_groups`).

Each hands its carry to the next; what was scanned is sliced, what comes out is joined. Compiled as it stands, the slices of the
stacked parameters would be copies that live through the whole step. So a block reads its parameters from the whole stack, by
the index of the round and inside its own checkpoint (`graph.block`); of the slices only the derivatives are used, and never
their values.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from remat_jax import compat
from remat_jax.apply.per_layer.groups import Groups
from remat_jax.apply.per_layer.positions import Positions, count, count_in, marks
from remat_jax.apply.per_layer.scanned_groups import RoundGroups, scan_of_groups
from remat_jax.core import StackRow
from remat_jax.core.marks import Block, mark_of
from remat_jax.core.walk import bodies
from remat_jax.policy import LayerPolicies, Policy, is_off

Spans = Mapping[Block, range]


@dataclass(frozen=True)
class Segment:
    """Consecutive rounds of a scan under the same policies.

    Attributes:
      first, end: the first of them, and the one after the last.
      at: the positions of the blocks in the first.
      is_loop: whether the compiler sees a loop around one round. Of one round, or with all rounds unrolled into one, it takes
        the loop away.
      group: how many rounds are in a group; None without groups.
      groups: the groups of its layers.
    """

    first: int
    end: int
    at: Positions
    is_loop: bool
    group: int | None = None
    groups: Groups = frozenset()


RunRound = Callable[[list[Any], Segment, Mapping[int, StackRow], Spans], list[Any]]
"""`run(inputs, segment, rows, spans)`: one round of a scan that stands for all of a segment."""


class Cut:
    """A scan over blocks, and how it is cut.

    Attributes:
      body: what it scans, as a closed jaxpr.
      segments: what it is cut into, in forward order; nothing where it has no rounds, or never runs (`at` is None).
    """

    def __init__(self, eqn: Any, blocks: frozenset[Block], at: Positions | None, groups: Groups) -> None:
        self.eqn, self.blocks = eqn, blocks
        self.body = compat.closed(eqn.params["jaxpr"])
        self.each = count(self.body, blocks)
        self.segments = [] if at is None else self._segments(at, groups)

    def _segments(self, at: Positions, outer: Groups) -> list[Segment]:
        policies = {mark.marked.block: mark.marked.policy for mark in marks(self.body)}
        grouped = RoundGroups(self.eqn.params["length"], at, self.each, policies, outer)

        def under(index: int) -> list[Any]:
            return [
                [policy[at[block] + index * self.each[block] + nth] for nth in range(self.each[block])]
                for block, policy in policies.items()
                if block in self.each and isinstance(policy, LayerPolicies)
            ]

        cuts = {
            block: [cut - at[block] for cut in policy.cuts]
            for block, policy in policies.items()
            if block in self.each and isinstance(policy, LayerPolicies)
        }

        def scan(index: int) -> Any:
            """Equal for rounds in a row that stay together: under the same policies, behind the same cuts, in like groups."""
            behind = [sum(cut <= index * self.each[block] for cut in found) for block, found in cuts.items()]
            return under(index), behind, grouped.like(index)

        segments = []
        for _, alike in itertools.groupby(range(self.eqn.params["length"]), key=scan):
            members = list(alike)
            start = {block: position + members[0] * self.each[block] for block, position in at.items()}
            unroll = self.eqn.params["unroll"]
            # 0 unrolls all; what does not divide the length is written out behind the loop.
            group, found = grouped.of(members[0], members[-1] + 1)
            is_loop = unroll > 0 and (group or len(members)) // unroll > 1
            segments.append(Segment(members[0], members[-1] + 1, start, is_loop, group, found))
        return segments

    def spans(self, segment: Segment, around: Spans) -> dict[Block, range]:
        """By block, the layers of all rounds of a segment; inside another scan (`around`), those of all its rounds."""
        rounds = segment.end - segment.first
        own = {block: range(segment.at[block], segment.at[block] + number * rounds) for block, number in self.each.items()}
        return own | {block: layers for block, layers in around.items() if block in own}

    def run(self, inputs: Sequence[Any], around: Spans, run_round: RunRound, *, apart: bool) -> list[Any]:
        """The outputs of the scan, its segments run one after the other; `apart` is as for `bind_block`."""
        consts, carried = compat.scan_layout(self.eqn)
        fixed, carry, stacks = inputs[:consts], list(inputs[consts : consts + carried]), inputs[consts + carried :]
        read_again = only_in_blocks(self.body, self.blocks)[consts + carried :]
        whole = [jax.lax.stop_gradient(stack) if yes else None for stack, yes in zip(stacks, read_again, strict=True)]
        results = []
        for segment in self.segments:
            read = whole if self._keeps_no_rows(segment) else [None] * len(stacks)
            spans = self.spans(segment, around)

            def step(
                carry: list[Any], slices: list[Any], rows: Mapping[int, StackRow], one: Any = segment, s: Any = spans
            ) -> Any:
                outputs = run_round([*fixed, *carry, *slices], one, rows, s)
                return outputs[: len(carry)], outputs[len(carry) :]

            carry, out = self._scan(segment, spans, step, carry, list(zip(stacks, read, strict=True)), apart)
            results.append(out)
        ordered = results[::-1] if self.eqn.params["reverse"] else results
        return [*carry, *(jax.lax.concatenate(parts, 0) for parts in zip(*ordered, strict=True))]

    def _scan(
        self, segment: Segment, spans: Spans, step: Any, carry: list[Any], stacks: list[tuple[Any, Any]], apart: bool
    ) -> tuple[list[Any], list[Any]]:
        """One segment: its carry, and its stacked outputs.

        Args:
          stacks: what is scanned, each with the stack that blocks read its rows from, or None where they do not.
        """
        rounds, reverse = self.eqn.params["length"], self.eqn.params["reverse"]
        low, high = (rounds - segment.end, rounds - segment.first) if reverse else (segment.first, segment.end)

        def one_round(carry: list[Any], row: Any) -> tuple[list[Any], list[Any]]:
            index, slices = row
            rows = {
                id(one): StackRow(stack, index) for one, (_, stack) in zip(slices, stacks, strict=True) if stack is not None
            }
            result: tuple[list[Any], list[Any]] = step(carry, slices, rows)
            return result

        def cut(stack: Any) -> Any:
            # A slice of the whole is an array of its own to JAX, which would be kept between the passes.
            return stack if (low, high) == (0, rounds) else jax.lax.slice_in_dim(stack, low, high)

        plain = [cut(stack) if read is None else None for stack, read in stacks]
        # A slice in this scope is one that nobody reads (`graph.origins`).
        with compat.layers_scope(next(iter(spans.values()))):
            index = jax.lax.slice_in_dim(jax.lax.iota(jnp.int32, rounds), low, high)
            slices = [cut(stack) if one is None else one for (stack, _), one in zip(stacks, plain, strict=True)]
            options = {"reverse": reverse, "unroll": min(self.eqn.params["unroll"], segment.group or high - low)}
            if segment.group:
                return scan_of_groups(one_round, carry, [index, *slices], segment.group, apart, options)
            result: tuple[list[Any], list[Any]] = jax.lax.scan(one_round, carry, (index, slices), length=high - low, **options)
        return result

    def _keeps_no_rows(self, segment: Segment) -> bool:
        """Whether the blocks of a round have policies under which a row that is read again is never kept."""
        for marked in {mark.marked for mark in marks(self.body) if mark.marked.block in self.blocks}:
            first, policy = segment.at[marked.block], marked.policy
            layers = range(first, first + self.each[marked.block])
            policies = [policy[layer] for layer in layers] if isinstance(policy, LayerPolicies) else [policy]
            if not all(isinstance(one, Policy) and not is_off(one) for one in policies):
                return False
        return True


def only_in_blocks(body: Any, blocks: frozenset[Block]) -> list[bool]:
    """For each input of the closed `body`, whether it is read by blocks and nothing else, and can be read again anywhere."""
    read = {atom for atom in body.jaxpr.outvars if not hasattr(atom, "val")}
    in_blocks: set[Any] = set()
    for eqn in body.jaxpr.eqns:
        for atom, ours in zip(eqn.invars, _by_blocks(eqn, blocks), strict=True):
            if not hasattr(atom, "val"):
                (in_blocks if ours else read).add(atom)
    return [var in in_blocks - read and bool(jnp.issubdtype(var.aval.dtype, jnp.number)) for var in body.jaxpr.invars]


def _by_blocks(eqn: Any, blocks: frozenset[Block]) -> list[bool]:
    """For each operand of `eqn`, whether blocks and nothing else read it."""
    mark = mark_of(eqn)
    if mark is not None:
        return [mark.marked.block in blocks and not mark.batches] * len(eqn.invars)
    if is_opened(eqn, blocks):
        return only_in_blocks(bodies(eqn)[0], blocks)
    return [False] * len(eqn.invars)


def is_opened(eqn: Any, blocks: frozenset[Block]) -> bool:
    """Whether `eqn` is a `jit` around blocks that asks for nothing but a call, so that in a scan its body can stand for it."""
    return compat.is_plain_jit(eqn) and bool(count_in(eqn, blocks))
