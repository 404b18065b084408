"""What an offload's copies cost in time, read from the schedule of a compiled module.

XLA:GPU writes the order in which it starts things into the module: a copy is started at one line and waited for at another, and
what stands between may run meanwhile. Here the schedule is played: compute runs line by line on one stream; the copies to the
host run one after the other on a second, those back on a third; a copy starts when its line is reached and the copies of its
direction before it are done; the line that waits for a copy holds compute up until the copy is done. Nothing is run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from remat_jax.errors import ArgumentError
from remat_jax.hardware import Target
from remat_jax.memory.hlo import FREE, Computation, Instruction, Module, elements, matmul_flops, parse, traffic
from remat_jax.memory.hlo import arrays_of as _arrays_of
from remat_jax.memory.round_trips import round_trips
from remat_jax.memory.slots import scanned_offload_is_miscompiled as scanned_offload_is_miscompiled

Direction = Literal["out", "back"]
_DTYPES = {"bf16": "bfloat16", "f16": "float16", "f64": "float64", "f8e4m3fn": "float8_e4m3fn", "f8e5m2": "float8_e5m2"}


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


def read_overlap(
    text: str | Module,
    target: Target,
    *,
    flops_per_s: float | None = None,
    hbm_bytes_per_s: float | None = None,
    host_link_bytes_per_s: float | None = None,
) -> Overlap:
    """What compute covers of the host copies in the compiled module `text`.

    An instruction takes the longer of its FLOPs (dots, matmul calls, convolutions) at the target's rate and its bytes at the
    rate of the device memory; a loop runs as often as the compiler knows it does (once where it does not), of a `conditional`
    the longest branch. Float32 is taken to be tensorfloat32 where the target has it. A kernel that is only called by name
    (attention) counts its bytes.

    Args:
      text: `compiled.as_text()` of a program compiled for a GPU.
      target: whose rates are used; they are nominal.
      flops_per_s: a rate for every dtype instead.
      hbm_bytes_per_s, host_link_bytes_per_s: rates instead of the target's; `math.inf` leaves the device memory out.

    Raises:
      ArgumentError: a rate is not positive, or neither given nor known of the target.

    >>> from remat_jax.hardware import target
    >>> text = '''
    ... ENTRY %main (x: f32[250000000]) -> f32[250000000] {
    ...   %x = f32[250000000]{0} parameter(0)
    ...   %copy-start = (f32[250000000]{0:S(5)}, f32[250000000]{0}, u32[]) copy-start(%x)
    ...   %y = f32[250000000]{0} negate(%x)
    ...   %copy-done = f32[250000000]{0:S(5)} copy-done(%copy-start)
    ...   ROOT %z = f32[250000000]{0} negate(%y)
    ... }
    ... '''
    >>> found = read_overlap(text, target("h200"), hbm_bytes_per_s=4e12, host_link_bytes_per_s=50e9)
    >>> found.out.bytes, found.out.seconds, round(found.out.covered, 3)
    (1000000000, 0.02, 0.025)
    """
    rates = _Rates(
        target,
        flops_per_s,
        _rate("hbm_bytes_per_s", hbm_bytes_per_s, target),
        _rate("host_link_bytes_per_s", host_link_bytes_per_s, target),
    )
    if flops_per_s is not None:
        _rate("flops_per_s", flops_per_s, target)
    module = parse(text)
    player = _Player(module, rates)
    player.run(module.computations[module.entry])
    return player.result()


def _rate(name: str, given: float | None, target: Target) -> float:
    rate = given if given is not None else getattr(target, name)
    if rate is None:
        raise ArgumentError(f"{name}: target={target.name!r} does not say; name a GPU such as 'h200', or pass {name}=")
    if not rate > 0:
        raise ArgumentError(f"{name}={rate!r}: expected a positive number per second")
    return float(rate)


@dataclass(frozen=True)
class _Rates:
    target: Target
    flops: float | None
    memory: float
    link: float

    def of(self, dtype: str) -> float:
        if self.flops is not None:
            return self.flops
        known: Mapping[str, float] = self.target.peak_flops
        names = ("tensorfloat32", "float32") if dtype in ("f32", "c64") else (_DTYPES.get(dtype, "int8"), "float32")
        for name in names:
            if name in known:
                return known[name]
        raise ArgumentError(f"flops_per_s: target={self.target.name!r} has no rate for {dtype}; pass flops_per_s=")


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


# --- playing the schedule ---------------------------------------------------------------------------------------------


@dataclass
class _Stream:
    free: float = 0.0
    bytes: int = 0
    spans: list[tuple[float, float]] = field(default_factory=list)
    first: float | None = None
    waited: float = 0.0


class _Player:
    def __init__(self, module: Module, rates: _Rates) -> None:
        self.module, self.rates = module, rates
        self.now = self.compute = 0.0
        self.busy: list[tuple[float, float]] = []
        self.streams: dict[Direction, _Stream] = {"out": _Stream(), "back": _Stream()}
        # How much was computed before an instruction and once it is done, and how long the copy takes that it starts.
        self.before: dict[str, float] = {}
        self.after: dict[str, float] = {}
        self.copying: dict[str, float] = {}
        self._copies: dict[str, bool] = {}
        self._seconds: dict[str, float] = {}

    def run(self, computation: Computation) -> None:
        pending: dict[str, tuple[Direction, float]] = {}
        for one in computation:
            self.before[one.name] = self.compute
            self._play(computation, one, pending)
            self.after[one.name] = self.compute
        for direction, end in pending.values():
            self._wait(direction, end)

    def _play(self, computation: Computation, one: Instruction, pending: dict[str, tuple[Direction, float]]) -> None:
        if one.opcode.endswith("-done"):
            if one.operands and one.operands[0] in pending:
                self._wait(*pending.pop(one.operands[0]))
        elif one.opcode in ("while", "call", "conditional"):
            self._enter(one)
        elif (found := host_copy(self.module, computation, one)) is not None:
            end = self._start(*found)
            self.copying[one.name] = found[1] / self.rates.link
            if one.opcode.endswith("-start"):
                pending[one.name] = (found[0], end)
            else:
                self._wait(found[0], end)
        else:
            self._work(self._cost(computation, one))

    def _enter(self, one: Instruction) -> None:
        body, trips = self._body(one)
        if body is None:
            return
        if not self._copies_in(body):
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
        return max(branches, key=lambda branch: (self._copies_in(branch), self._total(branch)), default=None), 1

    def _copies_in(self, computation: Computation) -> bool:
        if computation.name not in self._copies:
            inner = (self._body(one)[0] for one in computation if one.opcode in ("while", "call", "conditional"))
            self._copies[computation.name] = any(host_copy(self.module, computation, one) for one in computation) or any(
                self._copies_in(body) for body in inner if body is not None
            )
        return self._copies[computation.name]

    def _total(self, computation: Computation) -> float:
        if computation.name not in self._seconds:
            total = 0.0
            for one in computation:
                if one.opcode in ("while", "call", "conditional"):
                    body, trips = self._body(one)
                    total += trips * self._total(body) if body is not None else 0.0
                else:
                    total += self._cost(computation, one)
            self._seconds[computation.name] = total
        return self._seconds[computation.name]

    def _cost(self, computation: Computation, one: Instruction) -> float:
        """Seconds of an instruction that is no loop and no host copy."""
        if one.opcode in FREE or one.opcode.endswith("-done"):
            return 0.0
        called = self.module.computations.get(one.attribute("calls") or "")
        within = [(called, inner) for inner in called] if called is not None else [(computation, one)]
        work = 0.0
        for inside, inner in within:
            flops, dtype = matmul_flops(inside, inner)
            work += flops / self.rates.of(dtype) if flops else 0.0
        return max(work, traffic(self.module, computation, one) / self.rates.memory)

    def _work(self, seconds: float) -> None:
        if seconds > 0:
            self.busy.append((self.now, self.now + seconds))
            self.now += seconds
            self.compute += seconds

    def _start(self, direction: Direction, size: int) -> float:
        stream = self.streams[direction]
        begin = max(self.now, stream.free)
        stream.free = begin + size / self.rates.link
        stream.spans.append((begin, stream.free))
        stream.bytes += size
        stream.first = self.now if stream.first is None else stream.first
        return stream.free

    def _wait(self, direction: Direction, end: float) -> None:
        self.now = max(self.now, end)
        self.streams[direction].waited = max(self.streams[direction].waited, self.now)

    def result(self) -> Overlap:
        copies = {}
        for direction, stream in self.streams.items():
            window = [(stream.first, stream.waited)] if stream.first is not None else []
            copies[direction] = Copies(
                count=len(stream.spans),
                bytes=stream.bytes,
                seconds=stream.bytes / self.rates.link,
                covered_seconds=_common(stream.spans, self.busy),
                available_seconds=_common(window, self.busy),
            )
        out, back = copies["out"], copies["back"]
        return Overlap(out, back, self.compute, self.now, self._coverable(out, back))

    def _coverable(self, out: Copies, back: Copies) -> float:
        entry = self.module.computations[self.module.entry]
        # By the copy out, what an array's two copies cannot have together (of one that is fetched more than once, its longest
        # wait); by each copy, what it could not have if all the compute between were its own.
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


def _branches(module: Module, one: Instruction) -> Iterator[Computation]:
    listed = one.rest.split("branch_computations={")[-1].split("}")[0] if "branch_computations={" in one.rest else ""
    names = [name.strip().lstrip("%") for name in listed.split(",") if name.strip()]
    names += [name for key in ("true_computation", "false_computation") if (name := one.attribute(key))]
    return (module.computations[name] for name in names if name in module.computations)


def _common(some: list[tuple[float, float]], others: list[tuple[float, float]]) -> float:
    """The time that two lists of spans, each in order and without overlap, have in common."""
    total, place = 0.0, 0
    for begin, end in some:
        while place < len(others) and others[place][1] <= begin:
            place += 1
        at = place
        while at < len(others) and others[at][0] < end:
            total += max(0.0, min(end, others[at][1]) - max(begin, others[at][0]))
            at += 1
    return total
