"""Finds the equations, or the iterations of a scan, that form a group of layers, and runs them under one checkpoint.

    y = checkpoint(full)(x ↦ (gₖ ∘ … ∘ g₁)(x)),   gᵢ = layer i under its own policy (`layered`)

The group's checkpoint keeps only the group's inputs. The policies of its layers have an effect when the group is recomputed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr

from remat_jax import compat
from remat_jax.apply.audit import layers_text
from remat_jax.apply.binding import bind_block
from remat_jax.apply.per_layer.positions import Positions
from remat_jax.core import StackRow, block_under_policy
from remat_jax.core.marks import Block, mark_of, name_of
from remat_jax.core.tied_chain import unlinked
from remat_jax.core.walk import variables
from remat_jax.errors import UnsupportedError
from remat_jax.policy import LayerPolicies, Policy

FULL = Policy.parse("full")
Groups = frozenset[tuple[Block, range]]
"""Groups of layers, each as its block and the range of its layers."""


@dataclass(frozen=True)
class EquationGroup:
    """A group of layers whose blocks are equations of one jaxpr.

    Attributes:
      eqns: the group's blocks, and the equations between them that depend on a block of the group.
      inputs: the variables that the group reads.
      outputs: the variables of the group that later equations read, or that are outputs of the jaxpr.
      groups: the group's block and layers; one entry for each block if blocks of several classes alternate.
    """

    eqns: tuple[Any, ...]
    inputs: tuple[Any, ...]
    outputs: tuple[Any, ...]
    groups: Groups


def in_parts(
    jaxpr: ClosedJaxpr,
    starts: Sequence[Positions],
    counts: Sequence[Counter[Block]],
    policies: Mapping[Block, LayerPolicies],
    applied: Groups,
) -> list[list[Any] | EquationGroup]:
    """The equations of the closed `jaxpr` in a list of parts: a part is a group, or a list of equations outside all groups.

    An equation between two blocks of a group joins the group if it depends on a block of the group. Otherwise it moves before
    the group. A group inside a single equation (a scan, a `jit`) is formed when that equation is evaluated.

    Args:
      starts, counts: for each equation, the number of calls of each block before the equation, and in the equation.
      policies: block → its policies by layer, for blocks whose policies have groups.
      applied: the groups that contain `jaxpr`; their checkpoints exist already.

    Raises:
      UnsupportedError: a group begins or ends inside an equation, or groups of several blocks overlap.
    """
    eqns = list(jaxpr.jaxpr.eqns)
    spans: dict[tuple[int, int], set[tuple[Block, range]]] = {}
    for block, policy in policies.items():
        for group in _groups_within(policy, block, starts, counts):
            if (block, group) not in applied:
                span = _span(eqns, starts, counts, block, group)
                if span is not None:
                    spans.setdefault(span, set()).add((block, group))
    parts: list[list[Any] | EquationGroup] = []
    done = 0
    for first, last in sorted(spans):
        if first < done:
            raise UnsupportedError(_overlapping([group for groups in spans.values() for group in groups]))
        members = {nth for nth in range(first, last + 1) if any(counts[nth][block] for block, _ in spans[first, last])}
        before, inside = _sorted_out(eqns, first, last, members)
        parts += [eqns[done:first] + before, _equation_group(jaxpr, inside, eqns[last + 1 :], frozenset(spans[first, last]))]
        done = last + 1
    return [*parts, eqns[done:]]


def run_group(
    function: Callable[..., list[Any]],
    values: Sequence[Any],
    *,
    looped: bool | None,
    apart: bool,
    rows: Mapping[int, StackRow] | None = None,
) -> list[Any]:
    """`function(*values)`, the layers of a group, under a checkpoint that keeps `values`. Options: see `binding.bind_block`."""
    with unlinked():
        jaxpr, consts = compat.hoist_consts(jax.make_jaxpr(function)(*values))
    block = block_under_policy(jaxpr, FULL, "", [False] * len(jaxpr.in_avals))
    moved = {len(consts) + nth: row for nth, row in (rows or {}).items()}
    return bind_block(block, [*consts, *values], looped=looped, apart=apart, rows=moved)


def _torn(block: Block, group: range) -> UnsupportedError:
    """The error for a group that begins or ends inside an equation that cannot be divided."""
    return UnsupportedError(
        f"block={name_of(block)}: the group of {layers_text(group)} begins or ends inside a jit, a branch, a loop, or an "
        "iteration of a scan that calls the block several times. Give groups that do not cross the border of such a region."
    )


def _overlapping(groups: Sequence[tuple[Block, range]]) -> str:
    named = sorted({f"{name_of(block)} {layers_text(group)}" for block, group in groups})
    return (
        f"groups of layers of several blocks overlap: {'; '.join(named[:6])}. If blocks alternate, give each of them groups of "
        "the same calls, or give groups to only one block."
    )


def _groups_within(
    policy: LayerPolicies, block: Block, starts: Sequence[Positions], counts: Sequence[Counter[Block]]
) -> list[range]:
    """The groups of `policy` that contain a layer of these equations."""
    ours = [(start[block], start[block] + count[block]) for start, count in zip(starts, counts, strict=True) if count[block]]
    return [range(*group) for group in policy.groups if ours and group[0] < ours[-1][1] and group[1] > ours[0][0]]


def _span(
    eqns: Sequence[Any], starts: Sequence[Positions], counts: Sequence[Counter[Block]], block: Block, group: range
) -> tuple[int, int] | None:
    """The indices of the first and the last equation of a group; None if a single equation contains the group."""
    places = [
        nth
        for nth, count in enumerate(counts)
        if count[block] and starts[nth][block] < group.stop and starts[nth][block] + count[block] > group.start
    ]
    first, last = places[0], places[-1]
    low, high = starts[first][block], starts[last][block] + counts[last][block]
    mark = mark_of(eqns[first])
    if first == last and (mark is None or mark.marked.block != block or low < group.start or counts[first][block] == 1):
        if group.start < low or group.stop > high:
            raise _torn(block, group)
        return None
    if (low, high) != (group.start, group.stop):
        raise _torn(block, group)
    return first, last


def _sorted_out(eqns: Sequence[Any], first: int, last: int, members: set[int]) -> tuple[list[Any], list[Any]]:
    """The equations from `first` to `last` in two lists: those that do not depend on the blocks `members`, and the group."""
    made: set[Any] = set()
    before, inside = [], []
    for nth in range(first, last + 1):
        if nth in members or any(atom in made for atom in variables(eqns[nth].invars)):
            inside.append(eqns[nth])
            made.update(eqns[nth].outvars)
        else:
            before.append(eqns[nth])
    return before, inside


def _equation_group(jaxpr: ClosedJaxpr, inside: Sequence[Any], behind: Sequence[Any], groups: Groups) -> EquationGroup:
    made = {var: None for eqn in inside for var in eqn.outvars}
    read = {atom: None for eqn in inside for atom in variables(eqn.invars) if atom not in made}
    outside = {atom for eqn in behind for atom in variables(eqn.invars)} | set(variables(jaxpr.jaxpr.outvars))
    return EquationGroup(tuple(inside), tuple(read), tuple(var for var in made if var in outside), groups)


# --- groups under a scan ------------------------------------------------------------------------------------------------

_CROSSED = (
    "block={block}: iterations {start} to {last} of a scan are one group of layers, but the policies or groups of another "
    "block change inside the group. Give both blocks groups of the same iterations."
)


class RoundGroups:
    """The groups of layers in a scan, by its iterations.

    Attributes:
      whole: iteration → `(first, end)`, if the iteration is in a group of two or more iterations, from `first` to `end - 1`.
      parts: iteration → a list of the groups inside it: (block's name, first call, call after the last). Calls are counted from
        0 in each iteration.
      groups: `(first, end)` as in `whole` → the groups of layers in these iterations.

    Raises:
      UnsupportedError: a group begins or ends inside an iteration, or groups of several blocks have different iterations.
    """

    def __init__(
        self, rounds: int, at: Positions, each: Mapping[Block, int], policies: Mapping[Block, Any], outer: Groups
    ) -> None:
        self.whole: dict[int, tuple[int, int]] = {}
        self.parts: dict[int, list[tuple[str, int, int]]] = {}
        self.groups: dict[tuple[int, int], set[tuple[Block, range]]] = {}
        for block, policy in policies.items():
            number, first = each.get(block, 0), at[block]
            for group in policy.groups if number and isinstance(policy, LayerPolicies) else ():
                low, high = group[0] - first, group[1] - first
                if (block, range(*group)) in outer or high <= 0 or low >= rounds * number:
                    continue
                if low < 0 or high > rounds * number:
                    raise _torn(block, range(*group))
                self._add(block, range(*group), low, high, number)

    def _add(self, block: Block, group: range, low: int, high: int, number: int) -> None:
        start, end = low // number, -(-high // number)
        if end - start == 1:
            self.parts.setdefault(start, []).append((name_of(block), low - start * number, high - start * number))
            return
        if low % number or high % number:
            raise _torn(block, group)
        if any(self.whole.get(index, (start, end)) != (start, end) for index in range(start, end)):
            raise UnsupportedError(_CROSSED.format(block=name_of(block), start=start, last=end - 1))
        self.whole |= dict.fromkeys(range(start, end), (start, end))
        self.groups.setdefault((start, end), set()).add((block, group))

    def like(self, index: int) -> object:
        """A key that is equal for two iterations if they may share a segment.

        Then both iterations are in groups of equal length (0 without a group), and the groups inside them have the same calls.
        """
        start, end = self.whole.get(index, (0, 0))
        return end - start, sorted(self.parts.get(index, ()))

    def of(self, first: int, end: int) -> tuple[int | None, Groups]:
        """For iterations `first` to `end - 1`: the number that form one group (None without groups), and the layer groups."""
        if first not in self.whole:
            return None, frozenset()
        starts = {self.whole[index] for index in range(first, end)}
        if min(starts)[0] != first or max(starts)[1] != end:
            crossed = next(span for span in sorted(starts) if span[0] < first or span[1] > end)
            names = sorted({name_of(block) for block, _ in self.groups[crossed]})
            raise UnsupportedError(_CROSSED.format(block=", ".join(names), start=crossed[0], last=crossed[1] - 1))
        length = self.whole[first][1] - self.whole[first][0]
        return length, frozenset(group for span in starts for group in self.groups[span])


def scan_of_groups(
    one_round: Callable[..., Any], carry: list[Any], stacks: list[Any], length: int, apart: bool, options: dict[str, Any]
) -> tuple[list[Any], list[Any]]:
    """Scan over groups of `length` iterations. Each group is a scan under a checkpoint.

    Returns the final carry and the stacked outputs. `stacks` are the scanned operands; the first has the iterations' indices.
    `apart`: whether the forward and the backward pass have separate loops around the scan.
    """
    number, size = stacks[0].shape[0] // length, len(carry)

    def rounds(*values: Any) -> list[Any]:
        index, *slices = values[size:]
        carried, out = jax.lax.scan(one_round, list(values[:size]), (index, slices), length=length, **options)
        return [*carried, *out]

    def one_group(carry: list[Any], rows: list[Any]) -> tuple[list[Any], list[Any]]:
        outputs = run_group(rounds, [*carry, *rows], looped=True, apart=apart or number > 1)
        return outputs[:size], outputs[size:]

    if number == 1:
        return one_group(carry, stacks)
    divided = [stack.reshape(number, length, *stack.shape[1:]) for stack in stacks]
    carry, out = jax.lax.scan(one_group, carry, divided, length=number, reverse=options["reverse"])
    return carry, [stacked.reshape(number * length, *stacked.shape[2:]) for stacked in out]
