"""The interface of a backend, with the behaviour that most kinds of hardware share."""

from __future__ import annotations

import abc
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from remat_jax.errors import ArgumentError, TargetError, UnsupportedError
from remat_jax.hardware import Target
from remat_jax.memory.compile.exported import ExportedProgram
from remat_jax.memory.compile.options import Kernels
from remat_jax.memory.compile.sizes import Sizes
from remat_jax.memory.hlo.live import LiveBuffer, Schedule, Timeline, named_arguments
from remat_jax.memory.hlo.schedule import StepTime, step_time
from remat_jax.memory.hlo.text import HloModule, parse

Answers = dict[str, dict[str, Any]]
"""A dict from a program's key to the answer of the compile process."""


class RefusedOffload(NamedTuple):
    """Why a compiler cannot offload: a `reason` for a table, and a `sentence` with the remedy."""

    reason: str
    sentence: str


class Backend(abc.ABC):
    """How programs are compiled for one kind of hardware, and how the compiler's answer is read.

    Attributes:
      platform: JAX's name of the platform that programs are lowered for.
      has_gpu_flags: whether the flags of XLA:GPU and of JAX's CUDA client change the step.
      separate_host_memory: whether arrays can be in host memory that is not device memory.
      models_time: whether the compiled text has a schedule from which the step's time is modelled.
      takes_limit: whether the compiler can be given a memory limit.
      chooses_kernels_on_device: whether the device chooses the kernels of matmuls again, so that a step may need more memory
        there than as it was compiled here.
      same_everywhere: whether each machine gets the same sizes, so that they are cached on disk.
    """

    platform: ClassVar[str]
    has_gpu_flags: ClassVar[bool] = False
    separate_host_memory: ClassVar[bool] = True
    models_time: ClassVar[bool] = True
    takes_limit: ClassVar[bool] = True
    chooses_kernels_on_device: ClassVar[bool] = False
    same_everywhere: ClassVar[bool] = True

    @abc.abstractmethod
    def require(self, target: Target) -> None:
        """Raise UnsupportedError if the compiler is not installed, or TargetError if the target is not described for it."""

    @abc.abstractmethod
    def environment(self, target: Target) -> dict[str, str]:
        """Environment variables of the compile process, beside those of this process."""

    @abc.abstractmethod
    def topology(self, target: Target) -> dict[str, Any] | None:
        """Arguments of JAX's `get_topology_desc` for the devices to compile for; None for the CPUs of the compile process."""

    @abc.abstractmethod
    def read(self, answer: Mapping[str, Any], folder: Path, program: ExportedProgram, target: Target) -> Sizes:
        """The sizes of one program, from the compile process's answer and from the files in `folder` (`entry`)."""

    def check_program(self, jaxpr: Any) -> None:  # noqa: B027
        """Raise UnsupportedError if a traced program contains what the compiler is known to refuse."""

    def refused_offload(self, *, scanned: bool, nested: bool) -> RefusedOffload | None:
        """Why the residuals of a block in a scan (`nested`: inside another scan) cannot be offloaded; None if they can."""
        return None

    def attention_kernel(self, *, suits_cudnn: bool) -> str:
        """Advice for attention whose scores are in memory: a kernel that never stores them, as code or in words."""
        return "an attention kernel that never stores the scores"

    def entry(self, folder: Path) -> dict[str, Any]:
        """What is asked about one program: `compiler_options`, and perhaps `text`, the file for the compiled text."""
        return {"compiler_options": {}}

    def call_options(self, folder: Path) -> dict[str, Any]:
        """Compiler options for all programs of a call, which may write files to `folder`."""
        return {}

    def ask(self, asked: Callable[[Mapping[str, Any]], Answers], kernels: Kernels) -> Answers:
        """The answers of `asked`, which takes more compiler options and compiles."""
        return asked({})

    def limit_options(self, limit: int | None, target: Target, held_bytes: int) -> dict[str, int]:
        """The compiler option that gives XLA the largest memory limit within `limit` bytes; empty if none can be given.

        `held_bytes` is the device memory of the step's arguments and of results that reuse no argument's buffer.
        """
        return {}


# --- reading the compiler's files -------------------------------------------------------------------------------------


def dump_options(folder: Path) -> dict[str, Any]:
    """The options with which XLA writes the optimised program, its buffers and their live ranges to `folder`."""
    # XLA's dump takes no measurable time. `.*` is needed because a user's XLA_FLAGS may dump only one module, as MaxText's do.
    return {"xla_dump_to": str(folder), "xla_dump_hlo_as_text": True, "xla_dump_hlo_module_re": ".*"}


def last_text(folder: Path, ending: str) -> str | None:
    """The text of the last file with this ending; None if the compiler wrote none."""
    paths = sorted(folder.glob(f"*{ending}"))
    return paths[-1].read_text(encoding="utf-8", errors="replace") if paths else None


def parsed(text: str | None) -> HloModule | None:
    """The module in `text`; None if there is no text, or if it cannot be read."""
    try:
        return None if text is None else parse(text)
    except UnsupportedError:
        return None


def modelled_time(module: HloModule | None, target: Target, program: ExportedProgram) -> tuple[StepTime | None, str]:
    """The time of a compiled module, and the reason if it is unknown (the time is then None)."""
    if module is None:
        return None, "the compiled module could not be read"
    try:
        return step_time(module, target, kernels=dict(program.kernels)), ""
    except (ArgumentError, TargetError) as error:
        return None, str(error)


def live_buffers(module: HloModule, dump: Path, program: ExportedProgram) -> tuple[tuple[LiveBuffer, ...], Timeline | None]:
    """The values of `Sizes.live` and `Sizes.timeline`, with the arguments' names; () and None if XLA wrote no buffers."""
    assignment, ranges = last_text(dump, "-buffer-assignment.txt"), last_text(dump, "-live-range.txt")
    if assignment is None or ranges is None:
        return (), None
    schedule = Schedule(module, assignment, ranges)
    timeline = Timeline.of(schedule)
    timeline = replace(timeline, buffers=named_arguments(timeline.buffers, program.arguments))
    return named_arguments(schedule.at_peak(), program.arguments), timeline


def without_accelerator(**more: str) -> dict[str, str]:
    """The environment of a process that computes on the CPU, with `more`."""
    # The exported program has its own dtypes, which JAX would narrow without x64.
    return {**os.environ, "JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "2", "JAX_ENABLE_X64": "1", **more}
