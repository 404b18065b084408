"""What is alive on the device when a compiled step needs most, by the module that made it.

Read from what XLA dumps beside a compilation: the optimised program, its buffer assignment, and the range of the schedule in
which each buffer is alive. The names of operators carry the path of the module that traced them. XLA's own peak, which stands
in the last file, is not used: it counts host buffers as device memory.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import NamedTuple

DEVICE_SPACE = 0
_RANGE = re.compile(r"^    (?P<name>[^\s{]+)\{(?P<index>[\d,]*)\}:(?P<start>\d+)-(?P<end>\d+)$")
_ALLOCATION = re.compile(r"^allocation (?P<number>\d+): ")
_VALUE = re.compile(
    r"^ value: <\d+ (?P<name>[^\s{]+)(?:\{(?P<index>[\d,]*)\})?(?: \(phi\))? @(?P<space>\d+)> "
    r"\(size=(?P<bytes>\d+),offset=(?P<offset>\d+)\)"
)
_INSTRUCTION = re.compile(r"^\s*(?P<root>ROOT )?%?(?P<name>[^\s=]+) = ")
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?(?P<name>[^\s(]+) \(.*\{$")
_WRAPPER = re.compile(r"^(?:jvp|transpose|vmap|pmap|checkpoint|custom_jvp|custom_vjp|shard_map)\((?P<inside>.*)\)$")
_SLICES = ("dynamic-slice", "dynamic-update-slice")
_STRUCTURE = re.compile(
    r"while|closed_call|checkpoint|rematted_computation|call_exported|custom_jvp_call|custom_vjp_call|eval_jaxpr|pjit|branch_\d+_fun"
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
    """

    name: str
    module: str
    phase: str
    nbytes: int
    shape: str


@dataclass
class _Instruction:
    shape: str
    opcode: str
    operands: list[str]
    attributes: str
    computation: str

    @property
    def op_name(self) -> str:
        found = re.search(r'op_name="([^"]*)"', self.attributes)
        return found[1] if found else ""

    def called(self, attribute: str) -> str:
        found = re.search(rf"\b{attribute}=%?([\w.\-]+)", self.attributes)
        return found[1] if found else ""


@dataclass
class _Module:
    instructions: dict[str, _Instruction] = field(default_factory=dict)
    roots: dict[str, str] = field(default_factory=dict)
    callers: dict[str, str] = field(default_factory=dict)


def live_at_peak(program: str, assignment: str, live_ranges: str) -> list[LiveBuffer]:
    """The device buffers that are alive where the device holds most, the largest first.

    Args:
      program: the optimised program, `….after_optimizations.txt`.
      assignment: `…-buffer-assignment.txt`.
      live_ranges: `…-live-range.txt`.
    """
    places = _device_places(assignment)
    found = [one for one in map(_RANGE.match, live_ranges.splitlines()) if one is not None]
    ranges = {(one["name"], one["index"]): (int(one["start"]), int(one["end"])) for one in found}
    most: dict[_Place, tuple[str, str]] = {}
    for moment in sorted({start for start, _ in ranges.values()}):
        # The state of a loop has a name outside and one inside: what lies in one place is one buffer.
        alive = {places[value]: value for value, (start, end) in ranges.items() if start <= moment <= end and value in places}
        if _total(alive) > _total(most):
            most = alive
    module = _parsed(program)
    buffers = [_buffer(module, name, index, place.nbytes) for place, (name, index) in most.items()]
    return sorted(buffers, key=lambda one: (-one.nbytes, one.name))


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


class _Place(NamedTuple):
    allocation: int
    offset: int
    nbytes: int


def _total(places: Iterable[_Place]) -> int:
    return sum(place.nbytes for place in places)


def _device_places(assignment: str) -> dict[tuple[str, str], _Place]:
    places, allocation = {}, 0
    for line in assignment.splitlines():
        if (header := _ALLOCATION.match(line)) is not None:
            allocation = int(header["number"])
        elif (one := _VALUE.match(line)) is not None and int(one["space"]) == DEVICE_SPACE:
            places[one["name"], one["index"] or ""] = _Place(allocation, int(one["offset"]), int(one["bytes"]))
    return places


def module_path(op_name: str) -> tuple[str, str, str]:
    """The module path, the primitive and the phase that an operator's name tells.

    >>> module_path("jit(step)/transpose(jvp(Model.loss))/Model/while/body/layers.body/layers/ffn/up/dot_general")
    ('Model/layers/ffn/up', 'dot_general', 'backward')

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


def _buffer(module: _Module, name: str, index: str, nbytes: int) -> LiveBuffer:
    instruction = module.instructions.get(name)
    if instruction is None:
        return LiveBuffer(name, "", "other", nbytes, "")
    places = [int(one) for one in index.split(",") if one]
    shown = re.sub(r"\{.*", "", _element(instruction.shape, places))
    origin = _origin(module, name, places)
    if origin.opcode == "parameter":
        itself = instruction.opcode in ("parameter", "get-tuple-element", "tuple", "while")
        # A copy or a slice of it, such as one layer of a scanned stack of parameters, is another buffer.
        phase = "argument" if itself else module_path(instruction.op_name)[2]
        return LiveBuffer(origin.op_name or name, "", phase, nbytes, shown)
    path, primitive, phase = module_path(origin.op_name)
    return LiveBuffer(f"{path}:{primitive}" if path else primitive or name, path, phase, nbytes, shown)


def _origin(module: _Module, name: str, places: list[int]) -> _Instruction:
    """The instruction that makes an element of a loop's state: what its body writes there, or what enters it unchanged."""
    seen = set()
    while (name, tuple(places)) not in seen:
        seen.add((name, tuple(places)))
        one = module.instructions[name]
        following: tuple[str, list[int]] | None = None
        if one.opcode in ("copy", "bitcast", "copy-start", "copy-done", "optimization-barrier") and one.operands:
            following = one.operands[0], places
        elif one.opcode == "get-tuple-element" and one.operands:
            index = re.search(r"\bindex=(\d+)", one.attributes)
            following = one.operands[0], [int(index[1]) if index else 0, *places]
        elif one.opcode == "tuple" and places and places[0] < len(one.operands):
            following = one.operands[places[0]], places[1:]
        elif (moved := _moved(module, one)) is not None:
            following = moved, []
        elif one.opcode == "while" and places:
            following = module.roots.get(one.called("body"), ""), places
        elif one.opcode == "parameter" and places and one.computation in module.callers:
            loop = module.callers[one.computation]
            written, unchanged = _written(module, one.computation, places[0])
            following = (module.instructions[loop].operands[0], places) if unchanged else (written, places[1:])
        if following is None or following[0] not in module.instructions:
            return one
        name, places = following
    return module.instructions[name]


def _moved(module: _Module, one: _Instruction) -> str | None:
    """What a slice, or an update of a slice, of a stack of arrays takes or puts in: the largest operand beside the stack."""
    primitive = one.op_name.rpartition("/")[2]
    if primitive not in ("dynamic_slice", "dynamic_update_slice") or one.opcode not in ("fusion", *_SLICES):
        return None
    arrays = [operand for operand in one.operands if operand in module.instructions]
    sized = [operand for operand in arrays if "s32[]" not in module.instructions[operand].shape]
    if primitive == "dynamic_slice":
        return sized[0] if sized else None
    updates = [operand for operand in sized if module.instructions[operand].shape != one.shape]
    return updates[0] if updates else None


def _written(module: _Module, body: str, place: int) -> tuple[str, bool]:
    """What a loop's body leaves at a place of its state, and whether that is what was there before."""
    root = module.instructions.get(module.roots.get(body, ""))
    if root is None or root.opcode != "tuple" or place >= len(root.operands):
        return "", False
    value = root.operands[place]
    one = module.instructions.get(value)
    passes = one is not None and one.opcode == "get-tuple-element" and f"index={place}," in one.attributes + ","
    return value, passes and module.instructions[one.operands[0]].opcode == "parameter" if one else False


def _parsed(program: str) -> _Module:
    module, computation = _Module(), ""
    for line in program.splitlines():
        header = _COMPUTATION.match(line)
        if header is not None:
            computation = header["name"]
            continue
        start = _INSTRUCTION.match(line)
        if start is None or not computation:
            continue
        shape, rest = _until_space(line[start.end() :])
        opcode, bracket, rest = rest.partition("(")
        if not bracket:
            continue
        operands, attributes = _closing(rest)
        one = _Instruction(shape, opcode, re.findall(r"%([\w.\-]+)", operands), attributes, computation)
        module.instructions[start["name"]] = one
        if start["root"]:
            module.roots[computation] = start["name"]
        if opcode == "while":
            module.callers[one.called("body")] = start["name"]
    return module


def _until_space(text: str) -> tuple[str, str]:
    """A shape, which is a tuple in brackets or has no spaces, and the rest."""
    depth = 0
    for place, letter in enumerate(text):
        depth += (letter in "({[") - (letter in ")}]")
        if letter == " " and depth == 0:
            return text[:place], text[place + 1 :]
    return text, ""


def _closing(text: str) -> tuple[str, str]:
    depth = 1
    for place, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if depth == 0:
            return text[:place], text[place + 1 :]
    return text, ""


def _element(shape: str, places: list[int]) -> str:
    for place in places:
        inside = re.sub(r"/\*.*?\*/", "", shape)[1:-1]
        elements = _separated(inside, ",")
        if place >= len(elements):
            return shape
        shape = elements[place].strip()
    return shape


def _split(op_name: str) -> list[str]:
    return [part for part in _separated(op_name, "/") if part]


def _separated(text: str, mark: str) -> list[str]:
    parts, depth, start = [], 0, 0
    for place, letter in enumerate(text):
        depth += (letter in "({[") - (letter in ")}]")
        if letter == mark and depth == 0:
            parts.append(text[start:place])
            start = place + 1
    return [*parts, text[start:]]
