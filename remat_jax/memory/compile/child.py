"""The compile process: reads exported programs, compiles each for the target, and prints the compiler's answer.

It runs as a script, by path, so that it imports only JAX. The CUDA plugin is loaded only here, and if the compiler aborts,
hangs or runs out of memory, only this process is affected. It prints one JSON object per program and flushes at once. Then it
waits for more requests, because starting takes longer than compiling a small program.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from typing import Any

import jax
import numpy as np
from jax import export
from jax.experimental import topologies

NO_TILES = ("Couldn't find output tile sizes", "No supported config found for HLO: %gemm_fusion")
"""XLA's errors for a matrix product without a fitting Triton tile; on a GPU XLA would try other kernels."""
NO_TRITON = {"xla_gpu_enable_triton_gemm": False}

jax.config.update("jax_platforms", "cpu")  # the process itself computes on the CPU; the GPU is only described


def devices(request: dict[str, Any]) -> list[Any]:
    """The devices of the programs: described devices, or the CPUs of this process."""
    if request["compiler_description"] is None:
        return list(jax.devices("cpu"))
    hosts = request["hosts"]
    topology = f"1x{hosts}x{request['devices'] // hosts}"
    described = topologies.get_topology_desc(platform="cuda", target_config=request["compiler_description"], topology=topology)
    return list(described.devices)


class PinnedHost(jax.sharding.SingleDeviceSharding):
    """A sharding in the host memory of a described device; JAX's own sharding silently drops that memory kind."""

    @property
    def memory_kind(self) -> str:
        """What JAX writes to the argument, and the compiler goes by."""
        return "pinned_host"


class PinnedHostOfMesh(jax.sharding.NamedSharding):
    """A sharding in the host memory of a mesh's devices; JAX's caches must not confuse it with device memory."""

    @property
    def memory_kind(self) -> str:
        """What JAX writes to the argument, and the compiler goes by."""
        return "pinned_host"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PinnedHostOfMesh) and super().__eq__(other)

    def __hash__(self) -> int:
        return hash((super().__hash__(), self.memory_kind))


def shardings(exported: Any, program: dict[str, Any], where: list[Any]) -> list[Any]:
    """The sharding of each argument: on the mesh as exported, or in a memory of the single device; a CPU has one memory."""
    on_host = [aval.memory_space is jax.memory.Space.Host and where[0].platform != "cpu" for aval in exported.in_avals]
    if program["mesh"]:
        names, sizes = zip(*program["mesh"], strict=True)
        mesh = jax.sharding.Mesh(np.array(where).reshape(sizes), names)
        divided = exported.in_shardings_jax(mesh)
        return [PinnedHostOfMesh(mesh, one.spec) if away else one for one, away in zip(divided, on_host, strict=True)]
    return [PinnedHost(where[0]) if away else jax.sharding.SingleDeviceSharding(where[0]) for away in on_host]


def compiled(program: dict[str, Any], where: list[Any]) -> dict[str, Any]:
    """The sizes in bytes that the compiler reports for one program, and the shapes of its results on each device."""
    with open(program["path"], "rb") as file:
        exported = export.deserialize(bytearray(file.read()))
    places = shardings(exported, program, where)
    arguments = [
        jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=place)
        for aval, place in zip(exported.in_avals, places, strict=True)
    ]
    jitted = jax.jit(exported.call, donate_argnums=tuple(program["donated"]))
    lowered = jitted.lower(*arguments)
    options, untiled = program["compiler_options"], False
    try:
        executable = lowered.compile(compiler_options=options or None)
    except jax.errors.JaxRuntimeError as error:
        untiled = any(said in str(error) for said in NO_TILES)
        if not untiled:
            raise
        executable = lowered.compile(compiler_options=options | NO_TRITON)
    analysis = executable.memory_analysis()
    names = ("temp", "argument", "output", "alias", "host_temp", "host_argument", "host_output", "host_alias")
    # XLA's own peak is left out on purpose: for a GPU target it counts host buffers as device memory.
    sizes = {name: int(getattr(analysis, f"{name}_size_in_bytes")) for name in names}
    if "text" in program and any(sizes[name] for name in names if name.startswith("host")):
        # XLA's own dump is earlier: it lacks the final copies to and from the host in loops.
        with open(program["text"], "w", encoding="utf-8") as file:
            file.write(executable.as_text())
    results = zip(exported.out_avals, executable.output_shardings, strict=True) if program["mesh"] else ()
    shapes = [place.shard_shape(aval.shape) for aval, place in results]
    return {"sizes": sizes, "results": shapes, "untiled": untiled}


_asked = threading.Event()
IDLE_SECONDS = 60.0
"""Longer than the parent process keeps this one."""


def end_with(parent: int) -> None:
    """Exit when the parent process is gone, maybe already during the import of JAX, or has been silent for long."""
    idle = 0.0
    while os.getppid() == parent and idle < IDLE_SECONDS:
        time.sleep(1.0)
        idle = 0.0 if _asked.is_set() else idle + 1.0
    os._exit(1)


def main() -> None:
    """Answer the requests on standard input, one per line, until it ends."""
    watched = False
    for line in iter(sys.stdin.readline, ""):
        request = json.loads(line)
        _asked.set()
        if not watched:
            threading.Thread(target=end_with, args=(request["parent"],), daemon=True).start()
            watched = True
        # The call removes the compiler's files with its folder.
        os.environ["TMPDIR"] = request["folder"]
        answer_programs(request)
        jax.clear_caches()
        _asked.clear()
        print(json.dumps({"done": True}), flush=True)


def answer_programs(request: dict[str, Any]) -> None:
    """Compile the programs one after another, and print the compiler's answer to each."""
    where = devices(request)
    for program in request["programs"]:
        answer: dict[str, Any]
        try:
            answer = compiled(program, where)
        except Exception as error:
            # Any error is the answer: the other programs may still compile.
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps({"key": program["key"], **answer}), flush=True)


if __name__ == "__main__":
    main()
