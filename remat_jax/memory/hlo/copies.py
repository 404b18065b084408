"""Copies to and from the host in a compiled module: their instructions, what compute covers, the way of each array."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from remat_jax.memory.hlo.text import FREE, Computation, Instruction, Module, elements
from remat_jax.memory.hlo.text import arrays_of as _arrays_of

Direction = Literal["out", "back"]


@dataclass(frozen=True)
class Copies:
    """The copies of one direction.

    Attributes:
      count: how many run; one in a loop counts once per iteration.
      bytes: what they move.
      seconds: what they take on the link, one after the other.
      covered_seconds: how long of that compute runs as well.
      available_seconds: the compute that is scheduled from the start of the first copy until the last one is waited for.
    """

    count: int
    bytes: int
    seconds: float
    covered_seconds: float
    available_seconds: float

    @property
    def covered(self) -> float:
        """The share of the copies' time during which compute runs; 1.0 where nothing is copied."""
        return self.covered_seconds / self.seconds if self.seconds else 1.0

    @property
    def coverable(self) -> float:
        """The share that could be covered: the compute available between the first start and the last wait, at most 1.

        It says nothing of compute that could be moved there, and not that this much can be reached: a copy cannot start before
        its array is made, nor end after it is read. `Overlap.coverable` counts with that.
        """
        return min(1.0, self.available_seconds / self.seconds) if self.seconds else 1.0

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; the keys are the attribute names."""
        return asdict(self) | {"covered": self.covered, "coverable": self.coverable}


@dataclass(frozen=True)
class Overlap:
    """The copies to the host, those back, and the modelled time of one execution.

    Attributes:
      out, back: the copies from device to host and from host to device.
      compute_seconds: compute alone.
      step_seconds: compute and what it waits for copies.
      coverable_seconds: what compute could cover of the copies of both directions, with the first start and the last wait of
        each where this schedule has them: of each what is `available`, less what an array's own way cannot have. A schedule
        that starts late or waits early has less: compare `step_seconds` across schedules. An array leaves after it is made and
        is back before it is read, one after the other: between the two there must be compute for each copy, and for both; what
        the last block offloads has hardly any.
    """

    out: Copies
    back: Copies
    compute_seconds: float
    step_seconds: float
    coverable_seconds: float

    @property
    def covered(self) -> float:
        """The share of the time of all copies during which compute runs; 1.0 where nothing is copied."""
        return self._share(self.out.covered_seconds + self.back.covered_seconds)

    @property
    def coverable(self) -> float:
        """The share that could be covered, see `coverable_seconds`."""
        return self._share(self.coverable_seconds)

    def _share(self, seconds: float) -> float:
        whole = self.out.seconds + self.back.seconds
        return seconds / whole if whole else 1.0

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; the keys are the attribute names."""
        own = {"out": self.out.to_dict(), "back": self.back.to_dict(), "covered": self.covered, "coverable": self.coverable}
        return asdict(self) | own


# --- finding the copies -----------------------------------------------------------------------------------------------


def host_copy(module: Module, computation: Computation, one: Instruction) -> tuple[Direction, int] | None:
    """The direction and bytes of the host copy that `one` starts, or is; None if it is none."""
    if one.opcode in FREE or one.opcode.endswith("-done") or one.opcode in ("while", "call", "conditional", "custom-call"):
        return None
    if one.opcode == "copy-start":
        made, taken = (_arrays_of(part)[0] for part in elements(one.shape)[:2])
        return _moved(taken.on_host, made.on_host, made.bytes)
    called = module.computations.get(one.attribute("calls") or "")
    inside = computation if called is None else called
    for inner in [one] if called is None else called:
        source = inside.operand(inner, 0)
        if source is None or not source.arrays or not inner.arrays or len(inner.arrays) > 1:
            continue
        if inner.opcode == "dynamic-update-slice":
            update = inside.operand(inner, 1)
            if update is not None and source.arrays[0].on_host:
                return _moved(update.arrays[0].on_host, True, update.arrays[0].bytes)
        elif inner.opcode in ("copy", "dynamic-slice", "slice"):
            found = _moved(source.arrays[0].on_host, _on_host(one, inner), inner.arrays[0].bytes)
            if found is not None:
                return found
    return None


def _on_host(one: Instruction, inner: Instruction) -> bool:
    # Where a copy is started by another computation, the result's place is written at the start.
    return one.arrays[-1].on_host if one is inner else inner.arrays[0].on_host


def _moved(from_host: bool, to_host: bool, size: int) -> tuple[Direction, int] | None:
    if from_host == to_host:
        return None
    return ("out" if to_host else "back"), size


Roots = str | list[Any]


@dataclass(frozen=True)
class RoundTrip:
    """The instructions, by name, that make an array, start its copy to the host, start its copy back, and read it first."""

    made: str
    out: str
    back: str
    read: str


def round_trips(computation: Computation, direction: Callable[[Instruction], str | None]) -> list[RoundTrip]:
    """The arrays that leave for the host and come back in `computation` itself, not in its loops.

    Args:
      direction: "out" or "back" of an instruction that starts a copy between device and host, None of any other.
    """
    roots: dict[str, Roots] = {}
    sources: dict[str, tuple[str, str]] = {}
    readers: dict[str, str] = {}
    for one in computation:
        if one.opcode in FREE or one.opcode.endswith("-done"):
            roots[one.name] = _passed_on(one, roots)
            continue
        for read in (root for operand in one.operands for root in _flat(roots.get(operand, operand))):
            readers.setdefault(read, one.name)
        way = direction(one)
        source = roots.get(one.operands[0], one.operands[0]) if way and one.operands else None
        if way and isinstance(source, str):
            sources[one.name] = way, source
    return list(_pairs(sources, readers))


def _pairs(sources: Mapping[str, tuple[str, str]], readers: Mapping[str, str]) -> Any:
    for back, (way, out) in sources.items():
        if way == "back" and out in sources and sources[out][0] == "out" and back in readers:
            yield RoundTrip(sources[out][1], out, back, readers[back])


def _passed_on(one: Instruction, roots: Mapping[str, Roots]) -> Roots:
    """What an instruction that makes nothing hands on, by the names of the instructions that made it."""
    taken = [roots.get(operand, operand) for operand in one.operands]
    if one.opcode == "get-tuple-element":
        whole, index = taken[0], one.attribute("index")
        return whole[int(index)] if isinstance(whole, list) and index is not None and int(index) < len(whole) else one.name
    if one.opcode == "tuple":
        return taken
    return taken[0] if one.opcode not in ("parameter", "constant") and len(taken) == 1 else one.name


def _flat(roots: Roots) -> list[str]:
    return [roots] if isinstance(roots, str) else [name for one in roots for name in _flat(one)]
