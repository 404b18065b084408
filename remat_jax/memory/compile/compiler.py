"""Compiles for a target in child processes: sizes, buffers alive at the peak, and the schedule of host copies."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from remat_jax import compat
from remat_jax.errors import ArgumentError, CompileError, TargetError, UnsupportedError
from remat_jax.hardware import Target
from remat_jax.memory.compile import cache
from remat_jax.memory.compile.exporting import ExportedProgram as ExportedProgram
from remat_jax.memory.compile.exporting import export_step as export_step
from remat_jax.memory.compile.limit import limit_options
from remat_jax.memory.compile.process import Children, Question, ask, compiler_environment
from remat_jax.memory.compile.scratch import scratch
from remat_jax.memory.compile.tuned_kernels import Kernels, kernel_options, never_run_options, refuse
from remat_jax.memory.hlo.collectives import Collective, read_collectives
from remat_jax.memory.hlo.copies import Overlap
from remat_jax.memory.hlo.live import LiveBuffer, Schedule, named_arguments
from remat_jax.memory.hlo.schedule import StepTime, step_time
from remat_jax.memory.hlo.slots import scanned_offload_is_miscompiled
from remat_jax.memory.hlo.text import HloModule, parse
from remat_jax.memory.hlo.timeline import Timeline
from remat_jax.reading import from_plain

MOST_CHILDREN = 4
"""The most compile processes at a time: each has its own compiler, of about 1 GB."""

OPTIMISED = "gpu_after_optimizations.txt"
"""The ending of the file to which XLA writes the optimised module."""

CHILD = Path(__file__).with_name("child.py")


@dataclass(frozen=True)
class Sizes:
    """The compiler's answer, in bytes; `host_*` is in host memory.

    Attributes:
      live: the buffers on the device at the peak; empty for the target `cpu`.
      timeline: the buffers on the device over the schedule; None for the target `cpu`.
      time: the modelled time of the compiled schedule; None for the target `cpu`, and if the compiled text or a rate is
        unknown.
      no_time: why the time is unknown, in words; empty if it is known.
      miscompiled: whether a loop copies a wrong slot of a host buffer; None if the compiled text does not show it.
      collectives: the data exchanged between the devices of a mesh; None for one device, and if the compiled text is unknown.
      untiled: whether a matrix product fits no Triton tile, so that all products were compiled without Triton.
      limit_options: the memory limit of the compilation, as options for `jax.jit`; empty for XLA's own limit.
    """

    temp: int
    argument: int
    output: int
    alias: int
    host_temp: int
    host_argument: int
    host_output: int
    host_alias: int
    live: tuple[LiveBuffer, ...] = ()
    time: StepTime | None = None
    miscompiled: bool | None = False
    collectives: tuple[Collective, ...] | None = None
    untiled: bool = False
    limit_options: dict[str, int] = field(default_factory=dict, hash=False)
    timeline: Timeline | None = None
    no_time: str = ""

    @property
    def seconds(self) -> float | None:
        """The modelled time of the step; None if unknown."""
        return None if self.time is None else self.time.seconds

    @property
    def overlap(self) -> Overlap | None:
        """The schedule of copies to and from the host; None if there are none, or a rate is unknown."""
        found = None if self.time is None else self.time.overlap
        return found if found is not None and found.out.count + found.back.count else None

    @property
    def device(self) -> int:
        """Arguments + outputs − aliased + temp."""
        return self.argument + self.output - self.alias + self.temp

    @property
    def host(self) -> int:
        """Arguments + outputs − aliased + temp in host memory."""
        return self.host_temp + self.host_argument + self.host_output - self.host_alias

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Sizes:
        """The inverse of `to_dict`; raises ValueError for other data."""
        found: Sizes = from_plain(cls, data)
        return found


def compile_programs(
    programs: Sequence[ExportedProgram],
    target: Target,
    *,
    timeout: float,
    compiler_options: dict[str, Any] | None = None,
    memory_limit: int | None = None,
    on_done: Callable[[str], None] | None = None,
    kernels: Kernels | None = None,
    children: Children | None = None,
) -> dict[str, Sizes]:
    """The compiler's sizes of each program on `target`, by key. Programs are compiled in parallel, one process per core.

    A program that the same compiler compiled before with the same options comes from the cache (`cache.py`).

    Args:
      timeout: seconds for all programs together.
      memory_limit: a device memory limit for XLA in bytes (`limit.py`); a CPU has no such limit.
      on_done: called with each key when its program is compiled.
      kernels: the kernels of earlier calls for the same target with the same options; None if there are none.
      children: the processes of a larger call, which ends them. If one of several programs fails here, all present and later
        processes of that call are ended. A failure of a single program ends no other process.

    Raises:
      CompileError: the compiler failed, aborted, hung or ran out of memory; the message has its last output.
      TargetError: the target is a GPU without a compiler description.
      UnsupportedError: the target is a GPU and its compiler is not installed.
    """
    if target.kind == "gpu":
        if target.compiler_description is None:
            raise TargetError(
                f"target={target.name!r} has no compiler description, so XLA cannot compile for it: add a table "
                f"[{target.name}.compiler] to its file, and a line with its source under [{target.name}.source], in the form "
                "of the package's own targets.toml"
            )
        compat.require_gpu_compiler()
    tell = on_done or (lambda key: None)
    limits = {one.key: limit_options(memory_limit, target, one.held_bytes) for one in programs}
    options = {key: (compiler_options or {}) | limit for key, limit in limits.items()}
    digests = {one.key: cache.digest(one, target, options[one.key], CHILD) for one in programs}
    found = {digest: sizes for digest in set(digests.values()) if (sizes := cache.read(digest, target, Sizes.from_dict))}
    # Equal programs are compiled once.
    new: dict[str, ExportedProgram] = {}
    for one in programs:
        if digests[one.key] not in found:
            new.setdefault(digests[one.key], one)
    for key, digest in digests.items():
        if digest in found:
            tell(key)
    if new:
        compiled = _compiled(list(new.values()), target, timeout, options, tell, kernels, children)
        for digest, program in new.items():
            found[digest] = replace(compiled[program.key], limit_options=limits[program.key])
            cache.write(digest, target, found[digest])
        for key, digest in digests.items():
            if digest in new and new[digest].key != key:
                tell(key)
    return {key: found[digest] for key, digest in digests.items()}


def result_shapes(program: ExportedProgram, target: Target, *, timeout: float) -> list[tuple[int, ...]]:
    """The shapes of the results of `program` on each device of a mesh, as the compiler partitions them.

    Raises:
      CompileError, UnsupportedError: as in `compile_programs`.
    """
    if target.kind == "gpu":
        compat.require_gpu_compiler()
    digest = cache.digest(program, target, {"results": True}, CHILD)
    found = cache.read(digest, target, _Shapes.from_dict)
    if found is None:
        with scratch() as folder:
            entry = _entry(folder / "0", program, target, {})
            answer = _answers([entry], target, timeout, folder, lambda key: None, Kernels(folder))[program.key]
        found = _Shapes(tuple(map(tuple, answer["results"])))
        cache.write(digest, target, found)
    return list(found.shapes)


@dataclass(frozen=True)
class _Shapes:
    shapes: tuple[tuple[int, ...], ...]

    def to_dict(self) -> dict[str, Any]:
        return {"shapes": self.shapes}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> _Shapes:
        found: _Shapes = from_plain(cls, data)
        return found


def _compiled(
    programs: Sequence[ExportedProgram],
    target: Target,
    timeout: float,
    options: Mapping[str, dict[str, Any]],
    tell: Callable[[str], None],
    kernels: Kernels | None,
    children: Children | None,
) -> dict[str, Sizes]:
    with scratch() as folder:
        entries = [_entry(folder / str(index), one, target, options[one.key]) for index, one in enumerate(programs)]
        answers = _answers(entries, target, timeout, folder, tell, kernels or Kernels(folder), children)
        return {one.key: _sizes(answers[one.key], folder / str(index), one, target) for index, one in enumerate(programs)}


def _entry(folder: Path, program: ExportedProgram, target: Target, options: dict[str, Any]) -> dict[str, Any]:
    """The request for one program; the compile process writes its files to `folder`."""
    folder.mkdir()
    path = folder / "program.jaxexport"
    path.write_bytes(program.blob)
    options = never_run_options(target.kind) | options
    entry = {"key": program.key, "path": str(path), "donated": program.donated, "compiler_options": options}
    entry["mesh"] = program.mesh
    if target.kind == "gpu":
        # XLA's dump costs no measurable time.
        dump = {"xla_dump_to": str(folder / "dump"), "xla_dump_hlo_as_text": True}
        # The user's XLA_FLAGS may restrict dumps to one module, as MaxText does: override it.
        entry["compiler_options"] = options | dump | {"xla_dump_hlo_module_re": ".*"}
        entry["text"] = str(folder / "compiled.hlo")
    return entry


def _answers(
    entries: Sequence[dict[str, Any]],
    target: Target,
    timeout: float,
    folder: Path,
    tell: Callable[[str], None],
    kernels: Kernels,
    children: Children | None = None,
) -> dict[str, dict[str, Any]]:
    """The answers of all compile processes; the first failure ends them all."""
    side_by_side = max(1, min(len(entries), os.cpu_count() or 1, MOST_CHILDREN))
    environment = compiler_environment(target)
    ends = time.monotonic() + timeout

    def asked(part: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
        left = min(timeout, max(1.0, ends - time.monotonic()))
        request = {"programs": part, "compiler_description": target.compiler_description, "devices": target.devices}
        request |= {"hosts": target.hosts, "folder": str(folder)}
        doing, keys = f"compiling for target={target.name!r}", [entry["key"] for entry in part]
        return ask(Question(CHILD, request, keys, doing, environment, timeout, left=left, again=True), tell, own)

    def run(number: int) -> dict[str, dict[str, Any]]:
        part = entries[number::side_by_side]
        if target.kind != "gpu":
            return asked(part)
        file = kernels.take()
        options = kernel_options(file)
        while options:
            try:
                found = asked([_with(one, options) for one in part])
            except CompileError as error:
                if not refuse(error):
                    raise
                # Retry without the refused option; without any option if the file was refused.
                options = fewer if (fewer := kernel_options(file)) != options else {}
            else:
                kernels.give_back(file)
                return found
        return asked(part)

    own = children or Children()
    if side_by_side == 1:
        return run(0)
    with ThreadPoolExecutor(side_by_side) as pool, own:
        parts = [pool.submit(run, number) for number in range(side_by_side)]
        ended, _ = wait(parts, return_when=FIRST_EXCEPTION)
        # Ended parts first, so that a failure is raised at once and ends the others.
        return {key: answer for part in (*ended, *parts) for key, answer in part.result().items()}


def _with(entry: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    return entry | {"compiler_options": options | entry["compiler_options"]}


def _sizes(answer: dict[str, Any], folder: Path, program: ExportedProgram, target: Target) -> Sizes:
    dump = folder / "dump"
    copied = folder / "compiled.hlo"  # the child writes it if something is copied to or from the host
    miscompiled: bool | None = False
    module = played = _module(_last(dump, OPTIMISED))
    if copied.exists():
        played = _module(copied.read_text(encoding="utf-8", errors="replace"))
        miscompiled = _miscompiled(played)
    time, no_time = _step_time(played, target, program)
    sent: tuple[Collective, ...] | None = None
    live: tuple[LiveBuffer, ...] = ()
    timeline: Timeline | None = None
    if module is not None:
        sent = read_collectives(module) if program.mesh else None
        live, timeline = _live(module, dump, program)
    seen = {
        "live": live,
        "timeline": timeline,
        "time": time,
        "no_time": no_time,
        "miscompiled": miscompiled,
        "collectives": sent,
        "untiled": answer["untiled"],
    }
    return Sizes(**answer["sizes"], **seen)


def _last(dump: Path, ending: str) -> str | None:
    """The text of the last file with this ending; None if the compiler wrote none."""
    paths = sorted(dump.glob(f"*{ending}"))
    return paths[-1].read_text(encoding="utf-8", errors="replace") if paths else None


def _module(text: str | None) -> HloModule | None:
    """The compiled module; None if its text is missing or has an unknown form. The sizes are valid either way."""
    try:
        return None if text is None else parse(text)
    except UnsupportedError:
        return None


def _step_time(module: HloModule | None, target: Target, program: ExportedProgram) -> tuple[StepTime | None, str]:
    """The modelled time of a step, or None and the reason: the target lacks a rate. The sizes are valid either way."""
    if module is None:
        return None, "not modelled for a CPU" if target.kind == "cpu" else "the compiled module could not be read"
    try:
        return step_time(module, target, kernels=dict(program.kernels)), ""
    except (ArgumentError, TargetError) as error:
        return None, str(error)


def _live(module: HloModule, dump: Path, program: ExportedProgram) -> tuple[tuple[LiveBuffer, ...], Timeline | None]:
    """The buffers on the device at the peak and over the schedule, arguments by name; empty if XLA wrote no buffers."""
    assignment, ranges = _last(dump, "-buffer-assignment.txt"), _last(dump, "-live-range.txt")
    if assignment is None or ranges is None:
        return (), None
    schedule = Schedule(module, assignment, ranges)
    timeline = Timeline.of(schedule)
    timeline = replace(timeline, buffers=tuple(named_arguments(timeline.buffers, program.arguments)))
    return tuple(named_arguments(schedule.at_peak(), program.arguments)), timeline


def _miscompiled(module: HloModule | None) -> bool | None:
    """Whether a host copy takes the wrong slot; None if the text does not show it, so that the receipt decides."""
    try:
        return None if module is None else scanned_offload_is_miscompiled(module)
    except UnsupportedError:
        return None
