"""Reduces the arrays of a block's program to the few residuals that the solver decides on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from remat_jax import solver
from remat_jax.cost.cost import is_pass
from remat_jax.cost.flat import Array, FlatEqn, region
from remat_jax.planning.program import BlockProgram

SMALL = 0.01
"""Residuals smaller than this share of the largest residual join other residuals."""

_MOVES = frozenset(
    "bitcast_convert_type broadcast_in_dim convert_element_type copy expand_dims reshape rev slice squeeze transpose".split()
)

_PLACED = ":sharding_constraint#"


@dataclass(eq=False)
class Node:
    """Arrays that share one decision.

    Attributes:
      needed: whether the backward pass reads a member.
      parents: the nodes from which the members are computed.
      only_again: whether the solver may recompute the node, but neither save nor offload it.
      others: how many earlier nodes have the same user-given name as its largest member.
    """

    members: list[Array]
    needed: bool
    parents: set[Node]
    is_input: bool = False
    only_again: bool = False
    others: int = 0

    @property
    def bytes(self) -> int:
        """The total bytes of the members."""
        return sum(array.bytes for array in self.members)

    @property
    def names(self) -> tuple[str, ...]:
        """The residual names of the members, the largest member first."""
        return tuple(self._kept_name(array) for array in sorted(self.members, key=lambda array: -array.bytes))

    def _kept_name(self, array: Array) -> str:
        """The name by which a policy keeps `array`: for an array with a sharding constraint, its name after the constraint.

        Saving the array before its sharding constraint would reshard it. In a scan, the stacked array would have no constraint,
        and XLA was seen to reshard the whole stacked array for each layer. For an input, its first name is returned.
        """
        placed = [] if self.is_input else [name for name in array.names if _PLACED in name]
        return placed[-1] if placed else array.names[0]

    @property
    def name(self) -> str:
        """The name of the largest member, numbered if earlier nodes have the same name."""
        return f"{self.names[0]} ({self.others + 1})" if self.others else self.names[0]


def nodes(program: BlockProgram) -> list[Node]:
    """The nodes of `program` that the solver chooses actions for, in execution order.

    An array that the backward pass does not read is an intermediate. It is not worth keeping in two cases:

    - The arrays computed from it have no more bytes in total than it has: keeping these arrays is at least as good.
    - Only fusible equations (`is_pass`) compute it, from one array with no more bytes: if that array is kept, recomputing
      the intermediate is cheap.

    Such an intermediate is left out, and its cost is added to the arrays computed from it. But if only the first case applies,
    and several arrays are computed from it, it stays as a node that can only be recomputed. So its time counts once.

    Arrays computed by fusible equations from the same arrays become one node, because they cost the same per byte. An array
    smaller than `SMALL` times the largest array joins a large array: one with the same sources, a child, or a parent.
    """
    graph = _all_nodes(program)
    _join_same_names(graph)
    _leave_out(program, graph)
    _join_small_and_alike(program, graph)
    _leave_out(program, graph)
    for node in graph:
        node.only_again |= node.needed and _is_view_of_parent(program, node, graph)
    return graph


def _all_nodes(program: BlockProgram) -> list[Node]:
    free, needed = program.free, set(program.needed)
    inputs = dict.fromkeys(array for array in program.inputs.values() if array not in free)
    graph = [Node([array], array in needed, set(), is_input=True) for array in inputs]
    reach: dict[Array, set[Node]] = {array: {node} for array, node in zip(inputs, graph, strict=True)}
    for eqn in program.flat.eqns:
        sources = set[Node]().union(*(reach.get(array, set()) for array in eqn.inputs))
        made = [array for array in eqn.outputs if array not in free]
        if named := [array for array in made if array.names]:
            graph.append(Node(named, bool(needed.intersection(named)), set(sources)))
            sources = {graph[-1]}
        reach.update((array, sources) for array in made)
    return graph


def _join_same_names(graph: list[Node]) -> None:
    """Join nodes with the same user-given name: a policy treats them alike. A node that cannot join may only be recomputed."""
    first: dict[str, Node] = {}
    others: Counter[str] = Counter()
    for node in list(graph):
        name = node.names[0]
        into = first.setdefault(name, node)
        if into is not node and not _join(node, into, graph):
            others[name] += 1
            node.others, node.only_again = others[name], True
    waiting = list(graph)
    graph.clear()
    while waiting:
        # After a join, a node may depend on nodes behind it in the list: sort parents before children.
        graph.append(next(node for node in waiting if node.parents.isdisjoint(waiting)))
        waiting.remove(graph[-1])


def _children(node: Node, graph: Sequence[Node]) -> list[Node]:
    return [other for other in graph if node in other.parents]


def _leave_out(program: BlockProgram, graph: list[Node]) -> None:
    changed = True
    while changed:
        changed = False
        for node in [node for node in graph if not node.needed and not node.only_again]:
            children = _children(node, graph)
            one_pass = _is_one_pass(program, node, graph)
            if not one_pass and not _is_beaten(node, children):
                continue
            changed = True
            if one_pass or len(children) == 1:
                graph.remove(node)
                for child in children:
                    child.parents = (child.parents - {node}) | node.parents
            else:
                node.only_again = True


def _is_beaten(node: Node, children: Sequence[Node]) -> bool:
    """Whether keeping all children takes no more bytes than keeping the node."""
    return not node.is_input and sum(child.bytes for child in children) <= node.bytes


def _between(program: BlockProgram, node: Node, graph: Sequence[Node]) -> list[FlatEqn]:
    """The equations that compute `node` from the other nodes."""
    other_arrays = {array for other in graph if other is not node for array in other.members}
    return region(program.flat.eqns, node.members, other_arrays | program.free | set(program.flat.inputs))


def _is_one_pass(program: BlockProgram, node: Node, graph: Sequence[Node]) -> bool:
    large = [parent for parent in node.parents if parent.bytes > SMALL * node.bytes]
    if node.is_input or len(large) != 1 or large[0].bytes > node.bytes:
        return False
    return all(map(is_pass, _between(program, node, graph)))


def _is_view_of_parent(program: BlockProgram, node: Node, graph: Sequence[Node]) -> bool:
    """Whether the node only moves or converts a single parent that is not larger (`_MOVES`). Then keeping both never helps."""
    if node.is_input or len(node.parents) != 1:
        return False
    (parent,) = node.parents
    return parent.bytes <= node.bytes and all(eqn.primitive in _MOVES for eqn in _between(program, node, graph))


def _join_small_and_alike(program: BlockProgram, graph: list[Node]) -> None:
    """Join large nodes that fusible equations compute from equal sources, and join small nodes to large ones (`_hosts`)."""
    least = _small(program, graph)
    small = {node for node in graph if node.bytes < least and not node.is_input}
    sources: dict[Node, frozenset[Node]] = {}
    for node in graph:
        through = (sources[parent] if parent in small else {parent} for parent in node.parents)
        sources[node] = frozenset[Node]().union(*through)
    large = [node for node in graph if node not in small]
    able = [node for node in large if node.needed and not node.is_input]
    first: dict[frozenset[Node], Node] = {}
    for node in [node for node in able if all(map(is_pass, _between(program, node, large)))]:
        # Nodes with equal sources join the first node with these sources.
        _join(node, first.setdefault(sources[node], node), graph)
    waiting = [node for node in graph if node in small]
    joined = True
    while joined:
        # Repeat: a small node can join a large node only after the nodes between them have joined.
        left = [node for node in waiting if not any(_join(node, into, graph) for into in _hosts(node, graph, small, sources))]
        joined, waiting = len(left) < len(waiting), left
    for place, node in enumerate(waiting):
        next((into for into in waiting[:place] if into in graph and _join(node, into, graph)), None)


def _small(program: BlockProgram, graph: Sequence[Node]) -> float:
    """The bytes below which a residual is small."""
    # Residuals that checkpoints inside the block drop do not count. They may be the attention scores of a long sequence; all
    # other residuals would be small compared with these scores.
    kept = [node.bytes for node in graph if program.own.isdisjoint(node.members)]
    return SMALL * max(kept or [node.bytes for node in graph], default=0)


def _hosts(node: Node, graph: Sequence[Node], small: set[Node], sources: dict[Node, frozenset[Node]]) -> list[Node]:
    """The large nodes that a small node may join: nodes with the same sources, its children, and its parents."""
    beside = [other for other in graph if sources[other] == sources[node]]
    parents = [other for other in graph if other in node.parents]
    near = (*beside, *_children(node, graph), *parents)
    return [other for other in near if other.needed and other not in small and not other.is_input]


def _join(node: Node, into: Node, graph: list[Node]) -> bool:
    """Join `node` to `into`. If a third node is on a path between them, do nothing and return False."""
    if node is into or _leads_by_way(node, into) or _leads_by_way(into, node):
        return False
    into.members += node.members
    into.needed |= node.needed
    into.parents = (into.parents | node.parents) - {node, into}
    graph.remove(node)
    for other in graph:
        if node in other.parents:
            other.parents = (other.parents - {node}) | {into}
    return True


def _leads_by_way(start: Node, end: Node) -> bool:
    """Whether `end` depends on `start` through a third node."""
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


def residual(program: BlockProgram, node: Node, graph: Sequence[Node]) -> solver.ResidualCosts:
    """The solver's residual for `node`, with the time to recompute it from its parents."""
    seconds = None
    if not node.is_input:
        seconds = sum(map(program.seconds.__getitem__, _between(program, node, graph)))
    # Scalars and empty arrays are never offloaded. Residuals that a checkpoint inside a loop drops are not offloaded either:
    # with scanned layers, XLA fails on their copies ("Expected instruction to have shape equal to").
    movable = any(getattr(array.aval, "shape", ()) and array.bytes for array in node.members)
    movable &= program.own.isdisjoint(node.members)
    return solver.ResidualCosts(
        node.name,
        float(node.bytes),
        seconds,
        tuple(parent.name for parent in graph if parent in node.parents),
        may_save=not node.only_again,
        # The copy of a small array costs more than its bytes suggest.
        may_offload=movable and not node.only_again and (node.is_input or node.bytes >= _small(program, graph)),
        needed=node.needed,
        kept_seconds=sum(map(program.kept_seconds, node.members)),
    )
