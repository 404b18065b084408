"""Copies to and from the host in a compiled module: which instructions they are, and what compute covers of them."""

from __future__ import annotations

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
