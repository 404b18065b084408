"""What is alive on the device when a compiled step needs most, by the module that made it.

Read from what XLA dumps beside a compilation: the optimised program, its buffer assignment, and the range of the schedule in
which each buffer is alive. The names of operators carry the path of the module that traced them. XLA's own peak, which stands
in the last file, is not used: it counts host buffers as device memory.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

from remat_jax.memory.hlo.text import COLLECTIVES, Instruction, Module, elements, parse

DEVICE_SPACE = 0
_RANGE = re.compile(r"^    (?P<name>[^\s{]+)\{(?P<index>[\d,]*)\}:(?P<start>\d+)-(?P<end>\d+)$")
_ALLOCATION = re.compile(r"^allocation (?P<number>\d+): ")
_VALUE = re.compile(
    r"^ value: <\d+ (?P<name>[^\s{]+)(?:\{(?P<index>[\d,]*)\})?(?: \(phi\))? @(?P<space>\d+)> "
    r"\(size=(?P<bytes>\d+),offset=(?P<offset>\d+)\)"
)
_WRAPPER = re.compile(r"^(?:jvp|transpose|vmap|pmap|checkpoint|custom_jvp|custom_vjp|shard_map)\((?P<inside>.*)\)$")
_SLICES = ("dynamic-slice", "dynamic-update-slice")
_STRUCTURE = re.compile(
    r"while|closed_call|checkpoint|rematted_computation|call_exported|custom_jvp_call|custom_vjp_call|eval_jaxpr|pjit|branch_\d+_fun"
    r"|layers\[\d+:\d+\]"
)


@dataclass(frozen=True)
class LiveBuffer:
    """One buffer that is alive at the peak.

    Attributes:
      name: residual-like name `module/path:primitive`, or what the argument is called.
      module: the module path alone; empty where the program says nothing of it.
      phase: `argument`, `forward` (made there and kept), `recomputed`, `backward`, or `other` (outside of the gradient: the
        optimizer's update, and what needs no gradient).
      nbytes: its size in bytes.
      shape: as XLA writes it, such as `f32[16,256]`.
      collective: the kind of the collective that gives or takes it (`all-gather`: a gathered parameter, `reduce-scatter`: a
        gradient that is not summed yet); empty where none does.
    """

    name: str
    module: str
    phase: str
    nbytes: int
    shape: str
    collective: str = ""


_Value = tuple[str, str]
"""An instruction's name, and which element of its tuple, as XLA writes it: `1,0`."""


class _Program:
    """The instructions of all computations by name, and which loop runs which computation."""

    def __init__(self, module: Module) -> None:
        self.instructions: dict[str, Instruction] = {}
        self.roots: dict[str, str] = {}
        self._home: dict[str, str] = {}
        self._loops: dict[str, str] = {}
        for computation in module.computations.values():
            for one in computation:
                self.instructions[one.name] = one
                self._home[one.name] = computation.name
                if one.root:
                    self.roots[computation.name] = one.name
                if one.opcode == "while":
                    self._loops[one.attribute("body") or ""] = one.name

    def exchanged(self) -> dict[_Value, str]:
        """What collectives take, and the whole of what they give, by the kind of the collective."""
        found: dict[_Value, str] = {}
        for one in self.instructions.values():
            called = self.instructions.get(self.roots.get(one.attribute("calls") or "", ""))
            kind = (called if one.opcode == "async-start" and called is not None else one).opcode.removesuffix("-start")
            if kind in COLLECTIVES:
                given = {(one.name, ",".join(map(str, index))): kind for index in _indices(one.shape)}
                found |= given | {self._made(operand): kind for operand in one.operands}
        return found

    def _made(self, name: str) -> _Value:
        """Where an array is made that an instruction only names."""
        index: list[str] = []
        while (one := self.instructions.get(name)) is not None and one.operands:
            if one.opcode == "get-tuple-element":
                index.insert(0, one.attribute("index") or "0")
            elif one.opcode == "tuple" and index:
                name = one.operands[int(index.pop(0))]
                continue
            elif one.opcode != "bitcast":
                break
            name = one.operands[0]
        return name, ",".join(index)

    def loop_around(self, one: Instruction) -> tuple[str, Instruction | None]:
        """The computation that an instruction is in, and the loop that runs it."""
        home = self._home[one.name]
        return home, self.instructions.get(self._loops.get(home, ""))


class Schedule:
    """When each array of the device is alive in a compiled step, and where it lies.

    Args:
      program: the optimised program, `….after_optimizations.txt`, or that as it is parsed.
      assignment: `…-buffer-assignment.txt`.
      live_ranges: `…-live-range.txt`.
    """

    def __init__(self, program: str | Module, assignment: str, live_ranges: str) -> None:
        self.places = _device_places(assignment)
        found = [one for one in map(_RANGE.match, live_ranges.splitlines()) if one is not None]
        ranges = {(one["name"], one["index"]): (int(one["start"]), int(one["end"])) for one in found}
        self.ranges = {value: span for value, span in ranges.items() if value in self.places}
        self._program = _Program(parse(program))

    def buffer(self, value: _Value) -> LiveBuffer:
        """What a value is."""
        return _buffer(self._program, *value, self.places[value].nbytes)

    def at_peak(self) -> list[LiveBuffer]:
        """The device buffers that are alive where the device holds most, the largest first."""
        totals = self.totals()
        peak = max(totals, key=lambda moment: (totals[moment], -moment), default=0)
        # The state of a loop has a name outside and one inside: what lies in one place is one buffer.
        alive = {self.places[value]: value for value, (start, end) in self.ranges.items() if start <= peak <= end}
        # Of what lies in one place any name may be the one that a collective knows it by.
        kinds = {
            self.places[value]: kind
            for value, kind in self._program.exchanged().items()
            if value in self.ranges and self.ranges[value][0] <= peak <= self.ranges[value][1]
        }
        buffers = [replace(self.buffer(value), collective=kinds.get(place, "")) for place, value in alive.items()]
        return sorted(buffers, key=lambda one: (-one.nbytes, one.name))

    def totals(self, least: int = 0, most: float = math.inf) -> dict[int, int]:
        """The bytes of the buffers of `least` to `most` bytes, at each moment at which any buffer begins."""
        events: dict[int, list[tuple[Place, int]]] = {}
        for value, (start, end) in self.ranges.items():
            for moment, change in ((start, 1), (end + 1, -1)):
                events.setdefault(moment, []).append((self.places[value], change))
        begins = {start for start, _ in self.ranges.values()}
        alive: Counter[Place] = Counter()
        total, found = 0, {}
        for moment in sorted(events):
            for place, change in events[moment]:
                before, alive[place] = alive[place], alive[place] + change
                if least <= place.nbytes <= most:
                    total += place.nbytes * ((alive[place] > 0) - (before > 0))
            if moment in begins:
                found[moment] = total
        return found


def live_at_peak(program: str | Module, assignment: str, live_ranges: str) -> list[LiveBuffer]:
    """The device buffers that are alive where the device holds most, the largest first; the arguments are `Schedule`'s."""
    return Schedule(program, assignment, live_ranges).at_peak()


def named_arguments(buffers: Iterable[LiveBuffer], names: Sequence[str]) -> list[LiveBuffer]:
    """The buffers with arguments called by `names`, one for each flat argument, instead of `args[3]`.

    The first part of a name, such as `parameters`, is their module.
    """
    found = []
    for one in buffers:
        number = re.fullmatch(r"args\[(\d+)\]", one.name)
        if number is not None and int(number[1]) < len(names):
            name = names[int(number[1])]
            one = replace(one, name=name, module=name.partition("/")[0])
        found.append(one)
    return found


class Place(NamedTuple):
    """Where a buffer lies: several values may have one place, one after the other or as names of one array."""

    allocation: int
    offset: int
    nbytes: int


def _device_places(assignment: str) -> dict[_Value, Place]:
    places, allocation = {}, 0
    for line in assignment.splitlines():
        if (header := _ALLOCATION.match(line)) is not None:
            allocation = int(header["number"])
        elif (one := _VALUE.match(line)) is not None and int(one["space"]) == DEVICE_SPACE:
            places[one["name"], one["index"] or ""] = Place(allocation, int(one["offset"]), int(one["bytes"]))
    return places


def module_path(op_name: str) -> tuple[str, str, str]:
    """The module path, the primitive and the phase that an operator's name tells.

    >>> module_path("jit(step)/transpose(jvp(Model.loss))/Model/while/body/layers.body/layers/ffn/up/dot_general")
    ('Model/layers/ffn/up', 'dot_general', 'backward')

    Which layers a policy by layer was for (`layers[0:8]`) is no part of the path.

    A scope that is opened again inside itself, as Flax does, is one; so a module of its parent's name is not told from it.
    """
    phase = "backward" if "transpose(" in op_name else "forward" if "jvp(" in op_name else "other"
    phase = "recomputed" if "rematted_computation" in op_name else phase
    parts: list[str] = []
    for part in _split(op_name.partition(";")[0]):  # of operators that were merged, newer compilers name both
        while (wrapped := _WRAPPER.match(part)) is not None:
            part = wrapped["inside"]
        parts += [inner for inner in _split(part) if not inner.startswith(("jit(", "remat("))]
    # The body of a loop is no module; a module may well be called `body`.
    parts = [part for before, part in pairwise(["", *parts]) if not (before == "while" and part in ("body", "cond"))]
    parts = [part for part in parts if _STRUCTURE.fullmatch(part) is None]
    primitive = parts.pop() if parts else ""
    path: list[str] = []
    for part in parts:
        name = part.partition(".")[0]
        if path and name == path[0]:
            path = []  # a scope that is opened again starts from the model
        if name and (not path or path[-1] != name):
            path.append(name)
    return "/".join(path), primitive, phase


def _op_name(one: Instruction) -> str:
    found = re.search(r'op_name="([^"]*)"', one.rest)
    return found[1] if found else ""


def _buffer(program: _Program, name: str, index: str, nbytes: int) -> LiveBuffer:
    instruction = program.instructions.get(name)
    if instruction is None:
        return LiveBuffer(name, "", "other", nbytes, "")
    places = [int(one) for one in index.split(",") if one]
    shown = re.sub(r"\{.*", "", _element(instruction.shape, places))
    origin = _origin(program, name, places)
    if origin.opcode == "parameter":
        itself = instruction.opcode in ("parameter", "get-tuple-element", "tuple", "while")
        # A copy or a slice of it, such as one layer of a scanned stack of parameters, is another buffer.
        phase = "argument" if itself else module_path(_op_name(instruction))[2]
        return LiveBuffer(_op_name(origin) or name, "", phase, nbytes, shown)
    path, primitive, phase = module_path(_op_name(origin))
    return LiveBuffer(f"{path}:{primitive}" if path else primitive or name, path, phase, nbytes, shown)


def _origin(program: _Program, name: str, places: list[int]) -> Instruction:
    """The instruction that makes an element of a loop's state: what its body writes there, or what enters it unchanged."""
    seen = set()
    while (name, tuple(places)) not in seen:
        seen.add((name, tuple(places)))
        one = program.instructions[name]
        following = _before(program, one, places)
        if following is None or following[0] not in program.instructions:
            return one
        name, places = following
    return program.instructions[name]


def _before(program: _Program, one: Instruction, places: list[int]) -> tuple[str, list[int]] | None:
    """Where an element of what an instruction gives is from, if the instruction does not make it."""
    if one.opcode in ("copy", "bitcast", "copy-start", "copy-done", "optimization-barrier") and one.operands:
        return one.operands[0], places
    if one.opcode == "get-tuple-element" and one.operands:
        return one.operands[0], [int(one.attribute("index") or 0), *places]
    if one.opcode == "tuple" and places and places[0] < len(one.operands):
        return one.operands[places[0]], places[1:]
    if (moved := _moved(program, one)) is not None:
        return moved, []
    if one.opcode == "while" and places:
        return program.roots.get(one.attribute("body") or "", ""), places
    body, loop = program.loop_around(one)
    if one.opcode == "parameter" and places and loop is not None:
        written, unchanged = _written(program, body, places[0])
        return (loop.operands[0], places) if unchanged else (written, places[1:])
    return None


def _moved(program: _Program, one: Instruction) -> str | None:
    """What a slice, or an update of a slice, of a stack of arrays takes or puts in: the largest operand beside the stack."""
    primitive = _op_name(one).rpartition("/")[2]
    if primitive not in ("dynamic_slice", "dynamic_update_slice") or one.opcode not in ("fusion", *_SLICES):
        return None
    arrays = [operand for operand in one.operands if operand in program.instructions]
    sized = [operand for operand in arrays if "s32[]" not in program.instructions[operand].shape]
    if primitive == "dynamic_slice":
        return sized[0] if sized else None
    updates = [operand for operand in sized if program.instructions[operand].shape != one.shape]
    return updates[0] if updates else None


def _written(program: _Program, body: str, place: int) -> tuple[str, bool]:
    """What a loop's body leaves at a place of its state, and whether that is what was there before."""
    root = program.instructions.get(program.roots.get(body, ""))
    if root is None or root.opcode != "tuple" or place >= len(root.operands):
        return "", False
    value = root.operands[place]
    one = program.instructions.get(value)
    if one is None or one.opcode != "get-tuple-element" or one.attribute("index") != str(place):
        return value, False
    return value, program.instructions[one.operands[0]].opcode == "parameter"


def _element(shape: str, places: list[int]) -> str:
    for place in places:
        inside = elements(shape)
        if place >= len(inside):
            return shape
        shape = inside[place]
    return shape


def _indices(shape: str) -> list[tuple[int, ...]]:
    """Of every array in a shape, tuples in tuples too: which element it is.

    >>> _indices("((f32[2], f32[3]), f32[4])")
    [(0, 0), (0, 1), (1,)]
    """
    if not shape.startswith("("):
        return [()]
    return [(place, *inside) for place, one in enumerate(elements(shape)) for inside in _indices(one)]


def _split(op_name: str) -> list[str]:
    """The parts between slashes that are in no bracket."""
    parts, depth, start = [], 0, 0
    for place, letter in enumerate(op_name):
        depth += (letter in "({[") - (letter in ")}]")
        if letter == "/" and depth == 0:
            parts.append(op_name[start:place])
            start = place + 1
    return [part for part in (*parts, op_name[start:]) if part]
