"""Options of XLA:GPU: its memory limit, copies outside CUDA graphs, a cache of GPU kernels, compilations for sizes alone.

XLA:GPU schedules and rematerialises so that a step's temporary memory fits

    (device memory · 80 % − held) · factor / 100,

where *held* is the size of the arguments and of the results that reuse no argument's buffer. The compiler option `OPTION` sets
the integer *factor*, 95 by default. On an attached GPU, XLA uses the size of JAX's allocator pool instead of 80 %. The pool has
75 % of device memory unless XLA_PYTHON_CLIENT_MEM_FRACTION changes this. XLA aims at the limit, but a step may need more.

XLA:GPU records a step's operations in CUDA graphs, and the operations of a graph run one after the other. By default it also
records the copies of slices, with which a scan offloads its residuals. Inside a graph these copies overlap no compute, although
the schedule starts them early. `overlapping_options` leaves the copies outside the graphs. On an H200 a scan with offload took
115 ms with the option and 138 ms without (`docs/notes/steps_on_a_gpu.md`).

Steps under different policies share most kernels, and generating kernels takes most of the compile time. XLA assigns memory
before it generates kernels, so cached or unoptimised kernels do not change the sizes (`docs/how/planner.md`).

LLVM turns each kernel into PTX, with the mathematical functions of the file `libdevice` of NVIDIA's CUDA toolkit, and the
toolkit's `ptxas` turns the PTX into machine code. XLA ends with an error if either is missing. But a step that is compiled only
for its sizes never runs, so a substitute for the toolkit has a `libdevice` without functions, and a `ptxas` that writes empty
files. Sizes are the same with the real toolkit (`tests/test_kernels.py`), and compiling takes longer with it.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from remat_jax import compat
from remat_jax.errors import ArgumentError, CompileError
from remat_jax.hardware import Target
from remat_jax.memory.compile.process import scratch

DEFAULT_TIMEOUT = 300.0
"""Seconds for the compilations of one call."""

OPTION = "xla_gpu_memory_limit_slop_factor"
LARGEST_FACTOR = 95
"""XLA's default factor. A larger factor has no effect, so it is not set."""
_AVAILABLE_PERCENT = 80
"""On a GPU that is described but not attached, XLA takes this percentage of the memory as available."""

WITHOUT_TRITON: dict[str, Any] = {"xla_gpu_enable_triton_gemm": False}
"""The options for a step without Triton matmuls.

Without a GPU, XLA uses Triton for every matmul. With a GPU, XLA uses the faster kernel, often cuBLAS's, and fuses less into
cuBLAS's matmuls. A step then needed up to 9 % more memory (`docs/notes/steps_on_a_gpu.md`).
"""

NEVER_RUN: dict[str, Any] = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
"""The options for a program that is compiled only for its sizes."""

TOOLKIT = "xla_gpu_cuda_data_dir"
"""The option that names the folder of the toolkit."""

# XLA parses the version, from which it takes the version of PTX.
_PROGRAM = """\
#!/bin/sh
if [ "$1" = --version ]; then echo "Cuda compilation tools, release 13.0, V13.0.88"; fi
while [ $# -gt 1 ]; do
  if [ "$1" = -o ]; then : > "$2"; fi
  shift
done
"""
_LIBDEVICE = 'target triple = "nvptx64-nvidia-cuda"\n'

GRAPHS = "xla_gpu_enable_command_buffer"
"""The option that lists the kinds of operation in CUDA graphs."""
KINDS = "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,CONDITIONAL"
"""XLA's default for `GRAPHS` without `DYNAMIC_SLICE_FUSION`, the copies of slices. JAX 0.12 adds `COLLECTIVES_KERNEL`."""

_KERNEL_FILE, _SEPARATE_KERNELS = "xla_gpu_kernel_cache_file", "xla_gpu_enable_llvm_module_compilation_parallelism"
_CACHE_SOURCE = "kernel_reuse_cache"
"""The source file that XLA's error names if XLA cannot use the cached kernels."""


def check_timeout(timeout: float) -> None:
    """Raise ArgumentError unless `timeout` is a positive number of seconds."""
    # TIMEOUT_MAX is the limit of timers; an integer may be larger than any float.
    if not isinstance(timeout, int | float) or isinstance(timeout, bool) or not 0 < timeout <= threading.TIMEOUT_MAX:
        raise ArgumentError(f"timeout={timeout!r}: expected a positive number of seconds, at most {threading.TIMEOUT_MAX:.3g}")


def toolkit_options(folder: Path) -> dict[str, str]:
    """Write the substitute to `folder`, and return the compiler option with which XLA uses it.

    Returns no option if `folder` is on a file system that runs no programs; XLA then needs an installed toolkit.
    """
    for name in ("ptxas", "nvlink"):
        program = folder / "bin" / name
        program.parent.mkdir(parents=True, exist_ok=True)
        program.write_text(_PROGRAM, encoding="utf-8")
        program.chmod(0o700)
        if not os.access(program, os.X_OK):
            return {}
    library = folder / "nvvm" / "libdevice" / "libdevice.10.bc"
    library.parent.mkdir(parents=True, exist_ok=True)
    library.write_text(_LIBDEVICE, encoding="utf-8")
    return {TOOLKIT: str(folder)}


def limit_options(limit: int | None, target: Target, held_bytes: int) -> dict[str, int]:
    """The compiler option that gives XLA:GPU the largest memory limit within `limit` bytes.

    Empty if there is no `limit`, if XLA's default limit is not larger, or if no limit can be set (unknown memory, or nothing
    left beside the held bytes).

    `held_bytes` is the device memory of the step's arguments and of results that reuse no argument's buffer.

    >>> from remat_jax.hardware import target
    >>> limit_options(40 * 2**30, target("h200"), 10 * 2**30)
    {'xla_gpu_memory_limit_slop_factor': 29}
    """
    if limit is None or target.memory_bytes is None:
        return {}
    available = target.memory_bytes * _AVAILABLE_PERCENT // 100 - held_bytes
    if available <= 0:
        return {}  # XLA's limit is 0 for every factor
    factor = max(1, 100 * (limit - held_bytes) // available)
    return {OPTION: factor} if factor < LARGEST_FACTOR else {}


def overlapping_options() -> dict[str, str]:
    """The compiler option that leaves copies of slices outside CUDA graphs; empty if this XLA refuses the option."""
    lists = (f"{KINDS},COLLECTIVES_KERNEL", KINDS)
    return next(({GRAPHS: kinds} for kinds in lists if compat.accepts_option(GRAPHS, kinds)), {})


class Kernels:
    """Files of compiled GPU kernels, in a folder that the caller removes.

    A file is used by one process at a time: two processes might add the same kernel, and XLA refuses a file with duplicates.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._lock, self._numbers = folder, threading.Lock(), itertools.count(1)
        self._free: list[Path] = []

    @classmethod
    @contextlib.contextmanager
    def temporary(cls) -> Iterator[Kernels]:
        """Kernels in a temporary folder."""
        with scratch() as folder:
            yield cls(folder)

    def take(self) -> Path:
        """The largest file that no other process uses, or a new file."""
        with self._lock:
            if not self._free:
                return self._folder / f"kernels_{next(self._numbers)}"
            self._free.sort(key=lambda file: file.stat().st_size)
            return self._free.pop()

    def give_back(self, file: Path) -> None:
        """Make the file of a successful process available again. The file of a failed process may be incomplete."""
        with self._lock:
            if file.exists():
                self._free.append(file)


def kernel_options(file: Path) -> dict[str, Any]:
    """The options with which XLA reads kernels from `file` and adds new kernels to it, without those that this XLA lacks."""
    # The kernel cache can reuse only kernels that were compiled into separate objects. A compiler that has the option
    # _SEPARATE_KERNELS makes separate objects only if it is set; newer compilers always do.
    options = {_KERNEL_FILE: str(file)} if compat.accepts_option(_KERNEL_FILE, "") else {}
    return options | ({_SEPARATE_KERNELS: True} if compat.accepts_option(_SEPARATE_KERNELS, True) else {})


def is_about_kernels(error: CompileError) -> bool:
    """Whether the error is about the kernel file, not the program."""
    return _CACHE_SOURCE in str(error)
