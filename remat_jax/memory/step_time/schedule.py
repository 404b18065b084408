"""The modelled time of a compiled step, simulated from its schedule, and how much of its transfers overlaps compute.

XLA:GPU and XLA:TPU write their schedule into the module: one line starts a copy or a collective, a later line waits for it, and
the lines in between may overlap it. Compute runs line by line on one stream, copies to the host on a second, copies back on a
third, collectives on a fourth, on a TPU the copies between device memory and the core's own memory on a fifth, and what XLA:TPU
runs on the SparseCore on a sixth. A copy or a collective starts when its line is reached and its stream is free. At a line that
waits, compute stops until the copy or the collective is done.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

from remat_jax.errors import ArgumentError
from remat_jax.hardware import Target
from remat_jax.hardware.entries import SECONDS
from remat_jax.hardware.rates import Rates
from remat_jax.memory.hlo.copies import Copies, Direction, Overlap, host_copy, round_trips, started_copy
from remat_jax.memory.hlo.scalars import trip_count
from remat_jax.memory.hlo.text import Computation, HloModule, Instruction, parse
from remat_jax.memory.step_time.collectives import exchange_seconds
from remat_jax.memory.step_time.kernels import KernelTimes

Lane = Literal["out", "back", "exchange", "prefetch", "sparse"]
"""The streams other than compute: copies to the host, copies back, collectives, copies between a TPU's own memories, and what
its SparseCore runs, except collectives."""
_ENTERED = ("while", "call", "conditional")
_MATTERS = 0.05
"""Assumed latencies are reported if they make up at least this share of the step's modelled time."""


@dataclass(frozen=True)
class StepTime:
    """The modelled time of one execution of a compiled module.

    Attributes:
      seconds, compute_seconds: the time of the step, and the part in which compute runs. In the rest, compute waits for copies
        to and from the host, for collectives, and for the SparseCore.
      overlap, exchanges: the copies to and from the host, and the collectives.
      untimed: opcodes and `custom_call_target`s whose arithmetic is unknown here. They are timed by the bytes that they move.
      assumed: the names (in `Rates`) of rates that were used and are neither measured nor published. Assumed latencies are
        listed if they make up at least 5 % of `seconds`.
    """

    seconds: float
    compute_seconds: float
    overlap: Overlap
    exchanges: Copies
    untimed: tuple[str, ...]
    assumed: tuple[str, ...]


def step_time(
    text: str | HloModule, target: Target, rates: Rates | None = None, *, kernels: Mapping[str, float] | None = None
) -> StepTime:
    """The modelled time of the compiled module `text` on one device of `target`, at the target's rates or at `rates`.

    A kernel takes its launch time, plus its compute time or its memory time, whichever is longer. A loop runs for its trip
    count, or once if the compiler does not know it. A `conditional` runs its longest branch; if some branches start copies or
    collectives, it runs the longest of these branches. `kernels` maps the name of a Pallas kernel to the FLOPs of one call.

    >>> from remat_jax.hardware import target
    >>> text = '''
    ... ENTRY %main (x: bf16[8192,8192]) -> bf16[8192,8192] {
    ...   %x = bf16[8192,8192]{1,0} parameter(0)
    ...   ROOT %y = bf16[8192,8192]{1,0} dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}
    ... }
    ... '''
    >>> rates = Rates({"bfloat16": 2.0**40}, 1e15)
    >>> step_time(text, target("h200"), rates).seconds
    1.0
    """
    entry = parse(text).entry
    rates = Rates.of(target) if rates is None else rates
    time = _Player(entry, target, rates, kernels).play()
    latencies = {name for name in time.assumed if name in SECONDS}
    if latencies:
        without = _Player(entry, target, _without(rates, latencies), kernels).play()
        if time.seconds - without.seconds < _MATTERS * time.seconds:
            time = replace(time, assumed=tuple(name for name in time.assumed if name not in latencies))
    return time


def _without(rates: Rates, latencies: set[str]) -> Rates:
    links = rates.links
    if links is not None:
        between = latencies & {"device_link_seconds", "network_seconds"}
        links = replace(links, **{name.replace("device_link", "device"): 0.0 for name in between})
    on_device = dict.fromkeys(latencies & {"launch_seconds", "copy_seconds"}, 0.0)
    return replace(rates, links=links, **on_device)  # type: ignore[arg-type]


# --- simulating the schedule ------------------------------------------------------------------------------------------


@dataclass
class _Stream:
    bytes: int = 0
    seconds: float = 0.0
    waited: float = 0.0
    spans: list[tuple[float, float]] = field(default_factory=list)

    def copies(self, busy: list[tuple[float, float]]) -> Copies:
        window = [(self.spans[0][0], self.waited)] if self.spans else []
        return Copies(len(self.spans), self.bytes, self.seconds, _common(self.spans, busy), _common(window, busy))


class _Player:
    def __init__(self, entry: Computation, target: Target, rates: Rates, kernels: Mapping[str, float] | None) -> None:
        self.entry, self.target, self.rates = entry, target, rates
        self.kernels = KernelTimes(rates, kernels)
        self.now = self.compute = 0.0
        self.busy: list[tuple[float, float]] = []
        self.streams: dict[Lane, _Stream] = {lane: _Stream() for lane in get_args(Lane)}
        # Dicts from instruction name to the step's compute time up to the instruction's start and up to its end, and to the
        # duration of the copy that the instruction starts.
        self.before: dict[str, float] = {}
        self.after: dict[str, float] = {}
        self.copying: dict[str, float] = {}
        self._sending: dict[str, bool] = {}
        self._totals: dict[str, float] = {}

    def play(self) -> StepTime:
        """Simulate the schedule once."""
        self._run(self.entry)
        out, back, exchanges = (self.streams[lane].copies(self.busy) for lane in ("out", "back", "exchange"))
        overlap = Overlap(out, back, self.compute, self.now, self._coverable(out, back))
        return StepTime(self.now, self.compute, overlap, exchanges, tuple(sorted(self.kernels.unknown)), self._assumed())

    def _run(self, computation: Computation) -> None:
        pending: dict[str, tuple[Lane, float]] = {}
        for instruction in computation:
            self.before[instruction.name] = self.compute
            self._play(instruction, pending)
            self.after[instruction.name] = self.compute
        for lane, end in pending.values():
            self._wait(lane, end)

    def _play(self, instruction: Instruction, pending: dict[str, tuple[Lane, float]]) -> None:
        part, channel = instruction.collective_part
        if instruction.opcode.endswith("-done") or part == "done":
            beginning = channel or (instruction.operands[0] if instruction.operands else "")
            if beginning in pending:
                self._wait(*pending.pop(beginning))
        elif instruction.opcode in _ENTERED:
            self._enter(instruction)
        elif (started := self._beside(instruction)) is not None:
            lane, size, seconds = started
            end = self._start(lane, size, seconds)
            self.copying[instruction.name] = seconds
            if instruction.opcode.endswith("-start") or part == "start":
                pending[channel or instruction.name] = (lane, end)
            else:
                self._wait(lane, end)
        else:
            self._work(self.kernels.seconds(instruction))

    def _beside(self, instruction: Instruction) -> tuple[Lane, int, float] | None:
        """(lane, bytes, seconds) of what an instruction starts beside compute; None if it starts nothing."""
        collective = instruction.collective
        if collective is not None:
            seconds = exchange_seconds(collective, self.target, self.rates.links)
            if seconds is None:
                raise ArgumentError(
                    f"target={self.target.name!r}: the step runs a collective ({collective.opcode}), but the rate of the links "
                    "between the devices is unknown; add device_link_bytes_per_s, and network_bytes_per_s for several hosts, "
                    "to the file that describes the target"
                )
            return "exchange", sum(array.bytes for array in collective.arrays), seconds
        if instruction.opcode == "call-start":  # no source has the SparseCore's rates: timed like a kernel, by its bytes
            return "sparse", 0, self.kernels.seconds(instruction)
        copy = host_copy(instruction)
        if copy is not None:
            return *copy, self.rates.copy_seconds + copy[1] / self._link(copy[0])
        moved = started_copy(instruction) if self.rates.clock_hz is not None else None
        return None if moved is None else ("prefetch", moved.part.bytes, moved.part.bytes / self.rates.hbm_bytes_per_s)

    def _link(self, direction: Direction) -> float:
        rate = self.rates.out_bytes_per_s if direction == "out" else self.rates.in_bytes_per_s
        if rate is None:
            raise ArgumentError(
                f"target={self.target.name!r} has no host_link_bytes_per_s, so copies to and from the host cannot be timed; "
                "add it to the file that describes the target"
            )
        return rate

    def _enter(self, instruction: Instruction) -> None:
        body, trips = self._body(instruction)
        if body is not None and not self._sends(body):
            self._work(trips * self._total(body))
        elif body is not None:
            for _ in range(trips):
                self._run(body)

    def _body(self, instruction: Instruction) -> tuple[Computation | None, int]:
        """The computation that a loop, a call or a `conditional` runs (see `step_time`), and how often."""
        bodies = instruction.bodies
        if len(bodies) > 1:
            bodies = (max(bodies, key=lambda branch: (self._sends(branch), self._total(branch))),)
        return (bodies[0] if bodies else None), trip_count(instruction, unknown=1) if instruction.opcode == "while" else 1

    def _sends(self, computation: Computation) -> bool:
        """Whether a computation starts copies or collectives. If so, every iteration of its loop is simulated."""
        if computation.name not in self._sending:
            inner = (self._body(each)[0] for each in computation if each.opcode in _ENTERED)
            starts = any(map(self._beside, computation))
            self._sending[computation.name] = starts or any(map(self._sends, filter(None, inner)))
        return self._sending[computation.name]

    def _total(self, computation: Computation) -> float:
        if computation.name not in self._totals:
            total = 0.0
            for instruction in computation:
                if instruction.opcode in _ENTERED:
                    body, trips = self._body(instruction)
                    total += trips * self._total(body) if body is not None else 0.0
                elif self._beside(instruction) is None and instruction.collective_part[0] != "done":
                    total += self.kernels.seconds(instruction)
            self._totals[computation.name] = total
        return self._totals[computation.name]

    def _work(self, seconds: float) -> None:
        if seconds > 0:
            self.busy.append((self.now, self.now + seconds))
            self.now += seconds
            self.compute += seconds

    def _start(self, lane: Lane, size: int, seconds: float) -> float:
        stream = self.streams[lane]
        begin = max(self.now, stream.spans[-1][1]) if stream.spans else self.now
        stream.spans.append((begin, begin + seconds))
        stream.bytes, stream.seconds = stream.bytes + size, stream.seconds + seconds
        return begin + seconds

    def _wait(self, lane: Lane, end: float) -> None:
        self.now = max(self.now, end)
        self.streams[lane].waited = max(self.streams[lane].waited, self.now)

    def _assumed(self) -> tuple[str, ...]:
        needs = {"flops", "hbm_bytes_per_s", "launch_seconds"}
        if self.rates.clock_hz is not None:
            # The compiler's cycles tell the time of most kernels.
            needs = {"flops"} if self.kernels.dtypes else set()
        needs |= {"out_bytes_per_s", "copy_seconds"} if self.streams["out"].spans else set()
        needs |= {"in_bytes_per_s", "copy_seconds"} if self.streams["back"].spans else set()
        if self.streams["exchange"].spans:
            needs |= {"device_link_bytes_per_s", "device_link_seconds"}
            needs |= {"network_bytes_per_s", "network_seconds"} if self.target.linked_groups > 1 else set()
        return tuple(name for name in self.rates.assumed(self.kernels.dtypes) if name in needs)

    def _coverable(self, out: Copies, back: Copies) -> float:
        # An array's two copies can overlap only the compute that runs after the array is computed and before the copy is first
        # read. `together` maps a copy out to the seconds by which it and its copy back exceed this compute. `alone` maps each
        # copy to the seconds by which it alone exceeds this compute. With several copies back, the largest excess counts.
        together: dict[str, float] = {}
        alone: dict[Direction, dict[str, float]] = {"out": {}, "back": {}}
        for trip in round_trips(self.entry):
            between = self.before[trip.read] - self.after[trip.made]
            _raise_to(together, trip.out, self.copying[trip.out] + self.copying[trip.back] - between)
            _raise_to(alone["out"], trip.out, self.copying[trip.out] - between)
            _raise_to(alone["back"], trip.back, self.copying[trip.back] - between)
        reachable = sum(
            min(copies.seconds - sum(exposed.values()), copies.available_seconds)
            for copies, exposed in ((out, alone["out"]), (back, alone["back"]))
        )
        return min(reachable, out.seconds + back.seconds - sum(together.values()))


def _raise_to(longest: dict[str, float], name: str, seconds: float) -> None:
    longest[name] = max(seconds, longest.get(name, 0.0))


def _common(some: list[tuple[float, float]], others: list[tuple[float, float]]) -> float:
    """The total length of the intersection of two sorted lists of spans; spans of one list do not overlap."""
    total, place = 0.0, 0
    for begin, end in some:
        while place < len(others) and others[place][1] <= begin:
            place += 1
        at = place
        while at < len(others) and others[at][0] < end:
            total += max(0.0, min(end, others[at][1]) - max(begin, others[at][0]))
            at += 1
    return total
