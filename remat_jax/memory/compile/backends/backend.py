"""The interface of a backend, with the behaviour that most kinds of hardware share."""

from __future__ import annotations

import abc
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from jax.extend.core import ClosedJaxpr

from remat_jax.hardware import Target
from remat_jax.memory.compile.exported import ExportedProgram
from remat_jax.memory.compile.options import Kernels
from remat_jax.memory.compile.sizes import Sizes

Answers = dict[str, dict[str, Any]]
"""A dict from a program's key to the answer of the compile process."""


class RefusedOffload(NamedTuple):
    """Why a compiler cannot offload: a `reason` for a table, and a `sentence` with the remedy."""

    reason: str
    sentence: str


_NESTED = "XLA cannot compile offload in a scan inside another scan"
NESTED_OFFLOAD = RefusedOffload(_NESTED, f"{_NESTED} for GPUs and TPUs (maxtext#4990)")


class LimitOption(NamedTuple):
    """A compiler option that takes an integer from 1 to `largest`."""

    name: str
    largest: int


class Backend(abc.ABC):
    """How programs are compiled for one kind of hardware, and how the compiler's answer is read.

    Attributes:
      platform: JAX's name of the platform that programs are lowered for.
      has_gpu_flags: whether the flags of XLA:GPU and of JAX's CUDA client change the step.
      separate_host_memory: whether arrays can be in host memory that is not device memory.
      models_time: whether the compiled text has a schedule from which the step's time is modelled.
      limit_option: the compiler option for a memory limit; None if there is none.
      chooses_kernels_on_device: whether the device chooses the kernels of matmuls again, so that a step may need more memory
        there than as it was compiled here.
      same_everywhere: whether each machine gets the same sizes, so that they are cached on disk.
      stack_passes: how often a scan passes over the bytes of an array to stack it for the backward pass.
      knows_memory_early: whether the sizes are known long before a compilation ends (`knows_memory`).
      fuses_into_matmuls: whether elementwise operations fuse into the matmul that reads their result.
    """

    platform: ClassVar[str]
    has_gpu_flags: ClassVar[bool] = False
    separate_host_memory: ClassVar[bool] = True
    models_time: ClassVar[bool] = True
    limit_option: ClassVar[LimitOption | None] = None
    chooses_kernels_on_device: ClassVar[bool] = False
    same_everywhere: ClassVar[bool] = True
    # Zeros fill the stack, the array is read, and it is written into the stack.
    stack_passes: ClassVar[int] = 3
    knows_memory_early: ClassVar[bool] = False
    fuses_into_matmuls: ClassVar[bool] = False

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

    def knows_memory(self, folder: Path) -> bool:
        """Whether the sizes of a program are known already, before its compilation ends (`read_unfinished`)."""
        return False

    def read_unfinished(self, folder: Path, program: ExportedProgram, target: Target) -> Sizes:
        """The sizes of a program whose compilation was ended, without its time, once `knows_memory`."""
        raise NotImplementedError

    def unfinished_results(self, folder: Path) -> Sequence[Sequence[int]] | None:
        """The shapes of a program's results on each device, once `knows_memory`; None if they cannot be read."""
        raise NotImplementedError

    def cores(self, target: Target) -> int | None:
        """JAX's number of cores in a device, which Pallas kernels may read; None where JAX has no such number."""
        return None

    def check_program(self, jaxpr: ClosedJaxpr) -> None:  # noqa: B027
        """Raise UnsupportedError if a traced program contains what the compiler is known to refuse."""

    def refused_offload(self, *, scanned: bool, nested: bool, devices: int) -> RefusedOffload | None:
        """Why the residuals of a block on so many devices cannot be offloaded; None if they can.

        Args:
          scanned: whether the block is in a scan.
          nested: whether this scan is inside another scan.
        """
        return None

    def attention_kernel(self, *, needs: str = "", cudnn_refuses: str = "") -> str:
        """Advice for attention whose scores are in memory: a kernel that never stores them, as code or in words.

        `needs` and `cudnn_refuses` are those of a `SoftmaxProduct`.
        """
        return "an attention kernel that never stores the scores" + (f" and takes {needs}" if needs else "")

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


def without_accelerator(**more: str) -> dict[str, str]:
    """The environment of a process that computes on the CPU, with `more`."""
    # The exported program has its own dtypes, which JAX would narrow without x64.
    return {**os.environ, "JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "2", "JAX_ENABLE_X64": "1", **more}
