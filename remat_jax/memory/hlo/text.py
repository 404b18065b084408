"""Parsing a compiled module's text: computations, instructions, shapes."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

from remat_jax.core.module_paths import split_outside_brackets
from remat_jax.errors import UnsupportedError

HOST_SPACE = 5
"""XLA's number for host memory."""
_SPACE = re.compile(r"S\((\d+)\)")
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
_TRANSFER = re.compile(r'_xla_megascale_transfer_type="([A-Z_]+)"')
_MEETING = re.compile(r'_xla_host_transfer_rendezvous="([^"]+)"')
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_ITEM_BITS = {"pred": 8, "s4": 4, "u4": 4, "c64": 64, "c128": 128, "token": 0, "opaque": 0}
_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\) -> .*\{\s*$")
_QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"')
_END = re.compile(r"^\}(?:, execution_thread=.*)?\s*$")
_NAMED = re.compile(r"^\s*(ROOT )?%?([\w.\-]+) = (.*)$")
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,]*)\](\{[^}]*\})?")
_OPCODE = re.compile(r"\s*([\w\-]+)\(")
_COMMENT = re.compile(r"/\*.*?\*/")
_PARENTHESIS = re.compile(r"[()]")
FREE = frozenset(
    {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "opt-barrier", "optimization-barrier"}
)
"""Opcodes of instructions that move no data."""
COLLECTIVES = (
    *("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute", "ragged-all-to-all"),
    "collective-broadcast",
)
"""Collective opcodes. The opcode of an asynchronous collective also has the suffix `-start`."""
_BODIES = {
    "while": ("body",),
    "call": ("to_apply", "calls"),
    "call-start": ("to_apply",),
    "async-start": ("calls",),
    "fusion": ("calls",),
}
"""By opcode, the attributes that may name the computation that an instruction runs; the first one present is used."""


@dataclass(frozen=True)
class HloArray:
    """An array in a shape: its HLO dtype, its dimensions, its axes from minor to major, and its memory space.

    Memory space 0 is device memory, `HOST_SPACE` is host memory, and the others are memories inside a TPU's core.
    """

    dtype: str
    dims: tuple[int, ...]
    order: tuple[int, ...]
    space: int

    @property
    def on_host(self) -> bool:
        """Whether the array is in host memory."""
        return self.space == HOST_SPACE

    @property
    def bytes(self) -> int:
        """Size in bytes."""
        digits = re.search(r"\d+", self.dtype)
        bits = _ITEM_BITS.get(self.dtype, int(digits[0]) if digits else 8)
        return -(-math.prod(self.dims) * bits // 8)


@dataclass(frozen=True, eq=False)
class Instruction:
    """A line of the computation `home`: `name = shape opcode(argument), rest`. `operands` are the names in `argument`."""

    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    rest: str
    argument: str
    is_root: bool
    home: Computation = field(repr=False)

    @cached_property
    def arrays(self) -> tuple[HloArray, ...]:
        """Every array in the shape, tuples flattened."""
        return arrays_of(self.shape)

    @cached_property
    def inputs(self) -> tuple[Instruction | None, ...]:
        """The instructions that compute the operands; None for an operand that is missing from the text."""
        return tuple(map(self.home.instructions.get, self.operands))

    def input(self, index: int) -> Instruction | None:
        """The instruction that computes operand number `index`; None if there is none."""
        return self.inputs[index] if index < len(self.inputs) else None

    @cached_property
    def called(self) -> Computation | None:
        """The computation after `calls=`, or the one that XLA:TPU starts on the SparseCore; None if there is none."""
        name = self.attribute("to_apply" if self.opcode == "call-start" else "calls")
        return self.home.module.computations.get(name or "")

    @cached_property
    def bodies(self) -> tuple[Computation, ...]:
        """The computations that a loop, a call or a fusion runs, or the branches of a `conditional`."""
        if self.opcode == "conditional":
            listed = re.search(r"branch_computations=\{([^}]*)\}", self.rest)
            names = [name.strip().lstrip("%") for name in listed[1].split(",")] if listed else []
            names += [name for key in ("true_computation", "false_computation") if (name := self.attribute(key))]
        else:
            names = [name for key in _BODIES.get(self.opcode, ()) if (name := self.attribute(key))][:1]
        computations = self.home.module.computations
        return tuple(computations[name] for name in names if name in computations)

    @cached_property
    def collective(self) -> Instruction | None:
        """This instruction if it is a collective, or the collective in the call or fusion that starts or runs it; else None."""
        return self._collective_inside if self.collective_part[0] in ("", "start") else None

    @cached_property
    def _collective_inside(self) -> Instruction | None:
        inside = self.called if self.opcode in ("async-start", "call-start", "fusion") else None
        return next((each for each in inside or (self,) if each.kind in COLLECTIVES), None)

    @cached_property
    def collective_part(self) -> tuple[str, str]:
        """The part of an instruction in an asynchronous collective of XLA:TPU, and its channel; empty for other instructions.

        One fusion starts the collective, the compute of others (`step`) runs beside it, and one waits until it is `done`. The
        computation of each contains the collective. Between slices a `send` starts it, and a `recv-done` waits.
        """
        started = {"send": self, "recv-done": self.input(0)}.get(self.opcode)
        if started is not None and (meeting := _MEETING.search(started.rest)) is not None:
            return ("start" if self.opcode == "send" else "done"), meeting[1]
        each = self._collective_inside if self.opcode == "fusion" and self.called is not None else None
        if each is None or self.called is None:
            return "", ""
        calls = {inner.call_target for inner in self.called}
        parts = {"start": "AsyncCollectiveStart" in calls, "done": "AsyncCollectiveDone" in calls}
        parts["step"] = self.called.name.startswith("async_collective_fusion")
        part = next((name for name, is_part in parts.items() if is_part), "")
        return (part, each.attribute("channel_id") or each.name) if part else ("", "")

    @property
    def kind(self) -> str:
        """The opcode without `-start`, so that synchronous and asynchronous instructions have the same kind."""
        if self.opcode == "all-reduce" and self.home.name.startswith("all-reduce-scatter"):
            return "reduce-scatter"  # a fusion of XLA:TPU, which keeps a slice of the sum
        if self.opcode == "send" and (transfer := _TRANSFER.search(self.rest)) is not None:
            kind = transfer[1].lower().replace("_", "-")  # a collective of XLA:TPU between slices
            return {"one-to-one": "collective-permute", "broadcast": "collective-broadcast"}.get(kind, kind)
        return self.opcode.removesuffix("-start")

    @property
    def call_target(self) -> str:
        """The `custom_call_target` of a custom call; empty for other instructions."""
        match = _TARGET.search(self.rest)
        return match[1] if match else ""

    def attribute(self, key: str) -> str | None:
        """The text after `key=`, a computation's name or a number; None if there is none."""
        match = re.search(rf"\b{key}=%?([\w.\-]+)", self.rest)
        return match[1] if match else None

    def dimensions(self, key: str) -> tuple[int, ...]:
        """The numbers in `key={1,2}`, or under the same key of the backend's configuration."""
        match = re.search(rf'{key}={{([\d,]*)}}|"{key.replace("dims", "dimensions")}":\[([^\]]*)\]', self.rest)
        return tuple(int(number) for number in re.findall(r"\d+", match[1] or match[2] or "")) if match else ()

    @cached_property
    def op_name(self) -> str:
        """The operator's name in the traced program; empty if unknown."""
        match = re.search(r'op_name="([^"]*)"', self.rest)
        return match[1] if match else ""

    @property
    def index(self) -> int:
        """The index into the tuple that a `get-tuple-element` reads."""
        return int(self.attribute("index") or 0)

    @property
    def cycles(self) -> int | None:
        """XLA:TPU's own estimate of the cycles of this instruction; None if it wrote none."""
        match = _CYCLES.search(self.rest)
        return int(match[1]) if match else None

    @cached_property
    def config(self) -> Mapping[str, Any]:
        """The backend's configuration; empty if there is none."""
        match = re.search(r"backend_config=(\{.*\})", self.rest)
        return dict(json.JSONDecoder().raw_decode(match[1])[0]) if match else {}


@dataclass(eq=False)
class Computation:
    """The instructions of a computation by name, in the order of the schedule."""

    name: str
    module: HloModule = field(repr=False)
    instructions: dict[str, Instruction] = field(default_factory=dict)

    def __iter__(self) -> Iterator[Instruction]:
        return iter(self.instructions.values())

    @cached_property
    def root(self) -> Instruction:
        """The instruction whose result the computation returns."""
        return next((instruction for instruction in self if instruction.is_root), list(self)[-1])


@dataclass(eq=False)
class HloModule:
    """A compiled module."""

    computations: dict[str, Computation] = field(default_factory=dict)
    entry_name: str = ""

    @property
    def entry(self) -> Computation:
        """The computation that runs first."""
        return self.computations[self.entry_name]


@lru_cache(maxsize=4096)
def arrays_of(shape: str) -> tuple[HloArray, ...]:
    """Every array in a shape's text."""
    return tuple(_array(*parts) for parts in _ARRAY.findall(shape))


def _array(dtype: str, dims: str, layout: str) -> HloArray:
    sizes = tuple(int(size) for size in dims.split(",") if size)
    order = tuple(int(axis) for axis in re.findall(r"\d+", layout.split(":")[0]))
    space = _SPACE.search(layout)
    return HloArray(dtype, sizes, order or tuple(reversed(range(len(sizes)))), int(space[1]) if space else 0)


def elements(shape: str) -> list[str]:
    """Split the text of a tuple's shape into the shapes of its elements; for any other shape, a list with that shape."""
    if not shape.startswith("("):
        return [shape]
    return [_COMMENT.sub("", part).strip() for part in split_outside_brackets(shape[1:-1], ",")]


def parse(text: str | HloModule) -> HloModule:
    """The module in the text of `compiled.as_text()` or of XLA's dump; a parsed module is returned as it is."""
    if isinstance(text, HloModule):
        return text
    module, current = HloModule(), None
    for line in _joined(text.splitlines()):
        if current is None:
            if header := _HEADER.match(line):
                current = module.computations[header[2]] = Computation(header[2], module)
                module.entry_name = header[2] if header[1] else module.entry_name
        elif _END.match(line):
            current = None
        elif named := _NAMED.match(line):
            instruction = _instruction(named[2], named[3], bool(named[1]), current)
            for operand in instruction.operands:
                _add_element(operand, current)
            current.instructions[named[2]] = instruction
    return module


def _joined(lines: Sequence[str]) -> Iterator[str]:
    """The lines of a module; those of one instruction are joined, as the attributes of a TPU kernel may have line breaks."""
    whole = ""
    for line in lines:
        if not whole or _is_complete(whole):
            yield whole
            whole = line
        else:
            whole = f"{whole} {line}"
    yield whole


def _is_complete(line: str) -> bool:
    """Whether no brace is open at the end of a line, or only the one that begins a computation."""
    if _NAMED.match(line) is None or line.count("{") == line.count("}"):
        return True
    unquoted = _QUOTED.sub("", line)
    return unquoted.count("{") <= unquoted.count("}")


def _add_element(operand: str, home: Computation) -> None:
    """Add the `get-tuple-element` that `operand` stands for. The dumps of JAX 0.11.2 and later write it as `tuple#index`."""
    name, separator, index = operand.rpartition("#")
    if not separator or operand in home.instructions:
        return
    _add_element(name, home)  # `tuple#0#1` is an element of an element
    if (source := home.instructions.get(name)) is not None:
        shapes = elements(source.shape) if source.shape.startswith("(") else []
        if not index.isdecimal() or int(index) >= len(shapes):
            raise UnsupportedError(f"operand {operand!r} of a compiled module: {source.shape[:80]!r} has no such element")
        shape = shapes[int(index)]
        home.instructions[operand] = Instruction(
            operand, shape, "get-tuple-element", (name,), f", index={index}", f"%{name}", False, home
        )


def _closing(text: str, start: int) -> int:
    depth = 0
    for mark in _PARENTHESIS.finditer(text, start):
        depth += 1 if mark[0] == "(" else -1
        if depth == 0:
            return mark.start()
    return len(text) - 1


def _instruction(name: str, text: str, is_root: bool, home: Computation) -> Instruction:
    end = _closing(text, 0) + 1 if text.startswith("(") else text.find(" ")
    opcode = _OPCODE.match(text, end) if end > 0 else None
    if opcode is None:
        raise UnsupportedError(f"instruction {name!r} of a compiled module: {text[:80]!r} is not `shape opcode(operands)`")
    close = _closing(text, opcode.end() - 1)
    inside = text[opcode.end() : close]
    # An operand is `%name`; older texts have `shape %name`.
    operands = tuple(part.split()[-1].lstrip("%") for part in elements(f"({inside})") if part)
    return Instruction(name, text[:end], opcode[1], operands, text[close + 1 :], inside, is_root, home)
