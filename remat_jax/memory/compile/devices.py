"""Checks of a target's number of devices and host memory, and measurements on the GPU of this machine."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jax.sharding import AbstractMesh

from remat_jax import compat
from remat_jax.errors import ArgumentError, CompileError, TargetError, UnsupportedArgumentError, UnsupportedError
from remat_jax.hardware import Target
from remat_jax.memory.compile.exported import ExportedProgram
from remat_jax.memory.compile.process import Question, ask, scratch
from remat_jax.mesh import shown
from remat_jax.report.tables import format_bytes
from remat_jax.workload import Workload

CHILD = Path(__file__).with_name("child.py")
PLATFORM = "cuda"
SECONDS_TO_START = 120.0


def check_devices(workload: Workload, target: Target) -> None:
    """Raise unless the target has as many devices as the workload's mesh, or one device for a workload without a mesh."""
    if workload.mesh is None:
        if target.devices > 1:
            raise UnsupportedArgumentError(
                f"target={target.name!r} has {target.devices} devices, but {workload.name!r} has no mesh to use them: ask for "
                "one device, or give a mesh: Workload(…, mesh={'data': …}, shardings=(…)), or "
                "workload.on_mesh('data=…,fsdp=…'), on the command line --mesh"
            )
        return
    if target.attached:
        raise UnsupportedError(
            f"target={target.name!r} is one device of this machine, but {workload.name!r} has a mesh: name the hardware "
            f"instead, such as '{workload.mesh.size}xh200'"
        )
    check_size(workload.mesh, target, f"the mesh of {workload.name!r} ({shown(workload.mesh)})")


def check_size(mesh: AbstractMesh, target: Target, called: str) -> None:
    """Raise unless the mesh has as many devices as the target; `called` describes the mesh in the message."""
    if mesh.size != target.devices:
        single = re.sub(r"^(\d+x){1,2}", "", target.name)
        such = f"'{mesh.size}x{single}' in one host ('8x8x{single}' has 64 in eight hosts)"
        if target.topology:
            such = f"'{mesh.size}x{re.split('[-:]', single)[0]}', if there is such a slice"
        raise ArgumentError(
            f"target={target.name!r} has {target.devices} device{'s' * (target.devices > 1)}, but {called} has {mesh.size}: "
            f"ask for {mesh.size}, such as {such}, or change the mesh"
        )


def host_shortage(host_bytes: int, target: Target) -> str | None:
    """A warning if a step needs more host memory, `host_bytes` per device, than the target's hosts have; else None.

    >>> from remat_jax.hardware import target
    >>> host_shortage(10**12, target("l4")) is None  # nothing is known of its hosts
    True
    >>> print(host_shortage(3 * 10**11, target("2x8xh200")))
    the 8 devices of a host need 2.2 TiB of host memory, but a host of 2x8xh200 has 1.8 TiB: offload less, or use more hosts
    """
    devices = target.devices // target.hosts
    if target.host_memory_bytes is None or host_bytes <= target.host_memory_bytes:
        return None
    needed, has = "a device needs", f"its share on {target.name} is"
    if devices > 1:
        needed, has = f"the {devices} devices of a host need", f"a host of {target.name} has"
    return (
        f"{needed} {format_bytes(host_bytes * devices)} of host memory, but {has} "
        f"{format_bytes(target.host_memory_bytes * devices)}: offload less, or use more hosts"
    )


# --- the attached GPU -------------------------------------------------------------------------------------------------


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
            f"target='attached': JAX finds no GPU on this machine ({reason[:500]}). Name a target instead, such as 'h200'. "
            "If the machine has a GPU, install JAX's support for GPUs: pip install 'remat-jax[cuda13]'"
        )
    return str(kind)


def measured_peak(program: ExportedProgram, timeout: float, compiler_options: Mapping[str, Any] | None = None) -> int:
    """The allocator's peak in bytes while `program` runs once on the device, on random numbers, in a child process.

    Only the step's allocations count, because nothing is preallocated. XLA gets the flags of `GpuBackend.environment`, so that
    it chooses kernels as in a compilation without a GPU.
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
