"""Binomial checkpointing of a uniform chain: the closed form of its cost, and its schedule.

From Griewank and Walther, "Algorithm 799: Revolve" (ACM Transactions on Mathematical Software 26, 2000). A step advances a
state. Its adjoint runs the step once more and turns it round at once, so that nothing but states is ever kept.
"""

from __future__ import annotations

from functools import cache
from math import comb

from remat_jax.solver.problem import check_count, check_number
from tests.solver_oracles.program import Action, Compute, Free, Operation, Plan, Program, Value


def forward_steps(steps: int, slots: int) -> int:
    """The least number of forward runs to reverse ``steps`` steps with ``slots`` kept states, the first included.

    The run that an adjoint begins with counts. With r the least number for which C(slots + r, slots) ≥ steps, that is
    steps + r · steps − C(slots + r, slots + 1).

    Raises:
        PlanningError: an argument is not an integer, or less than 1.

    >>> forward_steps(10, 3), forward_steps(64, 10)
    (25, 180)
    """
    check_count("steps", steps)
    check_count("slots", slots)
    repeats = next(r for r in range(steps) if comb(slots + r, slots) >= steps)
    return steps + repeats * steps - comb(slots + repeats, slots + 1)


def revolve(
    steps: int, slots: int, *, state_bytes: float = 1.0, forward_seconds: float = 1.0, backward_seconds: float = 1.0
) -> Plan:
    """The schedule with the fewest forward steps.

    Its memory is the states kept and, while a step advances, the one at work, which is overwritten from step to step.
    Cotangents are not counted.

    Args:
        steps: how long the chain is.
        slots: how many states may be kept, the first included.
        state_bytes: of one state.
        forward_seconds: of one step.
        backward_seconds: of turning one round, its own run forward not included.

    Raises:
        PlanningError: an argument is wrong.

    >>> plan = revolve(10, 3)
    >>> plan.seconds, plan.peak_bytes
    (35.0, 4.0)
    """
    check_count("steps", steps)
    check_count("slots", slots)
    for name, number in (
        ("state_bytes", state_bytes),
        ("forward_seconds", forward_seconds),
        ("backward_seconds", backward_seconds),
    ):
        check_number(name, number)
    actions, states = _schedule(steps, slots)
    total = forward_steps(steps, slots) * forward_seconds + steps * backward_seconds
    program = _program(steps, state_bytes, forward_seconds, backward_seconds)
    return Plan(program, actions, total, states * state_bytes, lower_bound=total)


@cache
def _total(steps: int, slots: int) -> int:
    return forward_steps(steps, slots)


def _advance_by(steps: int, slots: int) -> int:
    """The distance to the next kept state: any distance that leads to the closed form's total."""
    total = _total(steps, slots)
    return next(far for far in range(1, steps) if far + _total(steps - far, slots - 1) + _total(far, slots) == total)


def _schedule(steps: int, slots: int) -> tuple[tuple[Action, ...], int]:
    """The actions, and the largest number of states at once."""
    actions: list[Action] = []
    most = 1
    # A part to reverse: its first state, its steps, its slots with that state's, and the states kept before it.
    parts: list[tuple[int, int, int, int] | Free] = [(0, steps, slots, 0)]
    while parts:
        part = parts.pop()
        if isinstance(part, Free):
            actions.append(part)
            continue
        first, length, room, before = part
        most = max(most, before + min(length, 2))
        if length == 1 or room == 1:
            _reverse_from(actions, first, length)
            continue
        far = _advance_by(length, room)
        _advance(actions, first, far)
        parts += [(first, far, room, before), Free(f"x{first + far}"), (first + far, length - far, room - 1, before + 1)]
    return tuple(actions), most


def _reverse_from(actions: list[Action], first: int, length: int) -> None:
    """Reverse steps with one kept state: each starts from there again."""
    for last in reversed(range(first, first + length)):
        _advance(actions, first, last - first)
        actions += [Compute(f"adjoint {last}", (f"x{last} cotangent",)), Free(f"x{last + 1} cotangent")]
        if last > first:
            actions.append(Free(f"x{last}"))


def _advance(actions: list[Action], first: int, far: int) -> None:
    for step in range(first, first + far):
        actions.append(Compute(f"advance {step}", (f"x{step + 1}",)))
        if step > first:
            actions.append(Free(f"x{step}"))


def _program(steps: int, state_bytes: float, forward: float, backward: float) -> Program:
    states = [Value(f"x{index}", state_bytes) for index in range(steps + 1)]
    cotangents = [Value(f"x{index} cotangent") for index in range(steps + 1)]
    operations: list[Operation] = []
    for index in range(steps):
        operations.append(Operation(f"advance {index}", forward, (f"x{index}",), (f"x{index + 1}",), in_place=True))
        reads = (f"x{index}", f"x{index + 1} cotangent")
        operations.append(Operation(f"adjoint {index}", forward + backward, reads, (f"x{index} cotangent",)))
    return Program((*states, *cotangents), tuple(operations), ("x0", f"x{steps} cotangent"), ("x0 cotangent",))
