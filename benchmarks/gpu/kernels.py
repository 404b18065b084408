"""A step's time on a GPU, kernel by kernel, beside its estimate: `python -m benchmarks.gpu.kernels FOLDER`.

`python -m benchmarks.gpu --output DIR` writes one file for each step to `DIR/kernels`: the compiled module, and the kernels of
one step as JAX's profiler recorded them. This command adds up measured and estimated times by kind of instruction. It needs no
GPU.

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

from benchmarks.record import text_table
from remat_jax.hardware import target as target_named
from remat_jax.hardware.rates import Rates
from remat_jax.memory.hlo.copies import host_copy
from remat_jax.memory.hlo.kernel_times import KernelTimes
from remat_jax.memory.hlo.text import FREE, Computation, HloModule, Instruction, parse

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
                    count(body, times * (each.trip_count(unknown=1) if each.opcode == "while" else 1))
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
        if event.instruction not in _ENTERED:
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
    """The seconds in which kernels run, and from the first start to the last end of a kernel or copy."""
    kernels = sum(event.duration for event in events if event.kernel not in _COPIES)
    return kernels * 1e-9, max((event.start + event.duration for event in events), default=0.0) * 1e-9


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the times by kind for every file of the folder."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.kernels", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="the folder `kernels` of a run")
    parser.add_argument("--target", default="h200", help="a target, or FILE:NAME such as calibrated.toml:measured")
    options = parser.parse_args(arguments)
    rates = Rates.of(target_named(options.target))
    for path in sorted(options.folder.glob("*.json.gz")):
        module, events = read(path)
        rows = [
            (row.kind, str(row.kernels), f"{row.measured * 1e3:.2f}", f"{row.estimated * 1e3:.2f}")
            for row in by_kind(module, events, rates)
        ]
        kernels, span = busy_seconds(events)
        print(f"\n{path.name.removesuffix('.json.gz')}: {kernels * 1e3:.2f} ms of kernels in {span * 1e3:.2f} ms")
        print(text_table(("kind", "kernels", "measured ms", "estimated ms"), rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
