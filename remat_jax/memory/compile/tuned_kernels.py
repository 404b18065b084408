"""The kernels that XLA's GPU compiler made, kept for the next programs: steps under different policies share most of them.

What a step needs is decided before a kernel is made, so that sizes are the same with and without what is kept
(`docs/memory.md`); making kernels is most of the time that compiling takes.
"""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from remat_jax.errors import CompileError
from remat_jax.memory.compile.scratch import scratch

_NAMES = ("xla_gpu_kernel_cache_file", "xla_gpu_enable_llvm_module_compilation_parallelism")
_NEVER_RUN = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
"""The machine code is not optimised: what a step needs was decided before it is made."""
_NEVER_RUN_ON_GPU = _NEVER_RUN | {"xla_gpu_disable_gpuasm_optimizations": True}
_NO_SUCH_OPTION = re.compile(r"No such compile option: '(\w+)'")
_OF_THE_FILE = "kernel_reuse_cache"
"""XLA's own source file, which it names where it cannot use what is kept."""
_refused: set[str] = set()
"""Of `_NAMES`: one installation has one compiler, and what it refused once it refuses always."""


class Kernels:
    """Files of kernels, in a folder that is the caller's to remove.

    A process takes one for itself and gives it back. Two files cannot be made one: XLA refuses a kernel that is there twice.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._lock, self._made = folder, threading.Lock(), 0
        self._free: list[Path] = []

    @classmethod
    @contextlib.contextmanager
    def temporary(cls) -> Iterator[Kernels]:
        """In a folder that is gone afterwards."""
        with scratch() as folder:
            yield cls(folder)

    def take(self) -> Path:
        """A file that no other process has: that with most in it, or a new one."""
        with self._lock:
            if self._free:
                found = max(self._free, key=lambda file: file.stat().st_size)
                self._free.remove(found)
                return found
            self._made += 1
            return self._folder / f"kernels_{self._made}"

    def give_back(self, file: Path) -> None:
        """Only where the process ended well: another may have left half a file."""
        with self._lock:
            if file.exists():
                self._free.append(file)


def kernel_options(file: Path) -> dict[str, Any]:
    """The compiler options by which XLA takes kernels from `file` and puts those that it makes there; none that it refused."""
    # Without the second the first does nothing where there is the second: a kernel must be an object of its own to be linked
    # again. Later compilers always make it so, and do not know the option.
    return {name: value for name, value in zip(_NAMES, (str(file), True), strict=True) if name not in _refused}


def never_run_options(kind: str) -> dict[str, Any]:
    """The compiler options of a program that is compiled for its sizes, for a `kind` of target."""
    return dict(_NEVER_RUN_ON_GPU if kind == "gpu" else _NEVER_RUN)


def refuse(error: CompileError) -> bool:
    """Whether the compiler refused one of `kernel_options`, or the file, and not the program; an option is offered once."""
    names = {name for name in _NO_SUCH_OPTION.findall(str(error)) if name in _NAMES}
    _refused.update(names)
    return bool(names) or _OF_THE_FILE in str(error)
