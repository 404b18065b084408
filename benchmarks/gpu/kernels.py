"""Where a step's estimated time differs from its measured time, kernel by kernel: `python -m benchmarks.gpu.kernels FOLDER`.

`python -m benchmarks.gpu --output DIR` writes one file for each step to `DIR/kernels`: the compiled module and the kernels of one
step, as JAX's profiler saw them. This command assigns each kernel to its instruction, estimates the instruction's time, and adds
up both times by kind of instruction. No GPU is needed.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.record import text_table
from remat_jax.hardware import target as target_named
from remat_jax.hardware.rates import Rates
from remat_jax.memory.hlo.kernel_times import KernelTimes
from remat_jax.memory.hlo.text import HloModule, Instruction, parse


_ENTERED = ("while", "call", "conditional")
"""Instructions that run other instructions, which have events of their own."""


class Event(NamedTuple):
    """A kernel or a copy that ran: its HLO instruction, its own name, its stream, and its start and duration in nanoseconds."""

    instruction: str
    kernel: str
    stream: str
    start: float
    duration: float


class KindTime(NamedTuple):
    """The instructions of one kind: how many ran, and their measured and estimated seconds."""

    kind: str
    count: int
    measured: float
    estimated: float


def record(run: Callable[[], Any]) -> list[Event]:
    """The kernels and copies of the HLO modules that `run` executes, in the order of their starts."""
    import jax

    with tempfile.TemporaryDirectory(prefix="remat_jax_profile_") as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(run())
        (path,) = Path(folder).glob("**/*.xplane.pb")
        events = sorted(_events(jax.profiler.ProfileData.from_file(str(path))), key=lambda event: event.start)
    first = events[0].start if events else 0.0
    return [event._replace(start=event.start - first) for event in events]


def _events(profile: Any) -> Iterator[Event]:
    # A GPU has a plane, with a line for each stream; the host's plane has only the launches. A CPU has only the host's plane.
    planes = list(profile.planes)
    devices = [plane for plane in planes if plane.name.startswith("/device:GPU")]
    for line in (line for plane in devices or planes for line in plane.lines):
        if devices and not line.name.startswith("Stream"):
            continue
        for event in line.events:
            if instruction := dict(event.stats).get("hlo_op"):
                yield Event(str(instruction), event.name, line.name, event.start_ns, event.duration_ns)


def write(path: Path, text: str, events: Sequence[Event]) -> None:
    """Write a compiled module and its kernels, compressed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(path, "wt", encoding="utf-8") as file:
        json.dump({"text": text, "events": events}, file)


def read(path: Path) -> tuple[HloModule, list[Event]]:
    """The compiled module and the kernels in the file of `write`."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        stored = json.load(file)
    return parse(stored["text"]), [Event(*event) for event in stored["events"]]


def compare(module: HloModule, events: Sequence[Event], rates: Rates) -> dict[Instruction | None, tuple[int, float, float]]:
    """By instruction: how often it ran, and its measured and estimated seconds. Events of unknown instructions are under None.

    An instruction may launch several kernels. It ran as often as the kernel that ran most rarely among them.
    """
    instructions = {each.name: each for computation in module.computations.values() for each in computation}
    times = KernelTimes(rates)
    kernels: dict[Instruction | None, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    measured: dict[Instruction | None, float] = defaultdict(float)
    for event in events:
        instruction = instructions.get(event.instruction)
        if instruction is not None and instruction.opcode in _ENTERED:
            continue
        kernels[instruction][event.kernel] += 1
        measured[instruction] += event.duration * 1e-9
    counts = {instruction: min(names.values()) for instruction, names in kernels.items()}
    return {
        each: (counts[each], seconds, 0.0 if each is None else counts[each] * times.seconds(each))
        for each, seconds in measured.items()
    }


def kind(instruction: Instruction | None) -> str:
    """The kind of an instruction: its opcode, for a fusion its fusion kind, for a call its target; `product` if it is one."""
    if instruction is None:
        return "unknown"
    if instruction.opcode == "custom-call":
        return instruction.rest.partition('custom_call_target="')[2].partition('"')[0]
    if instruction.opcode != "fusion":
        return instruction.opcode
    inner = {each.opcode for each in instruction.called or ()}
    named = str(instruction.config.get("fusion_backend_config", {}).get("kind", ""))
    special = next((each for each in ("dot", "convolution", "reduce", "dynamic-update-slice", "scatter") if each in inner), "loop")
    return " ".join(filter(None, ("fusion", special, named)))


def by_kind(compared: dict[Instruction | None, tuple[int, float, float]]) -> list[KindTime]:
    """The times of `compare`, added up by kind, the longest measured first."""
    totals: dict[str, list[float]] = defaultdict(lambda: [0, 0.0, 0.0])
    for instruction, figures in compared.items():
        total = totals[kind(instruction)]
        for index, figure in enumerate(figures):
            total[index] += figure
    rows = [KindTime(name, int(count), measured, estimated) for name, (count, measured, estimated) in totals.items()]
    return sorted(rows, key=lambda row: -row.measured)


def _row(name: str, count: int, measured: float, estimated: float) -> tuple[str, ...]:
    ratio = f"{estimated / measured:.2f}" if measured else ""
    return name, str(count), f"{measured * 1e3:.3f}", f"{estimated * 1e3:.3f}", ratio


def main(arguments: Sequence[str] | None = None) -> int:
    """Print, for every file of the folder, the times by kind and the instructions that differ most."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.kernels", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="the folder `kernels` of a run")
    parser.add_argument("--target", default="h200", help="a target, or FILE:NAME such as calibrated.toml:measured")
    parser.add_argument("--largest", type=int, default=10, help="how many instructions to list")
    options = parser.parse_args(arguments)
    rates = Rates.of(target_named(options.target))
    columns = ("kind", "runs", "measured ms", "estimated ms", "estimated / measured")
    for path in sorted(options.folder.glob("*.json.gz")):
        compared = compare(*read(path), rates)
        rows = [_row(*row) for row in by_kind(compared)]
        total = _row("all", *(sum(figures[index] for figures in compared.values()) for index in range(3)))  # type: ignore[arg-type]
        print(f"\n{path.name.removesuffix('.json.gz')}\n{text_table(columns, [*rows, total])}")
        different = sorted((each for each in compared if each), key=lambda each: -abs(compared[each][1] - compared[each][2]))
        largest = [_row(f"{each.name} {each.op_name[-60:]}", *compared[each]) for each in different[: options.largest]]
        print(text_table(("instruction", *columns[1:]), largest))
    return 0


if __name__ == "__main__":
    sys.exit(main())
