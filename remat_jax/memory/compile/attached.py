"""The GPU of this machine: its name, and the memory that a step needs when it runs there."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from remat_jax import compat
from remat_jax.errors import CompileError, TargetError
from remat_jax.memory.compile.exporting import ExportedProgram
from remat_jax.memory.compile.process import Question, ask, scratch

CHILD = Path(__file__).with_name("child.py")
PLATFORM = "cuda"
SECONDS_TO_START = 120.0


def device_kind() -> str:
    """JAX's name for the attached GPU, from a child process, because JAX in this process may be set up for the CPU."""
    key = "the attached GPU"
    try:
        answer = _asked({"key": key}, f"looking for {key}", SECONDS_TO_START)
        kind, reason = answer["device_kind"], answer.get("reason", "")
    except CompileError as error:
        kind, reason = "", str(error)
    if not kind:
        raise TargetError(
            f"target='attached': JAX finds no GPU on this machine ({reason[:500]}). Name a target instead, such as 'h200'; or "
            "install what JAX needs for a GPU that is there: pip install 'remat-jax[cuda13]'"
        )
    return str(kind)


def measured_peak(program: ExportedProgram, timeout: float, compiler_options: Mapping[str, Any] | None = None) -> int:
    """The allocator's peak in bytes while `program` runs once on the device, on random numbers, in a child process.

    Only the step's allocations count: nothing is preallocated, and kernels are chosen as for the compiled figures.
    """
    with scratch() as folder:
        path = folder / "program.jaxexport"
        path.write_bytes(program.blob)
        entry = {"path": str(path), "donated": program.donated, "compiler_options": dict(compiler_options or {})}
        return int(_asked({"key": program.key, "program": entry}, "running on target='attached'", timeout)["peak"])


def _asked(request: dict[str, Any], doing: str, timeout: float) -> dict[str, Any]:
    environment = {
        **os.environ,
        "JAX_PLATFORMS": f"{PLATFORM},cpu" if PLATFORM != "cpu" else PLATFORM,
        "JAX_ENABLE_X64": "1",
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "XLA_FLAGS": compat.xla_flags(*([compat.GPU_COMPILER_FLAGS] if PLATFORM != "cpu" else [])),
    }
    whole = request | {"platform": PLATFORM}
    return ask(Question(CHILD, whole, [request["key"]], doing, environment, timeout, who="the device"))[request["key"]]
