"""The device buffers that are alive during a compiled step and at its peak, by module path.

The buffers are read from XLA's dump: the optimised program, its buffer assignment and the live range of each buffer. Module
paths come from operator names. XLA's own peak is not used, since it counts host buffers as device memory.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import NamedTuple

from remat_jax.core.module_paths import module_path
from remat_jax.memory.hlo.text import HloModule, Instruction, elements, parse

DEVICE_SPACE = 0
_LARGE = 0.0002
"""Buffers of at least this share of the peak are tracked one by one. It is low because arrays of unrolled models are small."""
RESULT = "result"
"""The phase of a result that does not reuse an argument's buffer."""
_RANGE = re.compile(r"^    (?P<name>[^\s{]+)\{(?P<index>[\d,]*)\}:(?P<start>\d+)-(?P<end>\d+)$")
_ALLOCATION = re.compile(r"^allocation (?P<number>\d+): ")
_VALUE = re.compile(
    r"^ value: <\d+ (?P<name>[^\s{]+)(?:\{(?P<index>[\d,]*)\})?(?: \(phi\))? @(?P<space>\d+)> "
    r"\(size=(?P<bytes>\d+),offset=(?P<offset>\d+)\)"
)
_SLICES = ("fusion", "dynamic-slice", "dynamic-update-slice")


@dataclass(frozen=True)
class LiveBuffer:
    """A device buffer of a compiled step, alive at the peak or, in a `Timeline`, at another time.

    Attributes:
      name: `module/path:primitive`, like a residual's name, or the argument's name.
      module: the module path alone; empty if the operator's name has none.
      phase: `argument`, `forward` (computed and kept by the forward pass), `recomputed`, `backward`, or `other` (outside the
        gradient: the optimizer's update, and computation that needs no gradient); in a `Timeline` also `RESULT`.
      nbytes: the size of the buffer in bytes.
      shape: as XLA writes it, such as `f32[16,256]`.
      collective: the kind of collective that returns or reads the buffer, such as `all-gather` for a gathered parameter and
        `reduce-scatter` for a gradient before its sum over devices; empty if no collective does.
    """

    name: str
    module: str
    phase: str
    nbytes: int
    shape: str
    collective: str = ""


_Value = tuple[str, str]
"""An instruction's name, and the index of an element of its nested result in XLA's text form, such as `1,0`."""
_Places = tuple[int, ...]
"""The index of an element of a nested tuple, as numbers: `(1, 0)`."""


def _traced(
    instruction: Instruction, places: _Places, step: Callable[[Instruction, _Places], tuple[Instruction | None, _Places]]
) -> tuple[Instruction, _Places]:
    """Follow an element of an instruction's result to its origin, by repeating `step` until it returns None as the source."""
    seen = set()
    while (instruction, places) not in seen:
        seen.add((instruction, places))
        source, places_in_source = step(instruction, places)
        if source is not None:
            instruction, places = source, places_in_source
    return instruction, places


def _renamed(instruction: Instruction, places: _Places) -> tuple[Instruction | None, _Places]:
    """The source of an element if the instruction only renames it (a bitcast, or a tuple packed or unpacked); else None."""
    if instruction.opcode == "bitcast":
        return instruction.input(0), places
    if instruction.opcode == "get-tuple-element":
        return instruction.input(0), (instruction.index, *places)
    if instruction.opcode == "tuple" and places:
        return instruction.input(places[0]), places[1:]
    return None, places


def _slice_source(instruction: Instruction) -> Instruction | None:
    """The stack that a `dynamic_slice` reads, or the array that a `dynamic_update_slice` writes into a stack; else None."""
    primitive = instruction.op_name.rpartition("/")[2]
    if primitive not in ("dynamic_slice", "dynamic_update_slice") or instruction.opcode not in _SLICES:
        return None
    arrays = [source for source in instruction.inputs if source is not None and "s32[]" not in source.shape]
    # A fusion may change the stack under another shape or layout, but not under another size.
    is_update = primitive == "dynamic_update_slice"
    return next((source for source in arrays if not is_update or _size(source) != _size(instruction)), None)


def _size(instruction: Instruction) -> int:
    """The number of elements of the result's arrays."""
    return sum(math.prod(array.dims) for array in instruction.arrays)


def _is_unchanged(written: Instruction | None, place: int) -> bool:
    """Whether a loop's body, which returns `written` as element `place` of its state, returns this element unchanged."""
    if written is None or written.opcode != "get-tuple-element" or written.index != place:
        return False
    source = written.input(0)
    return source is not None and source.opcode == "parameter"


class Schedule:
    """The live range and the place in memory of each device buffer of a compiled step, from three texts of XLA's dump."""

    def __init__(self, program: str | HloModule, assignment: str, live_ranges: str) -> None:
        self.places = _device_places(assignment)
        matches = [match for match in map(_RANGE.match, live_ranges.splitlines()) if match is not None]
        ranges = {(match["name"], match["index"]): (int(match["start"]), int(match["end"])) for match in matches}
        self.ranges = {value: span for value, span in ranges.items() if value in self.places}
        module = parse(program)
        self._entry = module.entry_name
        self._instructions = {each.name: each for computation in module.computations.values() for each in computation}
        self._loops = {each.attribute("body"): each for each in self._instructions.values() if each.opcode == "while"}

    def buffer(self, value: _Value) -> LiveBuffer:
        """The description of a value's buffer."""
        (name, index), nbytes = value, self.places[value].nbytes
        instruction = self._instructions.get(name)
        if instruction is None:
            return LiveBuffer(name, "", "other", nbytes, "")
        places = tuple(int(place) for place in index.split(",") if place)
        shape = re.sub(r"\{.*", "", _element(instruction.shape, places))
        origin = _traced(instruction, places, self._before)[0]
        if origin.opcode == "parameter" and origin.home.name == self._entry:
            is_argument = instruction.opcode in ("parameter", "get-tuple-element", "tuple", "while")
            # A copy or a slice of an argument, such as one layer of stacked parameters, has a buffer of its own.
            phase = "argument" if is_argument else module_path(instruction.op_name)[2]
            return LiveBuffer(origin.op_name or name, "", phase, nbytes, shape)
        path, primitive, phase = module_path(origin.op_name)
        return LiveBuffer(f"{path}:{primitive}" if path else primitive or name, path, phase, nbytes, shape)

    def at_peak(self) -> list[LiveBuffer]:
        """The device buffers that are alive at the peak, the largest first."""
        totals = self.totals()
        peak = max(totals, key=lambda moment: (totals[moment], -moment), default=0)
        # A loop's state has one name outside the loop and another inside. Values that share a place are the same buffer.
        alive = {self.places[value]: value for value, (start, end) in self.ranges.items() if start <= peak <= end}
        # A collective may refer to a place in memory by any of the values that share this place.
        kinds = {
            self.places[value]: kind
            for value, kind in self._exchanged().items()
            if value in self.ranges and self.ranges[value][0] <= peak <= self.ranges[value][1]
        }
        buffers = [replace(self.buffer(value), collective=kinds.get(place, "")) for place, value in alive.items()]
        return sorted(buffers, key=lambda buffer: (-buffer.nbytes, buffer.name))

    def totals(self, most: float = math.inf) -> dict[int, int]:
        """A dict from each moment when a live range begins to the total bytes of the live buffers of at most `most` bytes."""
        events: dict[int, list[tuple[BufferPlace, int]]] = {}
        for value, (start, end) in self.ranges.items():
            for moment, change in ((start, 1), (end + 1, -1)):
                events.setdefault(moment, []).append((self.places[value], change))
        begins = {start for start, _ in self.ranges.values()}
        alive: Counter[BufferPlace] = Counter()
        total, totals = 0, {}
        for moment in sorted(events):
            for place, change in events[moment]:
                before, alive[place] = alive[place], alive[place] + change
                if place.nbytes <= most:
                    total += place.nbytes * ((alive[place] > 0) - (before > 0))
            if moment in begins:
                totals[moment] = total
        return totals

    def _exchanged(self) -> dict[_Value, str]:
        """A dict from value to kind of collective, for the operands of collectives and all elements of their results."""
        kinds: dict[_Value, str] = {}
        for instruction in self._instructions.values():
            if instruction.collective is not None:
                values = [(instruction, places) for places in _indices(instruction.shape)]
                values += [_traced(operand, (), _renamed) for operand in instruction.inputs if operand is not None]
                kinds |= {(each.name, ",".join(map(str, places))): instruction.collective.kind for each, places in values}
        return kinds

    def _before(self, instruction: Instruction, places: _Places) -> tuple[Instruction | None, _Places]:
        """The source of an element of an instruction's result; None if the instruction computes the element."""
        source, places_in_source = _renamed(instruction, places)
        if source is not None:
            return source, places_in_source
        if instruction.opcode in ("copy", "copy-start", "copy-done", "optimization-barrier"):
            return instruction.input(0), places
        if (stack := _slice_source(instruction)) is not None:
            return stack, ()
        if instruction.opcode == "while" and places:
            return (instruction.bodies[0].root if instruction.bodies else None), places
        loop, root = self._loops.get(instruction.home.name), instruction.home.root
        if instruction.opcode == "parameter" and places and loop is not None and root.opcode == "tuple":
            written = root.input(places[0])
            return (loop.input(0), places) if _is_unchanged(written, places[0]) else (written, places[1:])
        return None, places


class Span(NamedTuple):
    """The segments of a `Timeline`, from `first` to `last` included, in which its large buffer number `buffer` is alive."""

    first: int
    last: int
    buffer: int


@dataclass(frozen=True)
class Timeline:
    """The schedule as segments. The set of live large buffers changes only between segments.

    Attributes:
      small: for each segment, the largest sum in bytes of the small buffers that are alive at one moment.
      buffers: the large buffers, of at least 0.02 % of the peak. The new value of a donated argument counts as the argument.
      spans: the segments in which each large buffer is alive. Of buffers in the same memory, only one has a span at a time.

    >>> logits, kept = LiveBuffer("mul", "", "backward", 80, "f32[20]"), LiveBuffer("x", "", "forward", 60, "f32[15]")
    >>> timeline = Timeline((5, 5, 5), (logits, kept), (Span(1, 1, 0), Span(0, 2, 1)))
    >>> timeline.peak(), timeline.peak(lambda buffer: 0.25 if buffer is logits else 1)
    (145, 85)
    """

    small: tuple[int, ...]
    buffers: tuple[LiveBuffer, ...]
    spans: tuple[Span, ...]

    def peak(self, share: Callable[[LiveBuffer], float] = lambda buffer: 1.0) -> int:
        """The peak in bytes, counting the fraction `share(buffer)` of each large buffer."""
        changes = [0.0] * (len(self.small) + 1)
        for span in self.spans:
            size = share(self.buffers[span.buffer]) * self.buffers[span.buffer].nbytes
            changes[span.first] += size
            changes[span.last + 1] -= size
        return max((round(small + large) for small, large in zip(self.small, accumulate(changes), strict=False)), default=0)

    @classmethod
    def of(cls, schedule: Schedule) -> Timeline:
        """The timeline of a compiled step."""
        least = int(_LARGE * max(schedule.totals().values(), default=0)) + 1
        large = {value: span for value, span in schedule.ranges.items() if schedule.places[value].nbytes >= least}
        edges = sorted({0} | {edge for start, end in large.values() for edge in (start, end + 1)})
        small = [0] * len(edges)
        for moment, nbytes in schedule.totals(most=least - 1).items():
            segment = bisect_right(edges, moment) - 1
            small[segment] = max(small[segment], nbytes)
        end_of_step = max((end for _, end in schedule.ranges.values()), default=0)
        described = {value: schedule.buffer(value) for value in large}
        for value, (_, end) in large.items():
            if end == end_of_step and described[value].phase != "argument":
                described[value] = replace(described[value], phase=RESULT)
        arguments = {schedule.places[value]: buffer for value, buffer in described.items() if buffer.phase == "argument"}
        buffers: dict[LiveBuffer, int] = {}
        in_place: dict[BufferPlace, list[Span]] = {}
        for value, (start, end) in large.items():
            place = schedule.places[value]
            buffer = buffers.setdefault(arguments.get(place, described[value]), len(buffers))
            first, last = bisect_right(edges, start) - 1, bisect_right(edges, end) - 1
            in_place.setdefault(place, []).append(Span(first, last, buffer))
        spans = tuple(span for sharing in in_place.values() for span in _apart(sharing))
        return cls(tuple(small), tuple(buffers), spans)


def _apart(spans: list[Span]) -> Iterator[Span]:
    """The spans of one place in memory, without overlaps: where spans overlap, only the span that began last remains.

    >>> list(_apart([Span(0, 9, 1), Span(3, 5, 2)]))
    [Span(first=0, last=2, buffer=1), Span(first=3, last=5, buffer=2), Span(first=6, last=9, buffer=1)]
    """
    edges = sorted({edge for span in spans for edge in (span.first, span.last + 1)})
    for start, end in pairwise(edges):
        alive = [span for span in spans if span.first <= start <= span.last]
        if alive:
            yield Span(start, end - 1, max(alive).buffer)


def named_arguments(buffers: Iterable[LiveBuffer], names: Sequence[str]) -> tuple[LiveBuffer, ...]:
    """`buffers` with `args[i]` renamed to `names[i]`; `module` becomes the name's first part, such as `parameters`."""
    by_number = {f"args[{number}]": name for number, name in enumerate(names)}
    return tuple(
        replace(buffer, name=name, module=name.partition("/")[0]) if (name := by_number.get(buffer.name)) else buffer
        for buffer in buffers
    )


class BufferPlace(NamedTuple):
    """A place in memory. Values may share a place, one after the other or as several names of one array."""

    allocation: int
    offset: int
    nbytes: int


def _device_places(assignment: str) -> dict[_Value, BufferPlace]:
    places, allocation = {}, 0
    for line in assignment.splitlines():
        if (header := _ALLOCATION.match(line)) is not None:
            allocation = int(header["number"])
        elif (value := _VALUE.match(line)) is not None and int(value["space"]) == DEVICE_SPACE:
            places[value["name"], value["index"] or ""] = BufferPlace(allocation, int(value["offset"]), int(value["bytes"]))
    return places


def _element(shape: str, places: _Places) -> str:
    for place in places:
        inside = elements(shape)
        if place >= len(inside):
            return shape
        shape = inside[place]
    return shape


def _indices(shape: str) -> list[_Places]:
    """The index of every array in a shape, including nested tuples.

    >>> _indices("((f32[2], f32[3]), f32[4])")
    [(0, 0), (0, 1), (1,)]
    """
    if not shape.startswith("("):
        return [()]
    return [(place, *inside) for place, element in enumerate(elements(shape)) for inside in _indices(element)]
