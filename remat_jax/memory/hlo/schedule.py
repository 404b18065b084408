"""The modelled time of a compiled step, simulated from its schedule, and how far compute covers copies and exchanges.

XLA:GPU writes its schedule into the module: one line starts a copy or a collective, a later line waits for it, and the lines
between may overlap it. This module simulates the schedule; nothing is run. Compute runs line by line on one stream, copies to
the host on a second, copies back on a third, collectives on a fourth. A copy or a collective starts when its line is reached
and its stream is free. The line that waits for it delays compute until it is done.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from remat_jax.errors import ArgumentError
from remat_jax.hardware import Target
from remat_jax.hardware.entries import SECONDS
from remat_jax.hardware.rates import Rates
from remat_jax.memory.hlo.collectives import exchange_of, exchange_seconds
from remat_jax.memory.hlo.copies import Copies, Direction, Overlap, host_copy, round_trips
from remat_jax.memory.hlo.kernel_times import KernelTimes
from remat_jax.memory.hlo.slots import scanned_offload_is_miscompiled as scanned_offload_is_miscompiled
from remat_jax.memory.hlo.text import Computation, HloModule, Instruction, parse

Lane = Literal["out", "back", "exchange"]
"""The streams beside compute: copies to the host, copies back, collectives."""


@dataclass(frozen=True)
class StepTime:
    """The modelled time of one execution of a compiled module.

    Attributes:
      seconds: the whole time: compute, and waiting for copies and exchanges.
      compute_seconds: the time of compute alone.
      overlap: the copies to and from the host.
      exchanges: the collectives, in the same terms.
      untimed: custom calls and instructions with unknown operations: only their bytes count.
      assumed: the rates that were not measured, by their names in `Rates`; latencies only if they are 5 % of the time or more.
    """

    seconds: float
    compute_seconds: float
    overlap: Overlap
    exchanges: Copies
    untimed: tuple[str, ...]
    assumed: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; the keys are the attribute names."""
        return asdict(self) | {"overlap": self.overlap.to_dict(), "exchanges": self.exchanges.to_dict()}


def step_time(
    text: str | HloModule, target: Target, rates: Rates | None = None, *, kernels: Mapping[str, float] | None = None
) -> StepTime:
    """The modelled time of the compiled module `text` on one device of `target`.

    A kernel takes its launch time plus the longer of the times for its operations and its bytes. Products reach the rate of
    their shape (`remat_jax.hardware.products`), attention kernels the rate of their operands. A loop runs for the trip count
    that the compiler knows, else once. A `conditional` takes its longest branch.

    Args:
      text: `compiled.as_text()` of a program compiled for a GPU.
      target: gives the devices, hosts and links.
      rates: used instead of the target's `Rates.of(target)`.
      kernels: the operations of Pallas kernels by name, as in `ExportedProgram.kernels`.

    Raises:
      ArgumentError: the target lacks a rate that the module needs.
      TargetError: the target has no rates at all.
      UnsupportedError: the text has a line of an unknown form.

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
    module = parse(text)
    rates = Rates.of(target) if rates is None else rates
    found = _played(module, target, rates, kernels)
    late = {name for name in found.assumed if name in SECONDS}
    if late and found.seconds - _played(module, target, _at_once(rates, late), kernels).seconds < _MATTERS * found.seconds:
        found = replace(found, assumed=tuple(name for name in found.assumed if name not in late))
    return found


_MATTERS = 0.05
"""The least share of a step's time at which an assumed latency makes the time a range."""


def _played(module: HloModule, target: Target, rates: Rates, kernels: Mapping[str, float] | None) -> StepTime:
    player = _Player(module, target, rates, kernels)
    player.run(module.computations[module.entry])
    return player.result()


def _at_once(rates: Rates, late: Collection[str]) -> Rates:
    """The rates without the latencies in `late`."""
    links = rates.links
    if links is not None:
        between = [name for name in late if name in ("device_link_seconds", "network_seconds")]
        links = replace(links, **{name.replace("device_link", "device"): 0.0 for name in between})
    own = {name: 0.0 for name in late if name in ("launch_seconds", "copy_seconds")}
    return replace(rates, links=links, **own)  # type: ignore[arg-type]


# --- simulating the schedule ------------------------------------------------------------------------------------------


@dataclass
class _Stream:
    free: float = 0.0
    bytes: int = 0
    count: int = 0
    seconds: float = 0.0
    spans: list[tuple[float, float]] = field(default_factory=list)
    first: float | None = None
    waited: float = 0.0


class _Player:
    def __init__(self, module: HloModule, target: Target, rates: Rates, kernels: Mapping[str, float] | None) -> None:
        self.module, self.target, self.rates = module, target, rates
        self.kernels = KernelTimes(module, rates, kernels)
        self.now = self.compute = 0.0
        self.busy: list[tuple[float, float]] = []
        self.streams: dict[Lane, _Stream] = {"out": _Stream(), "back": _Stream(), "exchange": _Stream()}
        # By instruction: the compute time before it, the compute time after it, and the duration of the copy that it starts.
        self.before: dict[str, float] = {}
        self.after: dict[str, float] = {}
        self.copying: dict[str, float] = {}
        self._sending: dict[str, bool] = {}
        self._totals: dict[str, float] = {}

    def run(self, computation: Computation) -> None:
        pending: dict[str, tuple[Lane, float]] = {}
        for one in computation:
            self.before[one.name] = self.compute
            self._play(computation, one, pending)
            self.after[one.name] = self.compute
        for lane, end in pending.values():
            self._wait(lane, end)

    def _play(self, computation: Computation, one: Instruction, pending: dict[str, tuple[Lane, float]]) -> None:
        if one.opcode.endswith("-done"):
            if one.operands and one.operands[0] in pending:
                self._wait(*pending.pop(one.operands[0]))
        elif one.opcode in ("while", "call", "conditional"):
            self._enter(one)
        elif (started := self._beside(computation, one)) is not None:
            lane, size, seconds = started
            end = self._start(lane, size, seconds)
            self.copying[one.name] = seconds
            if one.opcode.endswith("-start"):
                pending[one.name] = (lane, end)
            else:
                self._wait(lane, end)
        else:
            self._work(self.kernels.seconds(computation, one))

    def _beside(self, computation: Computation, one: Instruction) -> tuple[Lane, int, float] | None:
        """The lane, bytes and seconds of a copy or collective that an instruction starts; None if it computes."""
        found = exchange_of(self.module, computation, one)
        if found is not None:
            seconds = exchange_seconds(*found, self.target, self.rates.links)
            if seconds is None:
                raise ArgumentError(
                    f"target={self.target.name!r}: its devices exchange arrays ({found[1].opcode}), but the rate of the links "
                    "between them is unknown; state device_link_bytes_per_s, and network_bytes_per_s for several hosts, in "
                    "the file that describes the target"
                )
            return "exchange", sum(array.bytes for array in found[1].arrays), seconds
        copied = host_copy(self.module, computation, one)
        return None if copied is None else (*copied, self.rates.copy_seconds + copied[1] / self._link(copied[0]))

    def _link(self, direction: Direction) -> float:
        rate = self.rates.out_bytes_per_s if direction == "out" else self.rates.in_bytes_per_s
        if rate is None:
            raise ArgumentError(
                f"host_link_bytes_per_s: target={self.target.name!r} does not state this rate; pass host_link_bytes_per_s="
            )
        return rate

    def _enter(self, one: Instruction) -> None:
        body, trips = self._body(one)
        if body is None:
            return
        if not self._sends(body):
            self._work(trips * self._total(body))
            return
        for _ in range(trips):
            self.run(body)

    def _body(self, one: Instruction) -> tuple[Computation | None, int]:
        if one.opcode == "while":
            trips = int(one.config.get("known_trip_count", {}).get("n", 1))
            return self.module.computations.get(one.attribute("body") or ""), trips
        if one.opcode == "call":
            return self.module.computations.get(one.attribute("to_apply") or one.attribute("calls") or ""), 1
        branches = list(_branches(self.module, one))
        return max(branches, key=lambda branch: (self._sends(branch), self._total(branch)), default=None), 1

    def _sends(self, computation: Computation) -> bool:
        """Whether a computation starts copies or collectives: then every round of its loop is simulated."""
        if computation.name not in self._sending:
            inner = (self._body(one)[0] for one in computation if one.opcode in ("while", "call", "conditional"))
            self._sending[computation.name] = any(self._beside(computation, one) for one in computation) or any(
                self._sends(body) for body in inner if body is not None
            )
        return self._sending[computation.name]

    def _total(self, computation: Computation) -> float:
        """The compute seconds of one round."""
        if computation.name not in self._totals:
            total = 0.0
            for one in computation:
                if one.opcode in ("while", "call", "conditional"):
                    body, trips = self._body(one)
                    total += trips * self._total(body) if body is not None else 0.0
                elif self._beside(computation, one) is None:
                    total += self.kernels.seconds(computation, one)
            self._totals[computation.name] = total
        return self._totals[computation.name]

    def _work(self, seconds: float) -> None:
        if seconds > 0:
            self.busy.append((self.now, self.now + seconds))
            self.now += seconds
            self.compute += seconds

    def _start(self, lane: Lane, size: int, seconds: float) -> float:
        stream = self.streams[lane]
        begin = max(self.now, stream.free)
        stream.free = begin + seconds
        stream.spans.append((begin, stream.free))
        stream.count, stream.bytes, stream.seconds = stream.count + 1, stream.bytes + size, stream.seconds + seconds
        stream.first = self.now if stream.first is None else stream.first
        return stream.free

    def _wait(self, lane: Lane, end: float) -> None:
        self.now = max(self.now, end)
        self.streams[lane].waited = max(self.streams[lane].waited, self.now)

    def result(self) -> StepTime:
        lanes = {lane: self._lane(stream) for lane, stream in self.streams.items()}
        out, back = lanes["out"], lanes["back"]
        overlap = Overlap(out, back, self.compute, self.now, self._coverable(out, back))
        untimed = tuple(sorted(self.kernels.unknown))
        return StepTime(self.now, self.compute, overlap, lanes["exchange"], untimed, self._assumed(lanes))

    def _assumed(self, lanes: dict[Lane, Copies]) -> tuple[str, ...]:
        """The assumed rates that this module needs."""
        needs = {"flops", "hbm_bytes_per_s", "launch_seconds"}
        needs |= {"out_bytes_per_s", "copy_seconds"} if lanes["out"].count else set()
        needs |= {"in_bytes_per_s", "copy_seconds"} if lanes["back"].count else set()
        if lanes["exchange"].count:
            needs |= {"device_link_bytes_per_s", "device_link_seconds"}
            needs |= {"network_bytes_per_s", "network_seconds"} if self.target.hosts > 1 else set()
        return tuple(name for name in self.rates.assumed(self.kernels.dtypes) if name in needs)

    def _lane(self, stream: _Stream) -> Copies:
        window = [(stream.first, stream.waited)] if stream.first is not None else []
        return Copies(
            count=stream.count,
            bytes=stream.bytes,
            seconds=stream.seconds,
            covered_seconds=_common(stream.spans, self.busy),
            available_seconds=_common(window, self.busy),
        )

    def _coverable(self, out: Copies, back: Copies) -> float:
        entry = self.module.computations[self.module.entry]
        # `together`: the uncoverable time of an array's two copies, by the copy out (the longest wait if the array is fetched
        # more than once). `alone`: the uncoverable time of each copy if it could use all compute between the copies.
        together: dict[str, float] = {}
        alone: dict[Direction, dict[str, float]] = {"out": {}, "back": {}}
        for trip in round_trips(entry, lambda one: (host_copy(self.module, entry, one) or (None,))[0]):
            between = self.before[trip.read] - self.after[trip.made]
            _raise_to(together, trip.out, self.copying[trip.out] + self.copying[trip.back] - between)
            _raise_to(alone["out"], trip.out, self.copying[trip.out] - between)
            _raise_to(alone["back"], trip.back, self.copying[trip.back] - between)
        reachable = sum(
            min(one.seconds - sum(exposed.values()), one.available_seconds)
            for one, exposed in ((out, alone["out"]), (back, alone["back"]))
        )
        return min(reachable, out.seconds + back.seconds - sum(together.values()))


def _raise_to(found: dict[str, float], name: str, seconds: float) -> None:
    found[name] = max(seconds, found.get(name, 0.0))


def _branches(module: HloModule, one: Instruction) -> Iterator[Computation]:
    listed = one.rest.split("branch_computations={")[-1].split("}")[0] if "branch_computations={" in one.rest else ""
    names = [name.strip().lstrip("%") for name in listed.split(",") if name.strip()]
    names += [name for key in ("true_computation", "false_computation") if (name := one.attribute(key))]
    return (module.computations[name] for name in names if name in module.computations)


def _common(some: list[tuple[float, float]], others: list[tuple[float, float]]) -> float:
    """The total intersection of two lists of spans, each in order and without overlap."""
    total, place = 0.0, 0
    for begin, end in some:
        while place < len(others) and others[place][1] <= begin:
            place += 1
        at = place
        while at < len(others) and others[at][0] < end:
            total += max(0.0, min(end, others[at][1]) - max(begin, others[at][0]))
            at += 1
    return total
