"""A cache of the kernels that XLA's GPU compiler made: steps under different policies share most kernels.

XLA decides a step's memory before it makes kernels, so the cache does not change sizes (`docs/memory.md`). Making kernels is
most of the compile time.
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
"""The machine code is not optimised, because a step's memory is decided before the code is made."""
_NEVER_RUN_ON_GPU = _NEVER_RUN | {"xla_gpu_disable_gpuasm_optimizations": True}
_NO_SUCH_OPTION = re.compile(r"No such compile option: '(\w+)'")
_OF_THE_FILE = "kernel_reuse_cache"
"""XLA's source file that its error names if it cannot use the cached kernels."""
_refused: set[str] = set()
"""The options among `_NAMES` that the compiler refused: the one installed compiler refuses them always."""


class Kernels:
    """Files of kernels, in a folder that the caller removes.

    Each process takes its own file and returns it. Files cannot be merged, because XLA refuses duplicate kernels.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._lock, self._made = folder, threading.Lock(), 0
        self._free: list[Path] = []

    @classmethod
    @contextlib.contextmanager
    def temporary(cls) -> Iterator[Kernels]:
        """Kernels in a temporary folder."""
        with scratch() as folder:
            yield cls(folder)

    def take(self) -> Path:
        """A file that no other process uses: the largest, or a new one."""
        with self._lock:
            if self._free:
                found = max(self._free, key=lambda file: file.stat().st_size)
                self._free.remove(found)
                return found
            self._made += 1
            return self._folder / f"kernels_{self._made}"

    def give_back(self, file: Path) -> None:
        """Return a file. Call this only after the process succeeded: a failed process may have left half a file."""
        with self._lock:
            if file.exists():
                self._free.append(file)


def kernel_options(file: Path) -> dict[str, Any]:
    """The compiler options with which XLA reads kernels from `file` and adds new ones, without refused options."""
    # A compiler that knows the second option needs it for the first: a kernel must be a separate object to be linked again.
    # Later compilers always make separate objects and do not know the second option.
    return {name: value for name, value in zip(_NAMES, (str(file), True), strict=True) if name not in _refused}


def never_run_options(kind: str) -> dict[str, Any]:
    """The compiler options for a program that is compiled only for its sizes, for a `kind` of target."""
    return dict(_NEVER_RUN_ON_GPU if kind == "gpu" else _NEVER_RUN)


def refuse(error: CompileError) -> bool:
    """Whether the compiler refused one of `kernel_options` or the file, not the program. A refused option is not used again."""
    names = {name for name in _NO_SUCH_OPTION.findall(str(error)) if name in _NAMES}
    _refused.update(names)
    return bool(names) or _OF_THE_FILE in str(error)
