"""From a block's program to the residuals that a solver decides on: few, with nothing lost that matters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from remat_jax import planner
from remat_jax.graph.cost import HasSeconds, is_pass
from remat_jax.graph.flat import Array, FlatEqn, region
from remat_jax.planning.program import Program

SMALL = 0.01
"""Residuals below this share of the largest are decided on together."""

_MOVES = frozenset(
    "bitcast_convert_type broadcast_in_dim convert_element_type copy expand_dims reshape rev slice squeeze transpose".split()
)


@dataclass(eq=False)
class Node:
    """Arrays that are decided on together.

    Attributes:
      members: the arrays.
      needed: whether the backward pass reads one of them.
      parents: the nodes that they are computed from.
      is_input: whether it is an input of the block.
      only_again: whether keeping it gains nothing over keeping others.
    """

    members: list[Array]
    needed: bool
    parents: set[Node]
    is_input: bool = False
    only_again: bool = False

    @property
    def bytes(self) -> int:
        """Of all members together."""
        return sum(array.bytes for array in self.members)

    @property
    def names(self) -> tuple[str, ...]:
        """The residual names of the members."""
        return tuple(name for array in self.members for name in array.names[:1])


def nodes(program: Program) -> list[Node]:
    """The residuals of `program` that a policy may choose among, in the order of execution.

    What backward does not read stands between others, and is not worth keeping where another choice is as good:

    - all that is computed from it takes no more bytes, so that keeping that instead is at least as good;
    - it is one pass over one other array that takes no more bytes, so that keeping that gains all but the pass.

    It is then left out, and computed with what is computed from it; where that is several, and it is more than a pass, it
    stays as something that can only be computed, so that its time counts once. Residuals below `SMALL` of the largest are put
    together, as far as none of them is computed from another by way of a large one.
    """
    found = _all_nodes(program)
    _leave_out(program, found)
    for node in found:
        node.only_again |= node.needed and _is_view_of_parent(program, node, found)
    return _group_small(found)


def _all_nodes(program: Program) -> list[Node]:
    free = program.free
    needed = set(program.needed)
    of: dict[Array, Node] = {}
    found: list[Node] = []
    for array in program.inputs.values():
        if array not in free and array not in of:
            found.append(Node([array], array in needed, set(), is_input=True))
            of[array] = found[-1]
    reach: dict[Array, set[Node]] = {array: {node} for array, node in of.items()}
    for one in program.flat.eqns:
        parents = set().union(*(reach.get(array, set()) for array in one.inputs)) if one.inputs else set()
        named = [array for array in one.outputs if array.names and array not in free]
        if named:
            node = Node(named, bool(needed.intersection(named)), set(parents))
            found.append(node)
            reach.update((array, {node}) for array in one.outputs if array not in free)
        else:
            reach.update((array, parents) for array in one.outputs if array not in free)
    return found


def _children(found: Sequence[Node]) -> dict[Node, list[Node]]:
    result: dict[Node, list[Node]] = {node: [] for node in found}
    for node in found:
        for parent in node.parents:
            result[parent].append(node)
    return result


def _leave_out(program: Program, found: list[Node]) -> None:
    changed = True
    while changed:
        changed = False
        children = _children(found)
        for node in [one for one in found if not one.needed and not one.only_again]:
            one_pass = _is_one_pass(program, node, found)
            if not one_pass and not _is_beaten(node, children[node]):
                continue
            changed = True
            if one_pass or len(children[node]) == 1:
                _remove(node, found, children)
            else:
                node.only_again = True


def _remove(node: Node, found: list[Node], children: dict[Node, list[Node]]) -> None:
    for child in children[node]:
        child.parents.remove(node)
        child.parents |= node.parents
    for parent in node.parents:
        kept = [one for one in children[parent] if one is not node]
        children[parent] = kept + [one for one in children[node] if one not in kept]
    found.remove(node)


def _is_beaten(node: Node, children: Sequence[Node]) -> bool:
    """Whether keeping all that is computed from it takes no more than keeping it."""
    return not node.is_input and sum(child.bytes for child in children) <= node.bytes


def _between(program: Program, node: Node, found: Sequence[Node]) -> list[FlatEqn]:
    """The equations that compute `node` from the other nodes."""
    given = {array for other in found if other is not node for array in other.members}
    return region(program.flat.eqns, node.members, given | program.free | set(program.flat.inputs))


def _is_one_pass(program: Program, node: Node, found: Sequence[Node]) -> bool:
    large = [parent for parent in node.parents if parent.bytes > SMALL * node.bytes]
    if node.is_input or len(large) != 1 or large[0].bytes > node.bytes:
        return False
    return all(is_pass(one) for one in _between(program, node, found))


def _is_view_of_parent(program: Program, node: Node, found: Sequence[Node]) -> bool:
    """Whether it is another view of one parent that is as large or smaller, so that it never pays to keep both."""
    if node.is_input or len(node.parents) != 1:
        return False
    (parent,) = node.parents
    return parent.bytes <= node.bytes and all(one.primitive in _MOVES for one in _between(program, node, found))


def _group_small(found: list[Node]) -> list[Node]:
    least = SMALL * max((node.bytes for node in found), default=0)
    level: dict[Node, int] = {}
    groups: dict[int, Node] = {}
    result: list[Node] = []
    into: dict[Node, Node] = {}
    for node in found:
        small = node.bytes < least and not node.is_input
        level[node] = max((level[parent] + (0 if parent in into else 1) for parent in node.parents), default=0)
        if not small:
            result.append(node)
            continue
        here = groups.get(level[node])
        if here is None:
            here = groups[level[node]] = Node([], False, set())
            result.append(here)
        into[node] = here
        here.members += node.members
        here.needed |= node.needed
        here.parents |= node.parents
    for node in result:
        node.parents = {into.get(parent, parent) for parent in node.parents} - {node}
    return result


def residual(program: Program, node: Node, found: Sequence[Node], rates: HasSeconds) -> planner.Residual:
    """`node` as a solver sees it: what computing it again takes once its parents are there."""
    seconds = None
    if not node.is_input:
        seconds = sum(map(program.seconds(rates).__getitem__, _between(program, node, found)))
    movable = any(getattr(array.aval, "shape", ()) for array in node.members)
    largest = max(one.bytes for one in found)
    return planner.Residual(
        node.names[0],
        float(node.bytes),
        seconds,
        tuple(parent.names[0] for parent in found if parent in node.parents),
        may_save=not node.only_again,
        # A copy of a small array costs more than the bytes it moves.
        may_offload=movable and not node.only_again and (node.is_input or node.bytes >= SMALL * largest),
        needed=node.needed,
    )
