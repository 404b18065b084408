"""Compiles programs for a target in child processes, and reads their sizes, live buffers and schedule."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from remat_jax import compat
from remat_jax.errors import ArgumentError, CompileError, TargetError, UnsupportedError
from remat_jax.hardware import Target
from remat_jax.memory.compile import cache
from remat_jax.memory.compile.exporting import ExportedProgram as ExportedProgram
from remat_jax.memory.compile.exporting import export_step as export_step
from remat_jax.memory.compile.options import (
    GRAPHS,
    NEVER_RUN,
    Kernels,
    is_about_kernels,
    kernel_options,
    limit_options,
    overlapping_options,
    toolkit_options,
)
from remat_jax.memory.compile.process import Children, Question, ask, compiler_environment, scratch
from remat_jax.memory.hlo.collectives import Collective, read_collectives
from remat_jax.memory.hlo.copies import Overlap, starts_slice_copies
from remat_jax.memory.hlo.live import LiveBuffer, Schedule, Timeline, named_arguments
from remat_jax.memory.hlo.schedule import StepTime, step_time
from remat_jax.memory.hlo.slots import scanned_offload_is_miscompiled
from remat_jax.memory.hlo.text import HloModule, parse

MOST_CHILDREN = 4
"""The largest number of compile processes at a time; each compiler needs about 1 GB."""

CHILD = Path(__file__).with_name("child.py")

_UNTILED = (
    "a matmul fits none of the Triton tiles that XLA assumes without a GPU, so the step was compiled without Triton matmuls "
    "(xla_gpu_enable_triton_gemm=false); on a GPU the step may need a few per cent less memory, and no cuBLAS workspace of "
    "32 MiB"
)


@dataclass(frozen=True)
class Sizes:
    """The sizes of one compiled program on one device, in bytes; `host_*` are in host memory, the others in device memory.

    For the target `cpu`, `live` is empty, and `timeline`, `time` and `collectives` are None.

    Attributes:
      live, timeline: the device buffers at the peak, and over the whole schedule.
      time, no_time: the modelled time of the compiled schedule, and the reason if it is unknown (`time` is then None).
      miscompiled: whether a loop copies a wrong slot of a host buffer (`slots.py`); None if the step uses host memory but its
        copies cannot be checked.
      collectives: the collectives on a mesh; None for one device, or if the compiled text is unknown.
      untiled: whether a matmul fits no Triton tile, so that all matmuls were compiled without Triton.
      limit_options: the memory limit of the compilation, as options for `jax.jit`; empty for XLA's own limit.
      starts_slice_copies: whether a loop starts copies of slices to or from the host that XLA would record in CUDA graphs;
        False if XLA_FLAGS has the option `GRAPHS`.
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
    starts_slice_copies: bool = False
    timeline: Timeline | None = None
    no_time: str = ""

    @property
    def seconds(self) -> float | None:
        """The modelled time of the step; None if unknown."""
        return None if self.time is None else self.time.seconds

    @property
    def overlap(self) -> Overlap | None:
        """The copies to and from the host in the schedule; None if there are none, or a rate is unknown."""
        overlap = None if self.time is None else self.time.overlap
        return overlap if overlap is not None and overlap.out.count + overlap.back.count else None

    @property
    def compiler_options(self) -> dict[str, int | str]:
        """The options for `jax.jit` with which the step needs this memory and this time on a GPU."""
        return {**self.limit_options, **(overlapping_options() if self.starts_slice_copies else {})}

    @property
    def is_miscompiled(self) -> bool:
        """`miscompiled`; if it is None, whether this version of JAX is known to compile copies of a wrong slot."""
        if self.miscompiled is None:
            return compat.JAX_VERSION in compat.SCANNED_OFFLOAD_MISCOMPILED
        return self.miscompiled

    @property
    def warning(self) -> str | None:
        """For an `untiled` step, a warning about the differences from a compilation on an attached GPU; else None."""
        return _UNTILED if self.untiled else None

    @property
    def device(self) -> int:
        """Arguments + outputs − aliased + temp in device memory."""
        return self.argument + self.output - self.alias + self.temp

    @property
    def host(self) -> int:
        """Arguments + outputs − aliased + temp in host memory."""
        return self.host_temp + self.host_argument + self.host_output - self.host_alias


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
    """A dict from each program's key to its `Sizes` on `target`, from the cache or compiled in parallel processes.

    Args:
      timeout: the limit in seconds for all programs together.
      memory_limit: a device memory limit for XLA in bytes (`options.py`).
      on_done: called with each key when its program is compiled, or found in the cache; perhaps in another thread.
      kernels: compiled GPU kernels to reuse, from earlier calls for the same target with the same options.
      children: this call adds its processes to `children`, so that the caller can kill them. If this call runs several
        processes and one of them fails, all of `children` are killed.
    """
    if target.kind == "gpu":
        if target.compiler_description is None:
            raise TargetError(
                f"target={target.name!r} has no compiler description, so XLA cannot compile for it: add a table "
                f"[{target.name}.compiler] to its file, and its source under [{target.name}.source]; targets.toml of remat_jax "
                "shows the form"
            )
        compat.require_gpu_compiler()
    tell = on_done or (lambda key: None)
    limits = {program.key: limit_options(memory_limit, target, program.held_bytes) for program in programs}
    options = {key: (compiler_options or {}) | limit for key, limit in limits.items()}
    digests = {program.key: cache.digest(program, target, options[program.key], CHILD) for program in programs}
    sizes: dict[str, Sizes] = {}
    new: dict[str, ExportedProgram] = {}
    for program in programs:
        digest = digests[program.key]
        if cached := cache.read(digest, target, Sizes):
            sizes[digest] = cached
            tell(program.key)
        else:
            new.setdefault(digest, program)  # equal programs are compiled once
    if new:
        compiled = _compiled(list(new.values()), target, timeout, options, tell, kernels, children)
        for digest, program in new.items():
            sizes[digest] = replace(compiled[program.key], limit_options=limits[program.key])
            cache.write(digest, target, sizes[digest])
        for key, digest in digests.items():
            if digest in new and new[digest].key != key:
                tell(key)
    return {key: sizes[digest] for key, digest in digests.items()}


def result_shapes(program: ExportedProgram, target: Target, *, timeout: float) -> Sequence[tuple[int, ...]]:
    """The shapes of the results of `program` on each device of a mesh, as the compiler shards them."""
    if target.kind == "gpu":
        compat.require_gpu_compiler()
    digest = cache.digest(program, target, {"results": True}, CHILD)
    shapes = cache.read(digest, target, tuple[tuple[int, ...], ...])
    if shapes is None:
        with scratch() as folder:
            entry = _entry(folder / "0", program, target, {})
            answer = _answers([entry], target, timeout, folder, lambda key: None, Kernels(folder))[program.key]
        shapes = tuple(map(tuple, answer["results"]))
        cache.write(digest, target, shapes)
    return shapes


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
        folders = {program.key: folder / str(index) for index, program in enumerate(programs)}
        entries = [_entry(folders[program.key], program, target, options[program.key]) for program in programs]
        answers = _answers(entries, target, timeout, folder, tell, kernels or Kernels(folder), children)
        return {program.key: _sizes(answers[program.key], folders[program.key], program, target) for program in programs}


def _entry(folder: Path, program: ExportedProgram, target: Target, options: dict[str, Any]) -> dict[str, Any]:
    """The request for one program; the compile process writes its files to `folder`."""
    folder.mkdir()
    path = folder / "program.jaxexport"
    path.write_bytes(program.blob)
    options = NEVER_RUN | options
    entry = {"key": program.key, "path": str(path), "donated": program.donated, "mesh": program.mesh}
    if target.kind != "gpu":
        return entry | {"compiler_options": options}
    # XLA's dump takes no measurable time. `.*` is needed because a user's XLA_FLAGS may dump only one module, as MaxText's do.
    dump = {"xla_dump_to": str(folder / "dump"), "xla_dump_hlo_as_text": True, "xla_dump_hlo_module_re": ".*"}
    return entry | {"compiler_options": options | dump, "text": str(folder / "compiled.hlo")}


def _answers(
    entries: Sequence[dict[str, Any]],
    target: Target,
    timeout: float,
    folder: Path,
    tell: Callable[[str], None],
    kernels: Kernels,
    children: Children | None = None,
) -> dict[str, dict[str, Any]]:
    side_by_side = max(1, min(len(entries), os.cpu_count() or 1, MOST_CHILDREN))
    environment = compiler_environment(target)
    toolkit = toolkit_options(folder / "toolkit") if target.kind == "gpu" else {}
    ends = time.monotonic() + timeout
    running = children or Children()

    def asked(part: Sequence[dict[str, Any]], options: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        left = min(timeout, max(1.0, ends - time.monotonic()))
        programs = [entry | {"compiler_options": {**toolkit, **options, **entry["compiler_options"]}} for entry in part]
        request = {"programs": programs, "compiler_description": target.compiler_description, "devices": target.devices}
        request |= {"hosts": target.hosts, "folder": str(folder)}
        doing, keys = f"compiling for target={target.name!r}", [entry["key"] for entry in part]
        return ask(Question(CHILD, request, keys, doing, environment, timeout, left=left, again=True), tell, running)

    def run(number: int) -> dict[str, dict[str, Any]]:
        part = entries[number::side_by_side]
        if target.kind != "gpu":
            return asked(part, {})
        file = kernels.take()
        try:
            answers = asked(part, kernel_options(file))
        except CompileError as error:
            if not is_about_kernels(error):
                raise
            return asked(part, {})
        kernels.give_back(file)
        return answers

    if side_by_side == 1:
        return run(0)
    with ThreadPoolExecutor(side_by_side) as pool, running:
        parts = [pool.submit(run, number) for number in range(side_by_side)]
        ended, _ = wait(parts, return_when=FIRST_EXCEPTION)
        # Read finished parts first, so that a failure is raised at once and the other processes are killed.
        return {key: answer for part in (*ended, *parts) for key, answer in part.result().items()}


def _sizes(answer: dict[str, Any], folder: Path, program: ExportedProgram, target: Target) -> Sizes:
    """The child's sizes, with buffers and time from the files that XLA and the child wrote.

    Buffers and time are unknown if their files cannot be read. The time is also unknown if the target lacks a needed rate.
    """
    dump = folder / "dump"
    module = played = _module(_last(dump, "gpu_after_optimizations.txt"))
    miscompiled: bool | None = False
    copied = _last(folder, "compiled.hlo")  # the child writes this file if the program uses host memory
    if copied is not None:
        played, miscompiled = _module(copied), None
        with contextlib.suppress(UnsupportedError):
            miscompiled = None if played is None else scanned_offload_is_miscompiled(played)
    time, no_time = _step_time(played, target, program)
    # If XLA_FLAGS has the option `GRAPHS`, the user's choice is kept.
    slices = copied is not None and played is not None and GRAPHS not in compat.xla_flags() and starts_slice_copies(played)
    live, timeline = _live(module, dump, program) if module is not None else ((), None)
    return Sizes(
        **answer["sizes"],
        live=live,
        timeline=timeline,
        time=time,
        no_time=no_time,
        miscompiled=miscompiled,
        collectives=read_collectives(module) if module is not None and program.mesh else None,
        untiled=answer["untiled"],
        starts_slice_copies=slices,
    )


def _last(dump: Path, ending: str) -> str | None:
    """The text of the last file with this ending; None if the compiler wrote none."""
    paths = sorted(dump.glob(f"*{ending}"))
    return paths[-1].read_text(encoding="utf-8", errors="replace") if paths else None


def _module(text: str | None) -> HloModule | None:
    try:
        return None if text is None else parse(text)
    except UnsupportedError:
        return None


def _step_time(module: HloModule | None, target: Target, program: ExportedProgram) -> tuple[StepTime | None, str]:
    if module is None:
        return None, "not modelled for a CPU" if target.kind == "cpu" else "the compiled module could not be read"
    try:
        return step_time(module, target, kernels=dict(program.kernels)), ""
    except (ArgumentError, TargetError) as error:
        return None, str(error)


def _live(module: HloModule, dump: Path, program: ExportedProgram) -> tuple[tuple[LiveBuffer, ...], Timeline | None]:
    """The values of `Sizes.live` and `Sizes.timeline`, with the arguments' names; () and None if XLA wrote no buffers."""
    assignment, ranges = _last(dump, "-buffer-assignment.txt"), _last(dump, "-live-range.txt")
    if assignment is None or ranges is None:
        return (), None
    schedule = Schedule(module, assignment, ranges)
    timeline = Timeline.of(schedule)
    timeline = replace(timeline, buffers=named_arguments(timeline.buffers, program.arguments))
    return named_arguments(schedule.at_peak(), program.arguments), timeline
