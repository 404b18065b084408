"""A step's time on a GPU, kernel by kernel, beside its estimate: `python -m benchmarks.gpu.kernels DIR/kernels`.

`python -m benchmarks.gpu --output DIR` writes one file for each step to `DIR/kernels`: the compiled module, and the kernels of
one step as JAX's profiler recorded them. This command estimates the same modules, and adds up measured and estimated times by
step and by kind of instruction. It needs no GPU.

A step runs as a few CUDA graphs, so the profiler knows the graph of a kernel, but not its instruction. A kernel that XLA
generated has its instruction's name, or, for equal fusions, the name of one of them. A library's kernel has its own name.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.figures import markdown
from benchmarks.record import write_json
from remat_jax.hardware import Target
from remat_jax.hardware import target as target_named
from remat_jax.hardware.rates import Rates
from remat_jax.memory.hlo.copies import host_copy
from remat_jax.memory.hlo.scalars import trip_count
from remat_jax.memory.hlo.text import FREE, Computation, HloModule, Instruction, parse
from remat_jax.memory.step_time.kernels import KernelTimes
from remat_jax.memory.step_time.schedule import step_time

_ENTERED = ("while", "call", "conditional")
LIBRARY, COPY = "library", "copy to or from the host"
_SPECIAL = ("dot", "convolution", "reduce", "dynamic-update-slice", "scatter")
_COPIES = ("MemcpyD2H", "MemcpyH2D")


class Event(NamedTuple):
    """A kernel or a copy that ran: its instruction or graph, its name, its stream, its start and duration in nanoseconds."""

    instruction: str
    kernel: str
    stream: str
    start: float
    duration: float


class KindTime(NamedTuple):
    """The instructions of one kind: how many kernels ran, their measured seconds, and the estimated seconds."""

    kind: str
    kernels: int
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


def executions(module: HloModule) -> Counter[Instruction]:
    """How often each instruction that takes time runs, copies to and from the host left out."""
    runs: Counter[Instruction] = Counter()

    def count(computation: Computation, times: int) -> None:
        for each in computation:
            if each.opcode in _ENTERED:
                for body in each.bodies:
                    count(body, times * (trip_count(each, unknown=1) if each.opcode == "while" else 1))
            elif each.opcode not in FREE and not each.opcode.endswith("-done") and host_copy(each) is None:
                runs[each] += times

    count(module.entry, 1)
    return runs


def kind(instruction: Instruction) -> str:
    """The kind of an instruction: for a fusion, what it contains and who generates its kernel; else `library`.

    >>> module = parse('''ENTRY %main (x: f32[8]) -> f32[8] {
    ...   %x = f32[8] parameter(0)
    ...   ROOT %y = f32[8] custom-call(%x), custom_call_target="cublas"
    ... }''')
    >>> kind(module.entry.root)
    'library'
    """
    if instruction.called is None:
        return LIBRARY
    inner = {each.opcode for each in instruction.called}
    generator = str(instruction.config.get("fusion_backend_config", {}).get("kind", ""))
    contains = next((opcode for opcode in _SPECIAL if opcode in inner), "element-wise")
    return f"{contains}, Triton" if "triton" in generator else contains


def by_kind(module: HloModule, events: Sequence[Event], rates: Rates) -> list[KindTime]:
    """Measured and estimated times by kind of instruction, the longest measured first."""
    runs, times = executions(module), KernelTimes(rates)
    named = {kernel_name(each): each for each in runs if each.called is not None}
    counts: Counter[str] = Counter()
    measured: dict[str, float] = defaultdict(float)
    estimated: dict[str, float] = defaultdict(float)
    for event in events:
        if event.instruction.partition(".")[0] not in _ENTERED:
            found = named.get(event.kernel)
            name = COPY if event.kernel in _COPIES else LIBRARY if found is None else kind(found)
            counts[name] += 1
            measured[name] += event.duration * 1e-9
    for instruction, count in runs.items():
        estimated[kind(instruction)] += count * times.seconds(instruction)
    rows = [KindTime(name, counts[name], measured[name], estimated[name]) for name in {*measured, *estimated}]
    return sorted(rows, key=lambda row: -row.measured)


def kernel_name(instruction: Instruction) -> str:
    """The name of the kernel that XLA generates for an instruction."""
    return instruction.name.replace(".", "_").replace("-", "_")


def busy_seconds(events: Sequence[Event]) -> tuple[float, float]:
    """The sum of the kernels' seconds, and the seconds from the first start to the last end of a kernel or copy."""
    kernels = sum(event.duration for event in events if event.kernel not in _COPIES)
    return kernels * 1e-9, max((event.start + event.duration for event in events), default=0.0) * 1e-9


def summary(folder: Path, target: Target) -> list[dict[str, Any]]:
    """For each file of the folder: the step's seconds on the device, the estimate of the same module, and the times by kind."""
    rows = []
    for path in sorted(folder.glob("*.json.gz")):
        module, events = read(path)
        running, span = busy_seconds(events)
        time = step_time(module, target)
        kinds = [row._asdict() for row in by_kind(module, events, Rates.of(target))]
        row = {"step": path.name.removesuffix(".json.gz"), "kernel_seconds": running, "device_seconds": span}
        rows.append(row | {"estimated_seconds": time.seconds, "estimated_kernel_seconds": time.compute_seconds, "kinds": kinds})
    return rows


def steps_table(rows: Sequence[dict[str, Any]]) -> str:
    """One line for each step."""
    columns = ["step", "kernels ms", "estimated", "first to last ms", "estimated", "estimated / measured"]
    keys = ("kernel_seconds", "estimated_kernel_seconds", "device_seconds", "estimated_seconds")
    lines = []
    for row in rows:
        ratio = f"{row['estimated_seconds'] / row['device_seconds']:.2f}"
        lines.append((row["step"].replace("-", ", ", 1), *(f"{row[key] * 1e3:.1f}" for key in keys), ratio))
    return markdown(columns, lines)


def kinds_table(rows: Sequence[dict[str, Any]]) -> str:
    """One line for each kind of instruction, all steps added up."""
    totals: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for kind_time in (kind_time for row in rows for kind_time in row["kinds"] if kind_time["kind"] != COPY):
        totals[kind_time["kind"]][0] += kind_time["measured"]
        totals[kind_time["kind"]][1] += kind_time["estimated"]
    ordered = sorted(totals.items(), key=lambda item: -item[1][0])
    lines = [(name, f"{measured * 1e3:.1f}", f"{estimated * 1e3:.1f}") for name, (measured, estimated) in ordered]
    return markdown(["kind", "measured ms", "estimated ms"], lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Summarise a folder in a file, or print the tables of such a file."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.kernels", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, nargs="?", help="the folder `kernels` of a run")
    parser.add_argument("--target", default="h200", help="a target, or FILE:NAME such as calibrated.toml:measured")
    parser.add_argument("--output", type=Path, help="the file to write the summary to, beside the run's provenance")
    parser.add_argument("--show", type=Path, nargs="+", metavar="FILE", help="print the steps of such files")
    parser.add_argument("--kinds", action="store_true", help="with --show: print the kinds of instruction instead")
    options = parser.parse_args(arguments)
    if (options.folder is None) == (options.show is None):
        parser.error("give a folder or --show FILE")
    if options.show:
        rows = [row for path in options.show for row in json.loads(path.read_text(encoding="utf-8"))["rows"]]
    else:
        rows = summary(options.folder, target_named(options.target))
        if options.output:
            run = json.loads((options.folder.parent / "gpu.json").read_text(encoding="utf-8"))
            write_json(options.output, {"provenance": run["provenance"], "target": options.target, "rows": rows})
    print(kinds_table(rows) if options.kinds else steps_table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
