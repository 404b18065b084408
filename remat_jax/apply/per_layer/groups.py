"""Groups of layers: finding the equations of a group in a traced function, and running them under one checkpoint.

The checkpoint of a group keeps the group's inputs. Each layer inside has its own checkpoint too (`layered`), which has an
effect while the backward pass of the group recomputes the group.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from remat_jax import compat
from remat_jax.apply.audit import layers_text
from remat_jax.apply.per_layer.positions import Positions
from remat_jax.apply.region import bind_block
from remat_jax.core import StackRow, plan_block
from remat_jax.core.marks import Block, mark_of, name_of
from remat_jax.core.tied_chain import unlinked
from remat_jax.errors import UnsupportedError
from remat_jax.policy import LayerPolicies, Policy

FULL = Policy.parse("full")
Groups = frozenset[tuple[Block, range]]
"""Groups of layers, each as its block and the range of its layers."""


@dataclass(frozen=True)
class EquationGroup:
    """A group of layers whose blocks are equations of one jaxpr.

    Attributes:
      eqns: the blocks, and the equations between them that depend on them.
      inputs, outputs: the variables that the group reads, and its own variables that are read outside.
      groups: the groups of the blocks: more than one if several classes alternate.
    """

    eqns: tuple[Any, ...]
    inputs: tuple[Any, ...]
    outputs: tuple[Any, ...]
    groups: Groups


def in_parts(
    jaxpr: Any,
    starts: Sequence[Positions],
    counts: Sequence[Counter[Block]],
    policies: Mapping[Block, LayerPolicies],
    applied: Groups,
) -> list[list[Any] | EquationGroup]:
    """The equations of the closed `jaxpr`, reordered so that the equations of each group are consecutive.

    An equation between two blocks of a group joins the group if it depends on a block of the group. Otherwise it moves before
    the group. A group inside one equation that is no block (a scan, a `jit`) is formed when that equation is evaluated.

    Args:
      starts, counts: for each equation, the positions of its first blocks, and the number of its blocks.
      policies: the policies with groups, by block.
      applied: the groups that contain `jaxpr`.

    Raises:
      UnsupportedError: a group ends inside an equation, or groups of several blocks overlap.
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
            raise UnsupportedError(_overlapping([group for one in spans.values() for group in one]))
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
    """`function(*values)`, the layers of a group, under a checkpoint that keeps the inputs; for the rest see `bind_block`."""
    with unlinked():
        jaxpr, consts = compat.hoist_consts(jax.make_jaxpr(function)(*values))
    block = plan_block(jaxpr, FULL, "", [False] * len(jaxpr.in_avals))
    moved = {len(consts) + nth: row for nth, row in (rows or {}).items()}
    return bind_block(block, [*consts, *values], looped=looped, apart=apart, rows=moved)


def torn(block: Block, group: range) -> UnsupportedError:
    """The error for a group that begins or ends inside an indivisible equation."""
    return UnsupportedError(
        f"block={name_of(block)}: the group of {layers_text(group)} begins or ends inside a jit, a branch, a loop or a round "
        "of a scan that calls the block several times. Give groups that do not cross the border of such a region."
    )


def _overlapping(groups: Sequence[tuple[Block, range]]) -> str:
    named = sorted({f"{name_of(block)} {layers_text(group)}" for block, group in groups})
    return (
        f"groups of layers of several blocks overlap: {'; '.join(named[:6])}. Where blocks alternate, give all of them groups "
        "of the same calls, or give groups to only one of them."
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
    """The first and the last equation of a group; None if a single equation contains the group."""
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
            raise torn(block, group)
        return None
    if (low, high) != (group.start, group.stop):
        raise torn(block, group)
    return first, last


def _sorted_out(eqns: Sequence[Any], first: int, last: int, members: set[int]) -> tuple[list[Any], list[Any]]:
    """The equations from `first` to `last`, in two lists: those that do not depend on the group, and the group."""
    made: set[Any] = set()
    before, inside = [], []
    for nth in range(first, last + 1):
        if nth in members or any(atom in made for atom in _variables(eqns[nth])):
            inside.append(eqns[nth])
            made.update(eqns[nth].outvars)
        else:
            before.append(eqns[nth])
    return before, inside


def _equation_group(jaxpr: Any, inside: Sequence[Any], behind: Sequence[Any], groups: Groups) -> EquationGroup:
    made = {var: None for eqn in inside for var in eqn.outvars}
    read = {atom: None for eqn in inside for atom in _variables(eqn) if atom not in made}
    outside = {atom for eqn in behind for atom in _variables(eqn)}
    outside |= {atom for atom in jaxpr.jaxpr.outvars if not hasattr(atom, "val")}
    return EquationGroup(tuple(inside), tuple(read), tuple(var for var in made if var in outside), groups)


def _variables(eqn: Any) -> list[Any]:
    return [atom for atom in eqn.invars if not hasattr(atom, "val")]
