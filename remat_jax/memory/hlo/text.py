"""Reading a compiled module's text: computations, instructions, shapes, and what an instruction costs."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

from remat_jax.errors import UnsupportedError
from remat_jax.hardware.products import Product

_ITEM_BITS = {"pred": 8, "s4": 4, "u4": 4, "c64": 64, "c128": 128, "token": 0, "opaque": 0}
_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\) -> .*\{\s*$")
_NAMED = re.compile(r"^\s*(ROOT )?%?([\w.\-]+) = (.*)$")
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,]*)\](\{[^}]*\})?")
_OPCODE = re.compile(r"\s*([\w\-]+)\(")
_COMMENT = re.compile(r"/\*.*?\*/")
_PARENTHESIS, _BRACKET_OR_COMMA = re.compile(r"[()]"), re.compile(r"[(\[{)\]},]")
# What moves no data: it says where data is.
FREE = frozenset(
    {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "opt-barrier", "optimization-barrier"}
)
COLLECTIVES = (
    *("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute", "ragged-all-to-all"),
    "collective-broadcast",
)
"""By what the devices of a mesh send each other arrays; `…-start` where something else runs meanwhile."""


@dataclass(frozen=True)
class Array:
    """An array in a shape: its dtype in HLO, its dimensions, its axes from the fastest on, and whether it is on the host."""

    dtype: str
    dims: tuple[int, ...]
    order: tuple[int, ...]
    on_host: bool

    @property
    def bytes(self) -> int:
        """Size in bytes."""
        digits = re.search(r"\d+", self.dtype)
        bits = _ITEM_BITS.get(self.dtype, int(digits[0]) if digits else 8)
        return math.prod(self.dims) * bits // 8


@dataclass(frozen=True)
class Instruction:
    """One line of a computation: `name = shape opcode(operands), rest`."""

    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    rest: str
    argument: str
    root: bool

    @cached_property
    def arrays(self) -> tuple[Array, ...]:
        """Every array in the shape, tuples flattened."""
        return arrays_of(self.shape)

    def attribute(self, key: str) -> str | None:
        """The computation or number that `key=` names."""
        found = re.search(rf"\b{key}=%?([\w.\-]+)", self.rest)
        return found[1] if found else None

    def dimensions(self, key: str) -> tuple[int, ...]:
        """The numbers of `key={1,2}`, or of the same key in the backend's configuration."""
        found = re.search(rf'{key}={{([\d,]*)}}|"{key.replace("dims", "dimensions")}":\[([^\]]*)\]', self.rest)
        return tuple(int(one) for one in re.findall(r"\d+", found[1] or found[2] or "")) if found else ()

    @cached_property
    def config(self) -> Mapping[str, Any]:
        """The backend's configuration; empty if there is none."""
        found = re.search(r"backend_config=(\{.*\})", self.rest)
        if not found:
            return {}
        value, _ = json.JSONDecoder().raw_decode(found[1])
        return dict(value)


@dataclass
class Computation:
    """The instructions of one computation, by name, in the order in which they are scheduled."""

    name: str
    instructions: dict[str, Instruction] = field(default_factory=dict)

    def __iter__(self) -> Iterator[Instruction]:
        return iter(self.instructions.values())

    @cached_property
    def root(self) -> Instruction:
        """What the computation returns."""
        return next((one for one in self if one.root), list(self)[-1])

    @cached_property
    def parameters(self) -> dict[int, Instruction]:
        """The parameters by their number."""
        return {int(one.argument): one for one in self if one.opcode == "parameter"}

    def operand(self, instruction: Instruction, index: int) -> Instruction | None:
        """The instruction that makes an operand."""
        return self.instructions.get(instruction.operands[index]) if index < len(instruction.operands) else None

    def users(self, name: str) -> list[Instruction]:
        """The instructions that read `name`."""
        return self._users.get(name, [])

    @cached_property
    def _users(self) -> dict[str, list[Instruction]]:
        found: dict[str, list[Instruction]] = {}
        for one in self:
            for name in dict.fromkeys(one.operands):
                found.setdefault(name, []).append(one)
        return found


@dataclass(frozen=True)
class Module:
    """A compiled module."""

    computations: Mapping[str, Computation]
    entry: str


@lru_cache(maxsize=4096)
def arrays_of(shape: str) -> tuple[Array, ...]:
    """Every array in a shape's text.

    >>> [(one.bytes, one.on_host) for one in arrays_of("(bf16[2,3]{1,0:S(5)}, u32[])")]
    [(12, True), (4, False)]
    """
    return tuple(_array(*found) for found in _ARRAY.findall(shape))


def _array(dtype: str, dims: str, layout: str) -> Array:
    sizes = tuple(int(one) for one in dims.split(",") if one)
    order = tuple(int(one) for one in re.findall(r"\d+", layout.split(":")[0]))
    return Array(dtype, sizes, order or tuple(reversed(range(len(sizes)))), "S(5)" in layout)


def elements(shape: str) -> list[str]:
    """The elements of a tuple's text; of any other shape, the shape itself."""
    if not shape.startswith("("):
        return [shape]
    parts, depth, start = [], 0, 1
    for mark in _BRACKET_OR_COMMA.finditer(shape):
        depth += (mark[0] in "([{") - (mark[0] in ")]}")
        if (mark[0] == "," and depth == 1) or mark.end() == len(shape):
            parts.append(_COMMENT.sub("", shape[start : mark.start()]).strip())
            start = mark.end()
    return parts


def parse(text: str | Module) -> Module:
    """The module that `compiled.as_text()` gave, or that XLA dumped; a module that is parsed already stays as it is.

    Raises:
      UnsupportedError: a line of a computation is no instruction in a form that is known.
    """
    if isinstance(text, Module):
        return text
    computations: dict[str, Computation] = {}
    current, entry = None, ""
    for line in text.splitlines():
        if current is None:
            header = _HEADER.match(line)
            if header:
                current = computations[header[2]] = Computation(header[2])
                entry = header[2] if header[1] else entry
        elif line.startswith("}"):
            current = None
        else:
            named = _NAMED.match(line)
            if named:
                current.instructions[named[2]] = _instruction(named[2], named[3], bool(named[1]))
    return Module(computations, entry)


def _closing(text: str, start: int) -> int:
    depth = 0
    for mark in _PARENTHESIS.finditer(text, start):
        depth += 1 if mark[0] == "(" else -1
        if depth == 0:
            return mark.start()
    return len(text) - 1


def _instruction(name: str, text: str, root: bool) -> Instruction:
    end = _closing(text, 0) + 1 if text.startswith("(") else text.find(" ")
    opcode = _OPCODE.match(text, end) if end > 0 else None
    if opcode is None:
        raise UnsupportedError(f"instruction {name!r} of a compiled module: {text[:80]!r} is not `shape opcode(operands)`")
    close = _closing(text, opcode.end() - 1)
    inside = text[opcode.end() : close]
    # An operand is `%name`, or `shape %name` in older texts.
    operands = tuple(part.split()[-1].lstrip("%") for part in elements(f"({inside})") if part)
    return Instruction(name, text[:end], opcode[1], operands, text[close + 1 :], inside, root)


# --- what an instruction costs ----------------------------------------------------------------------------------------


def product_of(computation: Computation, one: Instruction) -> Product | None:
    """The matrix product that a dot, a matmul call or a convolution computes; None for anything else.

    A convolution is the product of its windows, as many as it has results, with its kernel. Float32 runs as tensorfloat32
    unless the highest precision is asked for.
    """
    lhs, rhs = computation.operand(one, 0), computation.operand(one, 1)
    if lhs is None or rhs is None or not (lhs.arrays and rhs.arrays and one.arrays):
        return None
    out, left, right = one.arrays[0], lhs.arrays[0], rhs.arrays[0]
    called = called_target(one)
    if one.opcode in ("dot", "scaled-dot") or "gemm" in called or "matmul" in called:
        summed = math.prod(left.dims[axis] for axis in one.dimensions("lhs_contracting_dims"))
        batch = math.prod(left.dims[axis] for axis in one.dimensions("lhs_batch_dims"))
        rows = math.prod(left.dims) // max(1, batch * summed)
        columns = math.prod(out.dims) // max(1, batch * rows)
        return Product(_units(one, left.dtype), batch, rows, columns, summed)
    if one.opcode == "convolution" or "cudnn$conv" in called:
        labels = re.search(r"dim_labels=\w+_(\w+)->", one.rest)
        if labels is None:
            return None
        kernel, result = right, out
        if "BackwardFilter" in called:
            kernel, result = out, right
        elif "BackwardInput" in called:
            kernel, result = right, left
        channels = kernel.dims[labels[1].index("o")]
        windows = math.prod(result.dims) // max(1, channels)
        return Product(_units(one, left.dtype), 1, windows, channels, math.prod(kernel.dims) // max(1, channels))
    return None


def called_target(one: Instruction) -> str:
    """What a custom call calls; empty for any other instruction."""
    found = re.search(r'custom_call_target="([^"]*)"', one.rest)
    return found[1] if found else ""


_DTYPES = {
    "bf16": "bfloat16",
    "f16": "float16",
    "f32": "tensorfloat32",
    "f64": "float64",
    "c64": "complex64",
    "c128": "complex128",
    "f8e4m3fn": "float8_e4m3fn",
    "f8e5m2": "float8_e5m2",
}


def _units(one: Instruction, dtype: str) -> str:
    """The name of the units that a product of this HLO dtype runs on."""
    if dtype == "f32" and re.search(r"operand_precision[^\]}]*highest", one.rest, re.IGNORECASE):
        return "float32"
    return units_of(dtype)


def units_of(dtype: str) -> str:
    """The units on which products of an HLO dtype run; integers and what is not known run as int8.

    >>> units_of("bf16"), units_of("s8")
    ('bfloat16', 'int8')
    """
    return _DTYPES.get(dtype, "int8")


def traffic(module: Module, computation: Computation, one: Instruction) -> int:
    """Bytes of device memory that an instruction reads and writes; of an array of which it takes a slice, the slice."""
    called = module.computations.get(one.attribute("calls") or "")
    if called is None:
        reads = [computation.operand(one, index) for index in range(len(one.operands))]
        if one.opcode == "dynamic-update-slice":
            return 2 * _device_bytes(reads[1:2])
        sliced = one.opcode in ("dynamic-slice", "slice", "gather")
        return _device_bytes([one]) + _device_bytes([one] if sliced else reads)
    return sum(_read(called, parameter) for parameter in called.parameters.values()) + _written(called, called.root)


def _device_bytes(several: list[Instruction | None]) -> int:
    return sum(array.bytes for one in several if one is not None for array in one.arrays if not array.on_host)


def _read(called: Computation, parameter: Instruction) -> int:
    users = called.users(parameter.name)
    whole = _device_bytes([parameter])
    part = 0
    for user in users:
        if user.opcode in ("dynamic-slice", "slice", "gather") and user.operands[0] == parameter.name:
            part += _device_bytes([user])
        elif user.opcode != "dynamic-update-slice" or user.operands[0] != parameter.name:
            return whole
    return min(part, whole)


def _written(called: Computation, root: Instruction) -> int:
    if root.opcode in ("tuple", "bitcast"):
        made = [called.instructions.get(name) for name in root.operands]
        return sum(_written(called, one) for one in made if one is not None)
    if root.opcode == "dynamic-update-slice":
        return _device_bytes([called.operand(root, 1)])
    return _device_bytes([root])
