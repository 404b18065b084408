"""The process that compiles: reads exported programs, compiles each for the target, prints what the compiler says.

Run as a script, by path, so that it imports nothing but JAX: the CUDA plugin is loaded here and nowhere else, and whatever the
compiler does (abort, hang, run out of memory) it does here. One JSON object per program on standard output, flushed at once. It
waits for more requests: starting takes longer than compiling a small program.
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
"""What XLA says of a matrix product that Triton cannot tile as it is guessed; on a GPU it would try other kernels."""
NO_TRITON = {"xla_gpu_enable_triton_gemm": False}

jax.config.update("jax_platforms", "cpu")  # the process itself computes on the CPU; the GPU is only described


def devices(request: dict[str, Any]) -> list[Any]:
    """Where the programs run: described devices, or the CPUs of this process."""
    if request["compiler_description"] is None:
        return list(jax.devices("cpu"))
    hosts = request["hosts"]
    topology = f"1x{hosts}x{request['devices'] // hosts}"
    described = topologies.get_topology_desc(platform="cuda", target_config=request["compiler_description"], topology=topology)
    return list(described.devices)


class PinnedHost(jax.sharding.SingleDeviceSharding):
    """The host memory of a described device, which a sharding of JAX's own takes to have none and silently forgets."""

    @property
    def memory_kind(self) -> str:
        """What JAX writes to the argument, and the compiler goes by."""
        return "pinned_host"


class PinnedHostOfMesh(jax.sharding.NamedSharding):
    """The same of the devices of a mesh; to JAX's caches it must not be equal to what lies so on the devices."""

    @property
    def memory_kind(self) -> str:
        """What JAX writes to the argument, and the compiler goes by."""
        return "pinned_host"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PinnedHostOfMesh) and super().__eq__(other)

    def __hash__(self) -> int:
        return hash((super().__hash__(), self.memory_kind))


def shardings(exported: Any, program: dict[str, Any], where: list[Any]) -> list[Any]:
    """Where each argument lives: on the mesh as it was exported, or in a memory of the one device; a CPU has one memory."""
    on_host = [aval.memory_space is jax.memory.Space.Host and where[0].platform != "cpu" for aval in exported.in_avals]
    if program["mesh"]:
        names, sizes = zip(*program["mesh"], strict=True)
        mesh = jax.sharding.Mesh(np.array(where).reshape(sizes), names)
        divided = exported.in_shardings_jax(mesh)
        return [PinnedHostOfMesh(mesh, one.spec) if away else one for one, away in zip(divided, on_host, strict=True)]
    return [PinnedHost(where[0]) if away else jax.sharding.SingleDeviceSharding(where[0]) for away in on_host]


def compiled(program: dict[str, Any], where: list[Any]) -> dict[str, Any]:
    """The sizes in bytes that the compiler reports for one program, and the shapes of what each device has of its results."""
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
    # The peak that XLA reports beside these is left out on purpose: on a GPU target it counts host buffers as device memory.
    sizes = {name: int(getattr(analysis, f"{name}_size_in_bytes")) for name in names}
    if "text" in program and any(sizes[name] for name in names if name.startswith("host")):
        # What XLA dumps by itself is older: a loop's copies to and from the host are not set yet.
        with open(program["text"], "w", encoding="utf-8") as file:
            file.write(executable.as_text())
    results = zip(exported.out_avals, executable.output_shardings, strict=True) if program["mesh"] else ()
    shapes = [place.shard_shape(aval.shape) for aval, place in results]
    return {"sizes": sizes, "results": shapes, "untiled": untiled}


_asked = threading.Event()
IDLE_SECONDS = 60.0
"""Longer than the process that asks keeps this one."""


def end_with(parent: int) -> None:
    """Leave when the process that asked is gone, maybe while JAX was imported, or has asked nothing for long."""
    idle = 0.0
    while os.getppid() == parent and idle < IDLE_SECONDS:
        time.sleep(1.0)
        idle = 0.0 if _asked.is_set() else idle + 1.0
    os._exit(1)


def main() -> None:
    """Answer the requests on standard input, a line each, until it ends."""
    watched = False
    for line in iter(sys.stdin.readline, ""):
        request = json.loads(line)
        _asked.set()
        if not watched:
            threading.Thread(target=end_with, args=(request["parent"],), daemon=True).start()
            watched = True
        # What the compiler leaves behind goes with the call.
        os.environ["TMPDIR"] = request["folder"]
        answer_programs(request)
        jax.clear_caches()
        _asked.clear()
        print(json.dumps({"done": True}), flush=True)


def answer_programs(request: dict[str, Any]) -> None:
    """Compile the programs one after another, and print what the compiler says of each."""
    where = devices(request)
    for program in request["programs"]:
        answer: dict[str, Any]
        try:
            answer = compiled(program, where)
        except Exception as error:
            # Whatever the compiler raises is the answer; the other programs may still compile.
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps({"key": program["key"], **answer}), flush=True)


if __name__ == "__main__":
    main()
