"""Copies to and from the host in a compiled module: their instructions, their overlap with compute, and round trips."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

from remat_jax.memory.hlo.text import FREE, Computation, HloArray, HloModule, Instruction, arrays_of, elements

Direction = Literal["out", "back"]
_STARTED_SLICES = ("slice-start", "dynamic-slice-start", "dynamic-update-slice-start")
"""Opcodes of XLA:TPU; XLA:GPU starts a slice's copy as an `async-start` of a computation."""
_NO_COPIES = FREE | {"while", "call", "conditional", "custom-call"}


@dataclass(frozen=True)
class Copies:
    """The copies in one direction between device and host. `StepTime.exchanges` describes collectives in this form.

    Attributes:
      count: the number of copies; a copy in a loop counts once per iteration.
      bytes: the bytes that the copies move.
      seconds: the time of the copies on the link, one after the other.
      covered_seconds: the part of `seconds` during which compute runs.
      available_seconds: the compute time between the start of the first copy and the wait for the last copy.
    """

    count: int
    bytes: int
    seconds: float
    covered_seconds: float
    available_seconds: float

    @property
    def covered(self) -> float:
        """The share of the copies' time during which compute runs; 1.0 without copies."""
        return self.covered_seconds / self.seconds if self.seconds else 1.0

    @property
    def coverable(self) -> float:
        """An upper bound of `covered`: `available_seconds` as a share of `seconds`, at most 1.

        `Overlap.coverable` may be lower. It also considers that an array's copies can overlap only the compute that runs after
        the array is computed and before the copy is first read.
        """
        return min(1.0, self.available_seconds / self.seconds) if self.seconds else 1.0

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; the keys are the attribute names."""
        return asdict(self) | {"covered": self.covered, "coverable": self.coverable}


@dataclass(frozen=True)
class Overlap:
    """The copies in both directions, and the modelled time of one execution.

    Attributes:
      out, back: the copies from device to host and from host to device.
      compute_seconds: the time of compute alone.
      step_seconds: the time of compute and of its waits for copies and collectives. Use it to compare schedules.
      coverable_seconds: an upper bound of the copy time that compute could cover. It holds for every schedule with the same
        first start and the same last wait in each direction. An array can be copied out and back only after it is computed and
        before the copy is first read. For an array of the last block, hardly any compute runs in between.
    """

    out: Copies
    back: Copies
    compute_seconds: float
    step_seconds: float
    coverable_seconds: float

    @property
    def covered(self) -> float:
        """The share of the time of all copies during which compute runs; 1.0 without copies."""
        return self._share(self.out.covered_seconds + self.back.covered_seconds)

    @property
    def coverable(self) -> float:
        """The share of the time of all copies that compute could cover; see `coverable_seconds`."""
        return self._share(self.coverable_seconds)

    def _share(self, seconds: float) -> float:
        whole = self.out.seconds + self.back.seconds
        return seconds / whole if whole else 1.0

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; the keys are the attribute names."""
        nested = {"out": self.out.to_dict(), "back": self.back.to_dict(), "covered": self.covered, "coverable": self.coverable}
        return asdict(self) | nested


# --- finding the copies -----------------------------------------------------------------------------------------------


def host_copy(instruction: Instruction) -> tuple[Direction, int] | None:
    """The direction and bytes of the host copy that an instruction starts or performs; None for other instructions."""
    if instruction.opcode in _NO_COPIES or instruction.opcode.endswith("-done"):
        return None
    if (moved := started_copy(instruction)) is not None:
        return _moved(moved.source.on_host, moved.result.on_host, moved.part.bytes)
    for inner in instruction.called or (instruction,):
        source, update = inner.input(0), inner.input(1)
        if source is None or not source.arrays or len(inner.arrays) != 1:
            continue
        from_host, result = source.arrays[0].on_host, inner.arrays[0]
        if inner.opcode == "dynamic-update-slice":
            if update is not None and from_host:
                return _moved(update.arrays[0].on_host, True, update.arrays[0].bytes)
        elif inner.opcode in ("copy", "dynamic-slice", "slice") and from_host != result.on_host:
            return _moved(from_host, result.on_host, result.bytes)
    return None


class MovedArray(NamedTuple):
    """The arrays of an asynchronous copy: what it reads, what it writes, and the one of them that has the bytes it moves."""

    source: HloArray
    result: HloArray
    part: HloArray


def started_copy(instruction: Instruction) -> MovedArray | None:
    """The arrays of the copy that `copy-start`, `slice-start` and the like start; None for other instructions.

    >>> from remat_jax.memory.hlo.text import parse
    >>> module = parse('''ENTRY %main (x: f32[8,4]) -> f32[1,4] {
    ...   %x = f32[8,4]{1,0:S(5)} parameter(0)
    ...   %start = ((f32[8,4]{1,0:S(5)}), f32[1,4]{1,0}, u32[]) slice-start(%x), slice={[0:1], [0:4]}
    ...   ROOT %done = f32[1,4] slice-done(%start)
    ... }''')
    >>> started_copy(module.entry.instructions["start"]).part.bytes
    16
    """
    if instruction.opcode != "copy-start" and instruction.opcode not in _STARTED_SLICES:
        return None
    # The shape of a `copy-start` is (result, source, …), that of a slice (operands, result, …).
    first, second = (arrays_of(part) for part in elements(instruction.shape)[:2])
    if instruction.opcode == "copy-start":
        return MovedArray(second[0], first[0], first[0])
    if instruction.kind == "dynamic-update-slice":
        return MovedArray(first[1], second[0], first[1])
    return MovedArray(first[0], second[0], second[0])


def starts_slice_copies(module: HloModule) -> bool:
    """Whether a loop body starts a copy of a slice to or from the host, so that compute may overlap the copy.

    Branches and called computations count as loop bodies. A copy of a whole array is a `copy-start`, which does not count.
    """
    inner = (each for computation in module.computations.values() if computation is not module.entry for each in computation)
    starts = (each for each in inner if each.opcode.endswith("-start") and each.called is not None)
    return any(host_copy(each) is not None for each in starts)


def _moved(from_host: bool, to_host: bool, size: int) -> tuple[Direction, int] | None:
    if from_host == to_host:
        return None
    return ("out" if to_host else "back"), size


Roots = str | list[Any]
"""The name of the instruction that computes an array; for a tuple of arrays, a list of such names (or nested lists)."""


class RoundTrip(NamedTuple):
    """For one array, the names of the instructions that compute it, copy it out, copy it back, and first read the copy."""

    made: str
    out: str
    back: str
    read: str


def round_trips(computation: Computation) -> Iterator[RoundTrip]:
    """Yield a `RoundTrip` for each array that `computation` copies to the host and back outside its loops."""
    roots: dict[str, Roots] = {}
    copies: dict[str, tuple[Direction, str]] = {}
    readers: dict[str, str] = {}
    for instruction in computation:
        sources = [roots.get(operand, operand) for operand in instruction.operands]
        if instruction.opcode in FREE or instruction.opcode.endswith("-done"):
            roots[instruction.name] = _passed_on(instruction, sources)
            continue
        for root in _flat(sources):
            readers.setdefault(root, instruction.name)
        copy = host_copy(instruction)
        if copy and sources and isinstance(sources[0], str):
            copies[instruction.name] = copy[0], sources[0]
    for back, (direction, out) in copies.items():
        if direction == "back" and back in readers and out in copies and copies[out][0] == "out":
            yield RoundTrip(copies[out][1], out, back, readers[back])


def _passed_on(instruction: Instruction, sources: list[Roots]) -> Roots:
    """The names of the instructions that computed the result of `instruction`; `sources` has such names for each operand."""
    if instruction.opcode == "get-tuple-element":
        whole = sources[0]
        return whole[instruction.index] if isinstance(whole, list) and instruction.index < len(whole) else instruction.name
    if instruction.opcode == "tuple":
        return sources
    return sources[0] if instruction.opcode not in ("parameter", "constant") and len(sources) == 1 else instruction.name


def _flat(roots: Roots) -> list[str]:
    return [roots] if isinstance(roots, str) else [name for inner in roots for name in _flat(inner)]
