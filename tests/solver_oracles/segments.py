"""Equal segments of identical layers, and decreasing segments with the lowest peak: exact optima over integers.

A segment keeps its input, and all of its layers run again before its backward pass. The rule of √L segments is from Chen et
al., "Training Deep Nets with Sublinear Memory Cost" (arXiv:1604.06174); `docs/notes/segments.md` has its figures on a model.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from remat_jax.solver.problem import check_count, check_number
from tests.solver_oracles.program import Action, Compute, Free, Operation, Plan, Program, Value


@dataclass(frozen=True)
class SegmentPlan(Plan):
    """A plan of segments.

    Attributes:
        lengths: how many layers each segment has, the first nearest the input.
    """

    lengths: tuple[int, ...] = ()


def segments_of_length(
    layers: int, length: int, input_bytes: float, full_bytes: float, forward_seconds: float = 1.0, backward_seconds: float = 2.0
) -> SegmentPlan:
    """Segments of ``length`` layers; the first one takes the rest.

    Its peak is ⌈layers / length⌉ · input_bytes + length · full_bytes, reached in the backward pass of the last segment.

    Args:
        input_bytes: of a layer's input, the one thing that a segment keeps.
        full_bytes: of all residuals of one layer.
        forward_seconds, backward_seconds: of one layer.

    Raises:
        PlanningError: an argument is wrong.

    >>> plan = segments_of_length(10, 4, 1.0, 3.0)
    >>> plan.lengths, plan.peak_bytes, plan.seconds
    ((2, 4, 4), 15.0, 40.0)
    """
    check_count("layers", layers)
    check_count("length", length, most=layers)
    rest = layers % length
    return _plan(
        ((rest,) if rest else ()) + (length,) * (layers // length), input_bytes, full_bytes, forward_seconds, backward_seconds
    )


def uniform_segments(
    layers: int, input_bytes: float, full_bytes: float, forward_seconds: float = 1.0, backward_seconds: float = 2.0
) -> SegmentPlan:
    """The equal segments with the lowest peak, over all lengths; of several the shortest.

    Raises:
        PlanningError: an argument is wrong.

    >>> uniform_segments(64, 1.0, 1.0).peak_bytes, uniform_segments(64, 1.0, 17.0).lengths[0]
    (16.0, 2)
    """
    check_count("layers", layers)
    lengths = range(1, layers + 1)
    best = min(lengths, key=lambda length: (math.ceil(layers / length) * input_bytes + length * full_bytes, length))
    return segments_of_length(layers, best, input_bytes, full_bytes, forward_seconds, backward_seconds)


def sqrt_segments(
    layers: int, input_bytes: float, full_bytes: float, forward_seconds: float = 1.0, backward_seconds: float = 2.0
) -> SegmentPlan:
    """Chen's rule: about √layers segments of about √layers layers.

    It is the best equal cut where a layer's residuals are as large as its input; `uniform_segments` is where they are not.

    Raises:
        PlanningError: an argument is wrong.

    >>> sqrt_segments(64, 1.0, 17.0).peak_bytes, uniform_segments(64, 1.0, 17.0).peak_bytes
    (144.0, 66.0)
    """
    check_count("layers", layers)
    return segments_of_length(layers, math.isqrt(layers), input_bytes, full_bytes, forward_seconds, backward_seconds)


def shortening_segments(
    layers: int, input_bytes: float, full_bytes: float, forward_seconds: float = 1.0, backward_seconds: float = 2.0
) -> SegmentPlan:
    """The cut with the lowest peak: segments that become shorter towards the loss.

    When segment j (from 1) runs backward there are j inputs and its own residuals, because what is behind it is gone. Within
    a peak of P it may therefore have ⌊(P − j · input_bytes) / full_bytes⌋ layers. Some segment j of n layers has exactly the
    least P for which these reach all layers, so that P is among j · input_bytes + n · full_bytes.

    Raises:
        PlanningError: an argument is wrong.

    >>> shortening_segments(64, 1.0, 1.0).peak_bytes, shortening_segments(7, 1.0, 1.0).lengths
    (12.0, (4, 3))
    """
    check_count("layers", layers)
    check_number("input_bytes", input_bytes)
    check_number("full_bytes", full_bytes)
    counts = range(1, layers + 1)
    peaks = sorted(
        {index * input_bytes + length * full_bytes for index in counts for length in counts if index + length <= layers + 1}
    )
    low, high = 0, len(peaks) - 1
    while low < high:
        middle = (low + high) // 2
        reached = sum(_within(layers, input_bytes, full_bytes, peaks[middle])) >= layers
        low, high = (low, middle) if reached else (middle + 1, high)
    lengths = _within(layers, input_bytes, full_bytes, peaks[low])
    return _plan(lengths, input_bytes, full_bytes, forward_seconds, backward_seconds)


def _within(layers: int, input_bytes: float, full_bytes: float, peak: float) -> tuple[int, ...]:
    """The longest segments within a peak, until they have all layers or none fits."""
    lengths: list[int] = []
    left = layers
    while left:
        inputs = (len(lengths) + 1) * input_bytes
        if inputs + left * full_bytes <= peak:
            return (*lengths, left)
        # Rounding must not lose the layer that meets the peak exactly.
        fit = math.floor((peak - inputs) / full_bytes * (1 + 1e-12)) if full_bytes else 0
        if fit < 1:
            break
        lengths.append(min(fit, left))
        left -= lengths[-1]
    return tuple(lengths)


def _plan(lengths: Sequence[int], input_bytes: float, full_bytes: float, forward: float, backward: float) -> SegmentPlan:
    for name, number in (("input_bytes", input_bytes), ("full_bytes", full_bytes)):
        check_number(name, number)
    for name, number in (("forward_seconds", forward), ("backward_seconds", backward)):
        check_number(name, number)
    layers = sum(lengths)
    peak = max(index * input_bytes + length * full_bytes for index, length in enumerate(lengths, 1))
    program = _program(lengths, input_bytes, full_bytes, forward, backward)
    return SegmentPlan(program, _actions(len(lengths)), layers * (2 * forward + backward), peak, lengths=tuple(lengths))


def _program(lengths: Sequence[int], input_bytes: float, full_bytes: float, forward: float, backward: float) -> Program:
    values, operations = [Value("x0"), Value("x0 cotangent")], []
    for number, length in enumerate(lengths, 1):
        before, after = f"x{number - 1}", f"x{number}"
        values += [Value(after), Value(f"{after} cotangent"), Value(f"{number}:input", input_bytes)]
        values.append(Value(f"{number}:residuals", length * full_bytes))
        operations += [
            Operation(f"forward {number}", length * forward, (before,), (after, f"{number}:input")),
            Operation(f"again {number}", length * forward, (f"{number}:input",), (f"{number}:residuals",)),
            Operation(
                f"backward {number}", length * backward, (f"{number}:residuals", f"{after} cotangent"), (f"{before} cotangent",)
            ),
        ]
    last = f"x{len(lengths)}"
    operations.append(Operation("loss", 0.0, (last,), (f"{last} cotangent",)))
    return Program(tuple(values), tuple(operations), ("x0",), ("x0 cotangent",))


def _actions(count: int) -> tuple[Action, ...]:
    actions: list[Action] = []
    for number in range(1, count + 1):
        actions += [Compute(f"forward {number}", (f"x{number}", f"{number}:input")), Free(f"x{number - 1}")]
    actions += [Compute("loss", (f"x{count} cotangent",)), Free(f"x{count}")]
    for number in range(count, 0, -1):
        actions += [
            Compute(f"again {number}", (f"{number}:residuals",)),
            Compute(f"backward {number}", (f"x{number - 1} cotangent",)),
            *map(Free, (f"x{number} cotangent", f"{number}:residuals", f"{number}:input")),
        ]
    return tuple(actions)
