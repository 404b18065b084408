"""Finds the sums over examples through which a traced loss depends on its batch.

    loss = f(Σ_rows g(row))          g per row of the batch, f reads these sums, and what does not depend on the batch

The search follows the rows of the batch, the leading axis of its arrays, through the operations, also inside loops, branches,
checkpoints and calls with a custom derivative.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
from jax.extend.core import ClosedJaxpr

from remat_jax import compat
from remat_jax.core.axes import AxisPlace, Passage
from remat_jax.core.walk import bodies
from remat_jax.train.head_program import VIEWS, Operation, Program, Value, program_of, viewed
from remat_jax.train.head_region import Key, NotPerToken, RegionStep, TokenRegion, text
from remat_jax.train.head_rules import DerivativeRule

ROWS = AxisPlace(0)
"""Where the rows of an array of the batch are."""
_ADDITIONS = frozenset(("add", "add_any"))
_DRAWN = "random_bits"


class ExampleRegion(TokenRegion):
    """The operations that compute something for each row, up to the sums over rows.

    Unlike a head's region, it may end anywhere: `emitted` are the values that an operation on all rows reads, and `reasons`
    says for each which operation this is. `drawn` are the random numbers drawn for each row, and results of calls that draw
    some. `inner` are the regions of the bodies of a call or loop, and then that of its derivative rule.
    """

    things = "examples"

    def __init__(self, program: Program, given: Mapping[Value, AxisPlace], rows: int, *, in_rule: bool = False) -> None:
        super().__init__(program, given, rows, in_rule=in_rule, calls=_step_of_call)
        self.reasons: dict[Value, str] = {}
        self.drawn: set[Value] = set()
        self.inner: dict[Operation, list[TokenRegion]] = {}

    def want(self, value: Value, cut: AxisPlace | None) -> None:
        """Find where the rows of `value`, which is not computed from the batch, come from."""
        if cut is not None:
            super().want(value, cut)

    def emit(self, value: Value, why: str) -> None:
        """Note that an operation on all rows reads `value`."""
        self.emitted[value] = self.cuts[value]
        self.reasons.setdefault(value, why)

    def find_rows(self, free: Collection[Value] = ()) -> None:
        """Find the region; its rows may also come from `free`.

        Raises:
          NotPerToken: it reads another array whose rows differ and which is not computed from the batch.
        """
        self.find()
        self.check_reads([key for key in self.frontier if key[0] in free])

    def check_reads(self, keys: Collection[Key]) -> None:
        """Raise NotPerToken if the rows of an array differ that is neither computed from the batch nor in `keys`."""
        for value, cut in self.frontier:
            if cut is not None and (value, cut) not in keys and not self._rows_are_alike(value, cut):
                raise NotPerToken(f"{self._made(value)} has a row for each example, but is not computed from the batch")

    def _rows_are_alike(self, value: Value, cut: AxisPlace) -> bool:
        maker = self._makers.get(value)
        if maker is not None and maker[0].name == _DRAWN:
            self.drawn.add(value)
            return True
        known = self.known(value)
        if known is None:
            return False
        rows = np.moveaxis(known, cut.dim, 0).reshape(cut.outer, self.lengths[0], cut.inner, -1)
        return bool(np.all(rows == rows[:, :1]))

    def _made(self, value: Value) -> str:
        maker = self._makers.get(value)
        return text(value) if maker is None else str(maker[0])

    def outcome(self, value: Any) -> AxisPlace | str:
        """Where the rows of an output are; or "sum", or "whole" if it does not depend on the batch.

        Raises:
          NotPerToken: an operation on all rows computes it.
        """
        if not isinstance(value, Value):
            return "whole"
        if value in self.cuts:
            return self.cuts[value]
        if value in self.sums:
            return "sum"
        if value in self.after:
            raise NotPerToken(next(iter(self.reasons.values()), f"{self.after[value]} reads a sum over {self.things}"))
        return "whole"


Outcome = AxisPlace | str


def _step_of_call(region: TokenRegion, node: Operation) -> RegionStep | None:
    """The step of a call or loop whose bodies treat all rows alike; None if they do not."""
    assert isinstance(region, ExampleRegion)
    cuts = [region.cuts.get(each) if isinstance(each, Value) else None for each in node.operands]
    try:
        if node.name == "scan":
            operands, outcomes = _through_scan(region, node, cuts)
        elif node.name == "cond":
            operands, outcomes = _through_branches(region, node, cuts)
        else:
            operands, outcomes = _through_call(region, node, cuts)
    except (NotPerToken, _Unknown) as error:
        region.inner.pop(node, None)
        for value in node.values:
            if value in region.cuts:
                region.emit(value, str(error) or f"{node} may combine {region.things}")
        return None
    results = _cut(outcomes)
    whole = tuple(place for place, each in enumerate(outcomes) if each == "whole")
    return RegionStep(node, Passage(tuple(operands), results, is_summed="sum" in outcomes), whole=whole)


def _cut(outcomes: Sequence[Outcome]) -> tuple[AxisPlace | None, ...]:
    return tuple(each if isinstance(each, AxisPlace) else None for each in outcomes)


class _Unknown(Exception):
    """Raised for a call whose operands are not those of the function inside it."""


def _inner(region: ExampleRegion, node: Operation, body: ClosedJaxpr, cuts: Sequence[AxisPlace | None]) -> ExampleRegion:
    """The region of a body of `node` whose operands have rows at `cuts`."""
    if len(body.in_avals) != len(cuts):
        raise _Unknown
    program = program_of(body)
    given = {value: cut for value, cut in zip(program.inputs, cuts, strict=True) if cut is not None}
    inner = ExampleRegion(program, given, region.lengths[0], in_rule=region.in_rule)
    inner.find_rows(program.inputs)
    if inner.drawn:
        region.drawn.update(node.results)
    return inner


def _through_body(
    region: ExampleRegion, node: Operation, body: ClosedJaxpr, cuts: Sequence[AxisPlace | None]
) -> tuple[list[AxisPlace | None], list[Outcome]]:
    inner = _inner(region, node, body, cuts)
    region.inner.setdefault(node, []).append(inner)
    operands = [inner.place_of(value) for value in inner.program.inputs]
    return operands, [inner.outcome(value) for value in inner.program.outputs]


def _through_call(
    region: ExampleRegion, node: Operation, cuts: Sequence[AxisPlace | None]
) -> tuple[list[AxisPlace | None], list[Outcome]]:
    body, *others = bodies(node.eqn)
    types = ([atom.aval.shape for atom in atoms] for atoms in (node.eqn.invars, node.eqn.outvars))
    if others or list(types) != [[aval.shape for aval in avals] for avals in (body.in_avals, body.out_avals)]:
        raise _Unknown
    operands, outcomes = _through_body(region, node, body, cuts)
    if compat.kind(node.eqn).startswith("custom_") and not region.in_rule:
        rule = DerivativeRule(
            node.eqn, operands, _cut(outcomes), region.lengths[0], functools.partial(ExampleRegion, in_rule=True)
        )
        region.inner[node].append(rule.region)
    return operands, outcomes


def _through_branches(
    region: ExampleRegion, node: Operation, cuts: Sequence[AxisPlace | None]
) -> tuple[list[AxisPlace | None], list[Outcome]]:
    found = [_through_body(region, node, body, cuts[1:]) for body in bodies(node.eqn)]
    outcomes = []
    for each in zip(*(outcomes for _, outcomes in found), strict=True):
        if len(set(each)) > 1:
            raise NotPerToken(f"the branches of {node} differ in what they sum over {region.things}")
        outcomes.append(each[0])
    operands = [
        next((cut for cut in each if cut is not None), None) for each in zip(*(places for places, _ in found), strict=True)
    ]
    return [None, *operands], outcomes


def _through_scan(
    region: ExampleRegion, node: Operation, cuts: Sequence[AxisPlace | None]
) -> tuple[list[AxisPlace | None], list[Outcome]]:
    consts, carried = compat.scan_layout(node.eqn)
    body = bodies(node.eqn)[0]
    first = consts + carried
    if any(cut is not None and cut.dim == 0 for cut in cuts[first:]):
        raise NotPerToken(f"{node} is a loop over {region.things}")
    given = [*cuts[:first], *(cut and cut.at(cut.dim - 1) for cut in cuts[first:])]
    while True:
        inner = _inner(region, node, body, given)
        totals = _totals(inner, consts, carried)
        outcomes = ["sum" if place in totals else inner.outcome(value) for place, value in enumerate(inner.program.outputs)]
        grown = [*given]
        for place, outcome in enumerate(outcomes[:carried]):
            before = given[consts + place]
            if isinstance(outcome, AxisPlace) and before is None:
                grown[consts + place] = outcome
            elif outcome != (before or "whole") and not (outcome == "sum" and place in totals):
                raise NotPerToken(f"{node} carries {region.things} in one iteration, and sums over them in another")
        if grown == given:
            break
        given = grown
    region.inner[node] = [inner]
    for place in totals:
        _check_start(region, node.operands[consts + place], node)
    operands = [inner.place_of(value) for value in inner.program.inputs]
    operands = [*operands[:first], *(cut and cut.at(cut.dim + 1) for cut in operands[first:])]
    stacked = [each.at(each.dim + 1) if isinstance(each, AxisPlace) else each for each in outcomes[carried:]]
    return operands, [*outcomes[:carried], *stacked]


def _totals(inner: ExampleRegion, consts: int, carried: int) -> Collection[int]:
    """The carried places to which each iteration only adds a sum over rows."""
    program, shown, found = inner.program, viewed(inner.program), []
    makers = program.makers()
    readers = [shown(each) for node in program.nodes if node.name not in VIEWS for each in node.operands]
    for place in range(carried):
        before, after = program.inputs[consts + place], shown(program.outputs[place])
        node = makers.get(after, (None, 0))[0] if isinstance(after, Value) else None
        if node is None or node.name not in _ADDITIONS:
            continue
        added = [each for each in map(shown, node.operands) if each is not before]
        is_read_once = sum(each is before for each in (*readers, *map(shown, program.outputs))) == 1
        if len(added) == 1 and is_read_once and isinstance(added[0], Value) and added[0] in inner.sums:
            found.append(place)
    return found


def _check_start(region: ExampleRegion, start: Any, node: Operation) -> None:
    """Raise NotPerToken unless a sum over rows starts at 0."""
    known = region.known(start)
    if known is None or np.any(known != 0):
        raise NotPerToken(f"{node} adds a sum over {region.things} to another value")
