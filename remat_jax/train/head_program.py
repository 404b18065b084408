"""A traced loss as a list of operations, in which the calls around and after an output head are inlined."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, JaxprEqn

from remat_jax import compat
from remat_jax.core.walk import bodies, equations

# Operations that a chunk repeats from a smaller or equal array, instead of reading their result from memory.
VIEWS = frozenset({"broadcast_in_dim", "convert_element_type", "copy", "reshape", "squeeze", "transpose"})


@dataclass(eq=False)
class Value:
    """An array of the program. `aval` is its type."""

    aval: Any


@dataclass(eq=False)
class Operation:
    """An operation of the program.

    Attributes:
      eqn: its equation.
      operands: for each operand a Value, or a literal of the jaxpr.
      results: its results.
      within: the inlined calls around the equation, the outermost first.
      region: if the node is a checkpoint region of several operations: the function that evaluates them.
    """

    eqn: Any
    operands: Sequence[Any]
    results: Sequence[Value]
    within: tuple[Any, ...] = ()
    region: Callable[..., list[Any]] | None = None

    @property
    def name(self) -> str:
        """The name of the primitive."""
        return str(self.eqn.primitive.name)

    @property
    def values(self) -> list[Value]:
        """The operands that are not literals."""
        return [operand for operand in self.operands if isinstance(operand, Value)]

    def __str__(self) -> str:
        source = next(filter(None, map(compat.source_line, (self.eqn, *reversed(self.within)))), "")
        result = self.results[0].aval if self.results else self.eqn.invars[0].aval
        return f"{self.name} {result.dtype}{list(result.shape)}" + (f" at {source}" if source else "")

    def run(self, inputs: Sequence[Any], **changed: Any) -> list[Any]:
        """Evaluate the operation on `inputs`, with some parameters of its equation changed."""
        with contextlib.ExitStack() as contexts:
            for call in self.within:
                contexts.enter_context(compat.eqn_context(call))
            if self.region is not None:
                return compat.bind_established(self.eqn, jax.make_jaxpr(self.region)(*inputs), inputs)
            return compat.bind(self.eqn, inputs, **changed)


def read(operand: Any, env: Mapping[Any, Any]) -> Any:
    """The value of an operand: a literal's own, or that in `env`."""
    return env[operand] if isinstance(operand, Value) else operand.val


@dataclass
class Program:
    """A traced function: `nodes` in the order of evaluation, `inputs`, `outputs` and the values of its constants."""

    inputs: list[Value]
    outputs: list[Any] = field(default_factory=list)
    nodes: list[Operation] = field(default_factory=list)
    constants: dict[Value, Any] = field(default_factory=dict)

    def makers(self) -> dict[Value, tuple[Operation, int]]:
        """For each computed value the node that computes it, and its place among the node's results."""
        return {value: (node, place) for node in self.nodes for place, value in enumerate(node.results)}


def program_of(jaxpr: ClosedJaxpr, heads: Collection[int] = (), varying: Sequence[bool] | None = None) -> Program:
    """The closed `jaxpr` as a Program. Calls are inlined if they are a plain `jit`, or around or after a head.

    `heads` are the ids of the equations that make logits. `varying` says which inputs depend on logits.
    """
    program = Program([Value(var.aval) for var in jaxpr.jaxpr.invars])
    flat = _Inlining(program, heads)
    flat.varying.update(value for value, flag in zip(program.inputs, varying or (), strict=False) if flag)
    program.outputs = flat.walk(jaxpr, program.inputs, ())
    return program


class _Inlining:
    def __init__(self, program: Program, heads: Collection[int]) -> None:
        self.program, self.heads, self.varying = program, heads, set[Value]()

    def walk(self, jaxpr: ClosedJaxpr, inputs: Sequence[Any], within: tuple[Any, ...]) -> list[Any]:
        """Append the operations of the closed `jaxpr`, and return its outputs."""
        env: dict[Any, Any] = dict(zip(jaxpr.jaxpr.invars, inputs, strict=True))
        for var, const in zip(jaxpr.jaxpr.constvars, jaxpr.consts, strict=True):
            env[var] = Value(var.aval)
            self.program.constants[env[var]] = const
        for eqn in jaxpr.jaxpr.eqns:
            operands = [_operand(atom, env) for atom in eqn.invars]
            results = self._inlined(eqn, operands, within)
            if results is None:
                results = [Value(var.aval) for var in eqn.outvars]
                self._append(Operation(eqn, operands, results, within))
            env.update(zip(eqn.outvars, results, strict=True))
        return [_operand(atom, env) for atom in jaxpr.jaxpr.outvars]

    def _append(self, node: Operation) -> None:
        self.program.nodes.append(node)
        if id(node.eqn) in self.heads or not self.varying.isdisjoint(node.values):
            self.varying.update(node.results)

    def _inlined(self, eqn: JaxprEqn, operands: Sequence[Any], within: tuple[Any, ...]) -> list[Any] | None:
        """The results of the call `eqn`, inlined; None if it stays a node."""
        inside = bodies(eqn)
        if not inside or len(inside[0].in_avals) != len(operands):
            return None
        around = any(id(inner) in self.heads for inner in equations(inside[0]))
        after = any(isinstance(operand, Value) and operand in self.varying for operand in operands)
        if compat.is_checkpoint(eqn) and around and not after:
            return self._split(eqn, inside[0], operands, within)
        is_open = compat.is_plain_jit(eqn) or compat.kind(eqn) == "call"
        if is_open or (compat.is_checkpoint(eqn) and after) or (compat.is_block(eqn) and around):
            return self.walk(inside[0], operands, (*within, eqn))
        return None

    def _split(self, eqn: JaxprEqn, body: ClosedJaxpr, operands: Sequence[Any], within: tuple[Any, ...]) -> list[Any]:
        """Inline a checkpoint region around a head: what precedes the head stays in a region with the same policy."""
        start = len(self.program.nodes)
        outputs = self.walk(body, operands, (*within, eqn))
        added = self.program.nodes[start:]
        before = [node for node in added if self.varying.isdisjoint(node.results)]
        if all(node.name in VIEWS for node in before):
            return outputs
        rest = [node for node in added if node not in set(before)]
        made = {value for node in before for value in node.results}
        wanted = [*(value for node in rest for value in node.values), *(each for each in outputs if isinstance(each, Value))]
        results = list(dict.fromkeys(value for value in wanted if value in made))
        inputs = list(dict.fromkeys(value for node in before for value in node.values if value not in made))

        def evaluate(*values: Any) -> list[Any]:
            env = dict(zip(inputs, values, strict=True))
            run_nodes(before, env)
            return [env[value] for value in results]

        region = Operation(eqn, inputs, results, within, evaluate)
        self.program.nodes[start:] = [region, *rest]
        return outputs


def viewed(program: Program) -> Callable[[Any], Any]:
    """A function from an operand to the value or literal that it shows: itself, unless it is the result of a view."""
    views: dict[Value, Any] = {}

    def shown(operand: Any) -> Any:
        return views.get(operand, operand) if isinstance(operand, Value) else operand

    for node in program.nodes:
        if node.name in VIEWS:
            views[node.results[0]] = shown(node.operands[0])
    return shown


def run_nodes(nodes: Iterator[Operation] | Sequence[Operation], env: dict[Any, Any]) -> None:
    """Evaluate `nodes` in order; `env` maps values to arrays, and gets the results."""
    for node in nodes:
        env.update(zip(node.results, node.run([read(operand, env) for operand in node.operands]), strict=True))


def _operand(atom: Any, env: Mapping[Any, Any]) -> Any:
    return atom if hasattr(atom, "val") else env[atom]
