"""Parsing a compiled module's text: computations, instructions, shapes, and the products and traffic of instructions."""

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
# Instructions that move no data.
FREE = frozenset(
    {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "opt-barrier", "optimization-barrier"}
)
COLLECTIVES = (
    *("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute", "ragged-all-to-all"),
    "collective-broadcast",
)
"""The collectives: the devices of a mesh exchange arrays by them. Asynchronous ones end in `-start`."""


@dataclass(frozen=True)
class HloArray:
    """An array in a shape: its HLO dtype, its dimensions, its axes from minor to major, and whether it is on the host."""

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
    """A line of a computation: `name = shape opcode(operands), rest`."""

    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    rest: str
    argument: str
    root: bool

    @cached_property
    def arrays(self) -> tuple[HloArray, ...]:
        """Every array in the shape, tuples flattened."""
        return arrays_of(self.shape)

    def attribute(self, key: str) -> str | None:
        """The computation or number after `key=`."""
        match = re.search(rf"\b{key}=%?([\w.\-]+)", self.rest)
        return match[1] if match else None

    def dimensions(self, key: str) -> tuple[int, ...]:
        """The numbers in `key={1,2}`, or under the same key of the backend's configuration."""
        match = re.search(rf'{key}={{([\d,]*)}}|"{key.replace("dims", "dimensions")}":\[([^\]]*)\]', self.rest)
        return tuple(int(number) for number in re.findall(r"\d+", match[1] or match[2] or "")) if match else ()

    @cached_property
    def config(self) -> Mapping[str, Any]:
        """The backend's configuration; empty if there is none."""
        match = re.search(r"backend_config=(\{.*\})", self.rest)
        if not match:
            return {}
        value, _ = json.JSONDecoder().raw_decode(match[1])
        return dict(value)


@dataclass
class Computation:
    """The instructions of a computation by name, in the order of the schedule."""

    name: str
    instructions: dict[str, Instruction] = field(default_factory=dict)

    def __iter__(self) -> Iterator[Instruction]:
        return iter(self.instructions.values())

    @cached_property
    def root(self) -> Instruction:
        """The instruction whose result the computation returns."""
        return next((instruction for instruction in self if instruction.root), list(self)[-1])

    @cached_property
    def parameters(self) -> dict[int, Instruction]:
        """The parameters by number."""
        return {int(instruction.argument): instruction for instruction in self if instruction.opcode == "parameter"}

    def operand(self, instruction: Instruction, index: int) -> Instruction | None:
        """The instruction that computes an operand."""
        return self.instructions.get(instruction.operands[index]) if index < len(instruction.operands) else None

    def users(self, name: str) -> list[Instruction]:
        """The instructions that read `name`."""
        return self._users.get(name, [])

    @cached_property
    def _users(self) -> dict[str, list[Instruction]]:
        users: dict[str, list[Instruction]] = {}
        for instruction in self:
            for name in dict.fromkeys(instruction.operands):
                users.setdefault(name, []).append(instruction)
        return users


@dataclass(frozen=True)
class HloModule:
    """A compiled module."""

    computations: Mapping[str, Computation]
    entry: str


@lru_cache(maxsize=4096)
def arrays_of(shape: str) -> tuple[HloArray, ...]:
    """Every array in a shape's text.

    >>> [(one.bytes, one.on_host) for one in arrays_of("(bf16[2,3]{1,0:S(5)}, u32[])")]
    [(12, True), (4, False)]
    """
    return tuple(_array(*parts) for parts in _ARRAY.findall(shape))


def _array(dtype: str, dims: str, layout: str) -> HloArray:
    sizes = tuple(int(size) for size in dims.split(",") if size)
    order = tuple(int(axis) for axis in re.findall(r"\d+", layout.split(":")[0]))
    return HloArray(dtype, sizes, order or tuple(reversed(range(len(sizes)))), "S(5)" in layout)


def elements(shape: str) -> list[str]:
    """The texts of a tuple's elements; any other shape by itself."""
    if not shape.startswith("("):
        return [shape]
    parts, depth, start = [], 0, 1
    for mark in _BRACKET_OR_COMMA.finditer(shape):
        depth += (mark[0] in "([{") - (mark[0] in ")]}")
        if (mark[0] == "," and depth == 1) or mark.end() == len(shape):
            parts.append(_COMMENT.sub("", shape[start : mark.start()]).strip())
            start = mark.end()
    return parts


def parse(text: str | HloModule) -> HloModule:
    """The module in the text of `compiled.as_text()` or of XLA's dump; a parsed module is returned as it is.

    Raises:
      UnsupportedError: a line of a computation has an unknown form.
    """
    if isinstance(text, HloModule):
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
    return HloModule(computations, entry)


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
    # An operand is `%name`; older texts have `shape %name`.
    operands = tuple(part.split()[-1].lstrip("%") for part in elements(f"({inside})") if part)
    return Instruction(name, text[:end], opcode[1], operands, text[close + 1 :], inside, root)


# --- what an instruction costs ----------------------------------------------------------------------------------------


def product_of(computation: Computation, one: Instruction) -> Product | None:
    """The matrix product that a dot, a matmul call or a convolution computes; None for other instructions.

    A convolution is the product of its windows with its kernel, with one window for each output position. Float32 runs as
    tensorfloat32 unless the program asks for the highest precision.
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
    """The target of a custom call; empty for any other instruction."""
    match = re.search(r'custom_call_target="([^"]*)"', one.rest)
    return match[1] if match else ""


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


def _units(instruction: Instruction, dtype: str) -> str:
    """The name of the units on which a product of this HLO dtype runs."""
    if dtype == "f32" and re.search(r"operand_precision[^\]}]*highest", instruction.rest, re.IGNORECASE):
        return "float32"
    return units_of(dtype)


def units_of(dtype: str) -> str:
    """The units on which products of an HLO dtype run; integers and unknown dtypes run as int8.

    >>> units_of("bf16"), units_of("s8")
    ('bfloat16', 'int8')
    """
    return _DTYPES.get(dtype, "int8")


def traffic(module: HloModule, computation: Computation, one: Instruction) -> int:
    """Bytes of device memory that an instruction reads and writes; a sliced array counts with its slice."""
    called = module.computations.get(one.attribute("calls") or "")
    if called is None:
        reads = [computation.operand(one, index) for index in range(len(one.operands))]
        if one.opcode == "dynamic-update-slice":
            return 2 * _device_bytes(reads[1:2])
        sliced = one.opcode in ("dynamic-slice", "slice", "gather")
        return _device_bytes([one]) + _device_bytes([one] if sliced else reads)
    if one.opcode == "async-start":
        # It runs a computation beside others: a fusion that updates a slice, since JAX 0.12.
        return sum(traffic(module, called, inner) for inner in called if inner.opcode not in FREE)
    return sum(_read(called, parameter) for parameter in called.parameters.values()) + _written(called, called.root)


def _device_bytes(several: list[Instruction | None]) -> int:
    return sum(array.bytes for each in several if each is not None for array in each.arrays if not array.on_host)


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
        makers = [called.instructions.get(name) for name in root.operands]
        return sum(_written(called, maker) for maker in makers if maker is not None)
    if root.opcode == "dynamic-update-slice":
        return _device_bytes([called.operand(root, 1)])
    return _device_bytes([root])
