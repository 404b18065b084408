"""The child process: compiles exported programs for a target, or runs one on the attached device, and prints the results.

It runs as a script, by path, so that it imports JAX but not remat_jax. The CUDA plugin is loaded only here. If the compiler
aborts, hangs or runs out of memory, only this process is affected. The process prints one JSON object per program and
flushes at once. After compiling it waits for more requests, because starting a process takes longer than compiling a small
program. A process on the attached device runs only one program, compiles it before any array is on the device, and creates the
arguments on the host. So the allocator's peak is the peak of the step alone.
"""

from __future__ import annotations

import json
import os
import re
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export
from jax.experimental import topologies

NO_TILES = ("Couldn't find output tile sizes", "No supported config found for HLO: %gemm_fusion")
"""XLA's errors for a matmul that fits no Triton tile. On a GPU, XLA would try other kernels."""
NO_TRITON = {"xla_gpu_enable_triton_gemm": False}
SIZES = ("temp", "argument", "output", "alias", "host_temp", "host_argument", "host_output", "host_alias")
TILE = np.random.default_rng(0).standard_normal(65_536, np.float32) * 0.02

_busy = threading.Event()


def exported_program(program: dict[str, Any]) -> Any:
    """Read the program from the file that the parent process wrote."""
    with open(program["path"], "rb") as file:
        return export.deserialize(bytearray(file.read()))


def lowered_program(exported: Any, program: dict[str, Any], shardings: Sequence[Any]) -> Any:
    """The program lowered for arguments with these shardings."""
    structs = [
        jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding)
        for aval, sharding in zip(exported.in_avals, shardings, strict=True)
    ]
    return jax.jit(exported.call, donate_argnums=tuple(program["donated"])).lower(*structs)


def is_on_host(aval: Any, device: Any) -> bool:
    """Whether an argument is in host memory; a CPU has one memory."""
    return aval.memory_space is jax.memory.Space.Host and device.platform != "cpu"


# --- compiling --------------------------------------------------------------------------------------------------------


def compile_requested(request: dict[str, Any]) -> None:
    """Compile the programs one after another, and print the result or the error of each."""
    os.environ["TMPDIR"] = request["folder"]  # the parent process removes this folder, with the compiler's files
    described = devices(request)
    for program in request["programs"]:
        answer: dict[str, Any]
        try:
            answer = compiled(program, described)
        except Exception as error:
            # Report any error instead of raising it, because the other programs may still compile.
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps({"key": program["key"], **answer}), flush=True)
    jax.clear_caches()


def devices(request: dict[str, Any]) -> list[Any]:
    """The devices to compile for: the described devices, or the CPU devices of this process."""
    if request["topology"] is None:
        return list(jax.devices("cpu"))
    # JAX lists the devices of TPUs host by host. Their numbers run along the first axis of the slice first.
    return sorted(topologies.get_topology_desc(**request["topology"]).devices, key=lambda device: device.id)


def first_sentences(message: str) -> str:
    """The first line of an error message, without the name and number of the status and the program's identifiers."""
    line = message.partition("\n")[0].partition(" HLO module:")[0]
    return re.sub(r"^[A-Z_]+: (E\d+: \w+: )?", "", line).strip().rstrip(".")


class PinnedHost(jax.sharding.SingleDeviceSharding):
    """A sharding in the host memory of a described device. JAX's `SingleDeviceSharding` silently drops this memory kind."""

    @property
    def memory_kind(self) -> str:
        """The memory kind that JAX writes to the argument for the compiler."""
        return "pinned_host"


class PinnedHostOfMesh(jax.sharding.NamedSharding):
    """A sharding in the host memory of a mesh's devices. JAX's caches distinguish it from shardings in device memory."""

    @property
    def memory_kind(self) -> str:
        """The memory kind that JAX writes to the argument for the compiler."""
        return "pinned_host"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PinnedHostOfMesh) and super().__eq__(other)

    def __hash__(self) -> int:
        return hash((super().__hash__(), self.memory_kind))


def argument_shardings(exported: Any, program: dict[str, Any], described: list[Any]) -> list[Any]:
    """The sharding of each argument: the exported sharding on the mesh, or the host or device memory of a single device."""
    device = described[0]
    on_host = [is_on_host(aval, device) for aval in exported.in_avals]
    if not program["mesh"]:
        return [PinnedHost(device) if host else jax.sharding.SingleDeviceSharding(device) for host in on_host]
    names, sizes = zip(*program["mesh"], strict=True)
    mesh = jax.sharding.Mesh(np.array(described).reshape(sizes), names)
    shardings = zip(exported.in_shardings_jax(mesh), on_host, strict=True)
    return [PinnedHostOfMesh(mesh, sharding.spec) if host else sharding for sharding, host in shardings]


def compiled(program: dict[str, Any], described: list[Any]) -> dict[str, Any]:
    """Compile one program. Returns its sizes in bytes and, on a mesh, the shapes of its results on each device."""
    exported = exported_program(program)
    lowered = lowered_program(exported, program, argument_shardings(exported, program, described))
    options, untiled = program["compiler_options"], False
    try:
        executable = lowered.compile(compiler_options=options or None)
    except jax.errors.JaxRuntimeError as error:
        if (reason := program.get("refusal")) and re.search(reason, str(error)):
            # The compiler has written the buffers of a step that does not fit the device.
            return {"refusal": first_sentences(str(error)), "results": (), "untiled": False}
        untiled = any(reason in str(error) for reason in NO_TILES)
        if not untiled:
            raise
        executable = lowered.compile(compiler_options=options | NO_TRITON)
    analysis = executable.memory_analysis()
    # XLA's own peak is left out on purpose: for a GPU target it counts host buffers as device memory.
    sizes = {name: int(getattr(analysis, f"{name}_size_in_bytes")) for name in SIZES}
    on_host = any(sizes[name] for name in SIZES if name.startswith("host"))
    # XLA:GPU's dump lacks the copies to and from the host that XLA adds in loops at the end.
    if path := program.get("text") or (on_host and program.get("host_text")):
        with open(path, "w", encoding="utf-8") as file:
            file.write(executable.as_text())
    results = zip(exported.out_avals, executable.output_shardings, strict=True) if program["mesh"] else ()
    shapes = [sharding.shard_shape(aval.shape) for aval, sharding in results]
    return {"sizes": sizes, "results": shapes, "untiled": untiled}


# --- running on the attached device -----------------------------------------------------------------------------------


def run_requested(request: dict[str, Any]) -> None:
    """Print the attached device's name and, if the request has a program, the allocator's peak after one step of it."""
    answer: dict[str, Any]
    try:
        device = jax.local_devices(backend=request["platform"])[0]
        answer = {"device_kind": device.device_kind}
    except RuntimeError as error:
        device, answer = None, {"device_kind": "", "reason": str(error)}
    if "program" in request:
        try:
            answer["peak"] = peak(request["program"], device)
        except Exception as error:
            # Report any error of the device or the compiler instead of raising it.
            answer = {"error": f"{type(error).__name__}: {error}"}
    print(json.dumps({"key": request["key"], **answer}), flush=True)


def argument(aval: Any, sharding: Any) -> Any:
    """An array for an argument: random keys, small random floating-point numbers, or 0 and 1 for integers and booleans."""
    if jnp.issubdtype(aval.dtype, jax.dtypes.prng_key):
        kinds: list[Any] = []
        jax.eval_shape(lambda key: kinds.append(jax.random.key_impl(key)), aval)
        key = jax.random.key(0, impl=kinds[0])
        made = jax.random.split(key, aval.shape) if aval.shape else key
    else:
        tile = TILE if jnp.issubdtype(aval.dtype, jnp.inexact) else (TILE > 0)
        made = np.resize(tile.astype(aval.dtype), aval.shape)
    return jax.device_put(made, sharding)


def stats(device: Any) -> dict[str, int]:
    """The statistics of the device's allocator; empty if it has none, as on a CPU."""
    return device.memory_stats() or {}


def peak(program: dict[str, Any], device: Any) -> int:
    """Run one step. Returns the allocator's peak in bytes."""
    exported = exported_program(program)
    shardings = [
        jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host" if is_on_host(aval, device) else None)
        for aval in exported.in_avals
    ]
    executable = lowered_program(exported, program, shardings).compile(compiler_options=program["compiler_options"] or None)
    before = stats(device).get("peak_bytes_in_use", 0)
    results = jax.block_until_ready(executable(*map(argument, exported.in_avals, shardings)))
    after = stats(device).get("peak_bytes_in_use")
    del results
    if after is None:
        raise RuntimeError(f"the allocator of {device.device_kind} reports no peak (memory_stats has no peak_bytes_in_use)")
    if after <= before:
        raise RuntimeError(
            f"compiling used more device memory ({before} bytes) than the step, so the peak of the step is unknown"
        )
    return after


# --- the process ------------------------------------------------------------------------------------------------------


def end_with(parent: int, idle_seconds: float) -> None:
    """Exit when the parent process has ended (perhaps during the import of JAX), or after `idle_seconds` without a request."""
    idle = 0.0
    while os.getppid() == parent and idle < idle_seconds:
        time.sleep(1.0)
        idle = 0.0 if _busy.is_set() else idle + 1.0
    os._exit(1)


def main() -> None:
    """Answer the requests on standard input, one per line, until the input ends."""
    watched = False
    for line in iter(sys.stdin.readline, ""):
        request = json.loads(line)
        _busy.set()
        if not watched:
            threading.Thread(target=end_with, args=(request["parent"], request["idle_seconds"]), daemon=True).start()
            watched = True
        (compile_requested if "programs" in request else run_requested)(request)
        _busy.clear()
        print(json.dumps({"done": True}), flush=True)


if __name__ == "__main__":
    main()
