"""The values of scalar instructions of a compiled module, and the number of iterations of its loops."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable

from remat_jax.errors import UnsupportedError
from remat_jax.memory.hlo.text import Computation, Instruction

_ARITHMETIC: dict[str, Callable[..., int]] = {
    "add": operator.add,
    "subtract": operator.sub,
    "multiply": operator.mul,
    "divide": lambda a, b: int(a / b),
    "remainder": lambda a, b: int(math.fmod(a, b)),
    "maximum": max,
    "minimum": min,
    "and": operator.and_,
    "or": operator.or_,
    "negate": operator.neg,
    "not": lambda a: 1 - a,
    "select": lambda which, a, b: a if which else b,
    "clamp": lambda low, a, high: max(low, min(a, high)),
    **dict.fromkeys(("convert", "copy", "bitcast", "reshape", "broadcast"), lambda a: a),
}
_COMPARE = {"LT": operator.lt, "LE": operator.le, "GT": operator.gt, "GE": operator.ge, "EQ": operator.eq, "NE": operator.ne}


def trip_count(loop: Instruction, unknown: int) -> int:
    """The number of iterations of a `while` loop; `unknown` if neither the compiler nor the loop's condition tells it.

    XLA:TPU writes no trip count. There the condition compares a counter with a constant, and the body adds a constant to it.

    >>> from remat_jax.memory.hlo.text import parse
    >>> module = parse('''
    ... %body (s: (s32[], f32[2])) -> (s32[], f32[2]) {
    ...   %s = (s32[], f32[2]) parameter(0)
    ...   %i = s32[] get-tuple-element(%s), index=0
    ...   %two = s32[] constant(2)
    ...   %next = s32[] add(%i, %two)
    ...   %x = f32[2] get-tuple-element(%s), index=1
    ...   ROOT %t = (s32[], f32[2]) tuple(%next, %x)
    ... }
    ... %condition (s: (s32[], f32[2])) -> pred[] {
    ...   %s = (s32[], f32[2]) parameter(0)
    ...   %i = s32[] get-tuple-element(%s), index=0
    ...   %end = s32[] constant(9)
    ...   ROOT %less = pred[] compare(%i, %end), direction=LT
    ... }
    ... ENTRY %main (x: f32[2]) -> (s32[], f32[2]) {
    ...   %x = f32[2] parameter(0)
    ...   %zero = s32[] constant(0)
    ...   %t = (s32[], f32[2]) tuple(%zero, %x)
    ...   ROOT %loop = (s32[], f32[2]) while(%t), condition=%condition, body=%body
    ... }''')
    >>> trip_count(module.entry.root, unknown=1)
    5
    """
    if "known_trip_count" in loop.config:
        return int(loop.config["known_trip_count"].get("n", unknown))
    try:
        return _counted(loop)
    except (UnsupportedError, LookupError, RecursionError, ValueError, ArithmeticError):
        return unknown


def _counted(loop: Instruction) -> int:
    """The iterations that a loop's condition allows. Raises UnsupportedError if the counter does not grow by a constant."""
    condition, body = (loop.home.module.computations[loop.attribute(key) or ""] for key in ("condition", "body"))
    compare, state = condition.root, loop.input(0)
    counter = _counter(condition)
    first = None if state is None else state.input(counter)
    following = body.root.input(counter)
    if compare.opcode != "compare" or first is None or following is None:
        raise UnsupportedError(f"loop {loop.name!r}: its condition compares no counter with a constant")

    def goes_on(value: int) -> bool:
        return bool(scalar_value(compare, {counter: value}, None))

    start = scalar_value(first, {}, None)
    step = scalar_value(following, {counter: start}, None) - start
    if not goes_on(start):
        return 0
    if step == 0 or scalar_value(following, {counter: start + step}, None) != start + 2 * step:
        raise UnsupportedError(f"loop {loop.name!r}: its counter does not grow by a constant")
    bounds = [scalar_value(operand, {}, None) for operand in compare.inputs if operand is not None and _is_constant(operand)]
    if len(bounds) != 1:
        raise UnsupportedError(f"loop {loop.name!r}: its condition compares no counter with a constant")
    count = math.ceil((bounds[0] - start) / step)
    # LE and GE allow one more iteration if the counter meets the bound.
    count += goes_on(start + count * step)
    if count <= 0 or not goes_on(start + (count - 1) * step) or goes_on(start + count * step):
        raise UnsupportedError(f"loop {loop.name!r}: its condition does not compare the counter itself with a constant")
    return count


def _counter(condition: Computation) -> int:
    """The place of the counter in the loop's state: the only element that the condition's comparison reads."""
    places, reached = set[int](), [condition.root]
    while reached:
        instruction = reached.pop()
        if instruction.opcode == "get-tuple-element":
            places.add(instruction.index)
        else:
            reached += filter(None, instruction.inputs)
    if len(places) != 1:
        raise UnsupportedError(f"condition {condition.name!r}: it reads {len(places)} elements of the loop's state")
    return places.pop()


def _is_constant(instruction: Instruction) -> bool:
    operands = [operand for operand in instruction.inputs if operand is not None]
    return instruction.opcode == "constant" or (bool(operands) and all(map(_is_constant, operands)))


def scalar_value(instruction: Instruction, counters: dict[int, int], parameter: Callable[[int], int] | None) -> int:
    """The integer value of a scalar instruction.

    `counters` maps the index of a counter in the loop's state to its value; `parameter(i)` is the value of parameter i.
    """
    opcode = instruction.opcode
    if opcode == "constant":
        return int({"true": 1, "false": 0}.get(instruction.argument, instruction.argument))
    if opcode == "parameter" and parameter is not None:
        return parameter(int(instruction.argument))
    if opcode == "get-tuple-element" and instruction.index in counters:
        return counters[instruction.index]
    operands = [operand for operand in instruction.inputs if operand is not None]

    def of(index: int) -> int:
        return scalar_value(operands[index], counters, parameter)

    if opcode == "compare":
        return int(_COMPARE[instruction.attribute("direction") or "EQ"](of(0), of(1)))
    if opcode in _ARITHMETIC:
        return _ARITHMETIC[opcode](*map(of, range(len(operands))))
    if opcode in ("fusion", "call") and instruction.bodies:
        return scalar_value(instruction.bodies[0].root, {}, of)
    raise UnsupportedError(
        f"instruction {instruction.name!r} ({opcode}) of {instruction.home.name!r}: an index or a loop's counter cannot be "
        "traced through this instruction, so a copy cannot be checked or a loop cannot be counted"
    )
