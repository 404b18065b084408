"""From a block's program to the residuals that a solver decides on: few, with nothing lost that matters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from remat_jax import solver
from remat_jax.cost.cost import HasSeconds, is_pass
from remat_jax.cost.flat import Array, FlatEqn, region
from remat_jax.planning.program import BlockProgram

SMALL = 0.01
"""Residuals below this share of the largest are decided on together."""

_MOVES = frozenset(
    "bitcast_convert_type broadcast_in_dim convert_element_type copy expand_dims reshape rev slice squeeze transpose".split()
)

_PLACED = ":sharding_constraint#"


@dataclass(eq=False)
class Node:
    """Arrays that are decided on together.

    Attributes:
      members: the arrays.
      needed: whether the backward pass reads one of them.
      parents: the nodes that they are computed from.
      is_input: whether it is an input of the block.
      only_again: whether keeping it gains nothing over keeping others.
      others: how many nodes before it have the name of its largest member, which a user gave to all of them.
    """

    members: list[Array]
    needed: bool
    parents: set[Node]
    is_input: bool = False
    only_again: bool = False
    others: int = 0

    @property
    def bytes(self) -> int:
        """Of all members together."""
        return sum(array.bytes for array in self.members)

    @property
    def names(self) -> tuple[str, ...]:
        """The residual names of the members, the largest member's first."""
        return tuple(self._asked_by(array) for array in sorted(self.members, key=lambda array: -array.bytes))

    def _asked_by(self, array: Array) -> str:
        """The name by which a policy keeps it: of an array that is given its place on a mesh, where it lies in that place.

        Kept as it was before, it would be exchanged again; and the stack of a scan's layers, of which nobody said where it lies
        then, was exchanged as a whole for each of them. An input is kept as it comes.
        """
        placed = [] if self.is_input else [name for name in array.names if _PLACED in name]
        return placed[-1] if placed else array.names[0]

    @property
    def name(self) -> str:
        """The name of the largest member, told apart from other nodes of that name."""
        return f"{self.names[0]} ({self.others + 1})" if self.others else self.names[0]


def nodes(program: BlockProgram) -> list[Node]:
    """The residuals of `program` that a policy may choose among, in the order of execution.

    What backward does not read stands between others, and is not worth keeping where another choice is as good:

    - all that is computed from it takes no more bytes, so that keeping that instead is at least as good;
    - it is one pass over one other array that takes no more bytes, so that keeping that gains all but the pass.

    It is then left out, and computed with what is computed from it; where that is several, and it is more than a pass, it
    stays as something that can only be computed, so that its time counts once.

    What is made from the same arrays by nothing more than a pass is decided on together: it costs the same per byte. So is what
    is below `SMALL` of the largest, with what it is made with or from.
    """
    found = _all_nodes(program)
    _of_one_name(found)
    _leave_out(program, found)
    _together(program, found)
    _leave_out(program, found)
    for node in found:
        node.only_again |= node.needed and _is_view_of_parent(program, node, found)
    return found


def _all_nodes(program: BlockProgram) -> list[Node]:
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


def _of_one_name(found: list[Node]) -> None:
    """Join what a user gave one name: a policy decides on all of it. What cannot be joined is kept where the first one is."""
    first: dict[str, Node] = {}
    others: Counter[str] = Counter()
    for node in list(found):
        name = node.names[0]
        into = first.setdefault(name, node)
        if into is not node and not _join(node, into, found):
            others[name] += 1
            node.others, node.only_again = others[name], True
    waiting = list(found)
    found.clear()
    while waiting:
        # What was joined to an earlier one may be computed from others between the two: parents first.
        found.append(next(node for node in waiting if node.parents.isdisjoint(waiting)))
        waiting.remove(found[-1])


def _children(found: Sequence[Node]) -> dict[Node, list[Node]]:
    result: dict[Node, list[Node]] = {node: [] for node in found}
    for node in found:
        for parent in node.parents:
            result[parent].append(node)
    return result


def _leave_out(program: BlockProgram, found: list[Node]) -> None:
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


def _between(program: BlockProgram, node: Node, found: Sequence[Node]) -> list[FlatEqn]:
    """The equations that compute `node` from the other nodes."""
    given = {array for other in found if other is not node for array in other.members}
    return region(program.flat.eqns, node.members, given | program.free | set(program.flat.inputs))


def _is_one_pass(program: BlockProgram, node: Node, found: Sequence[Node]) -> bool:
    large = [parent for parent in node.parents if parent.bytes > SMALL * node.bytes]
    if node.is_input or len(large) != 1 or large[0].bytes > node.bytes:
        return False
    return all(is_pass(one) for one in _between(program, node, found))


def _is_view_of_parent(program: BlockProgram, node: Node, found: Sequence[Node]) -> bool:
    """Whether it is another view of one parent that is as large or smaller, so that it never pays to keep both."""
    if node.is_input or len(node.parents) != 1:
        return False
    (parent,) = node.parents
    return parent.bytes <= node.bytes and all(one.primitive in _MOVES for one in _between(program, node, found))


def _together(program: BlockProgram, found: list[Node]) -> None:
    """Join what is decided on together, as far as no other lies on the way from one to the other."""
    least = _small(program, found)
    small = {node for node in found if node.bytes < least and not node.is_input}
    sources: dict[Node, frozenset[Node]] = {}
    for node in found:
        through = (sources[parent] if parent in small else {parent} for parent in node.parents)
        sources[node] = frozenset[Node]().union(*through)
    alike: dict[frozenset[Node], Node] = {}
    large = [node for node in found if node not in small]
    passes = {node for node in large if node.needed and not node.is_input and _is_pass_from(program, node, large)}
    for node in [one for one in large if one in passes]:
        # The key of a node that was joined to another is that other's.
        into = alike.setdefault(sources[node], node)
        if into is not node:
            _join(node, into, found)
    waiting = [node for node in found if node in small]
    joined = True
    while joined:
        # What lies between two others is joined first.
        left = [node for node in waiting if not any(_join(node, into, found) for into in _hosts(node, found, small, sources))]
        joined, waiting = len(left) < len(waiting), left
    for place, node in enumerate(waiting):
        next((into for into in waiting[:place] if into in found and _join(node, into, found)), None)


def _small(program: BlockProgram, found: Sequence[Node]) -> float:
    """The bytes below which a residual is small.

    What a checkpoint inside the block is there to compute again is no measure: beside the scores of a long attention, which
    nothing can hold, all else would be small.
    """
    kept = [node.bytes for node in found if program.own.isdisjoint(node.members)]
    return SMALL * max(kept or [node.bytes for node in found], default=0)


def _hosts(node: Node, found: Sequence[Node], small: set[Node], sources: dict[Node, frozenset[Node]]) -> list[Node]:
    """The large nodes that a small one may be joined to: those made with it, from it, and what it is made from."""
    near = [*_children(found)[node], *(one for one in found if one in node.parents)]
    beside = [one for one in found if sources[one] == sources[node]]
    return [one for one in (*beside, *near) if one.needed and one not in small and not one.is_input]


def _is_pass_from(program: BlockProgram, node: Node, large: Sequence[Node]) -> bool:
    return all(is_pass(one) for one in _between(program, node, large))


def _join(node: Node, into: Node, found: list[Node]) -> bool:
    """Make `node` a part of `into`; False, and nothing done, where another node is computed from one and leads to the other."""
    if node is into or _leads_by_way(node, into, found) or _leads_by_way(into, node, found):
        return False
    into.members += node.members
    into.needed |= node.needed
    into.parents = (into.parents | node.parents) - {node, into}
    found.remove(node)
    for other in found:
        if node in other.parents:
            other.parents = (other.parents - {node}) | {into}
    into.parents.discard(into)
    return True


def _leads_by_way(start: Node, end: Node, found: Sequence[Node]) -> bool:
    """Whether `end` is computed from `start` by way of another node."""
    seen: set[Node] = set()
    waiting = [parent for parent in end.parents if parent is not start]
    while waiting:
        node = waiting.pop()
        if node is start:
            return True
        if node not in seen:
            seen.add(node)
            waiting += node.parents
    return False


def residual(program: BlockProgram, node: Node, found: Sequence[Node], rates: HasSeconds) -> solver.ResidualCosts:
    """`node` as a solver sees it: what computing it again takes once its parents are there."""
    seconds = None
    if not node.is_input:
        seconds = sum(map(program.seconds(rates).__getitem__, _between(program, node, found)))
    # Scalars and empty arrays are not copied, whatever a policy says. What a checkpoint in a loop of the block drops is large,
    # and where the layers are scanned XLA refuses to compile its copies: "Expected instruction to have shape equal to".
    movable = any(getattr(array.aval, "shape", ()) and array.bytes for array in node.members)
    movable &= program.own.isdisjoint(node.members)
    return solver.ResidualCosts(
        node.name,
        float(node.bytes),
        seconds,
        tuple(parent.name for parent in found if parent in node.parents),
        may_save=not node.only_again,
        # A copy of a small array costs more than the bytes it moves.
        may_offload=movable and not node.only_again and (node.is_input or node.bytes >= _small(program, found)),
        needed=node.needed,
    )
