"""The run process: the attached device's name, and its allocator's peak after one step of an exported program.

It runs as a script, by path, so that it imports only JAX; like `child.py` it therefore has its own end. A process runs one
program, so that the peak is of that step alone. It compiles before any array is on the device and makes the arguments on the
host, so that only the step adds to the peak.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export

TILE = np.random.default_rng(0).standard_normal(65_536, np.float32) * 0.02


def place(aval: Any, device: Any) -> Any:
    """The sharding of an argument; a CPU has one memory."""
    on_host = aval.memory_space is jax.memory.Space.Host and device.platform != "cpu"
    return jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host" if on_host else None)


def argument(aval: Any, device: Any) -> Any:
    """Small random numbers of the argument's type; 0 and 1 for integers and booleans."""
    if jnp.issubdtype(aval.dtype, jax.dtypes.prng_key):
        kinds: list[Any] = []
        jax.eval_shape(lambda key: kinds.append(jax.random.key_impl(key)), aval)
        made = (
            jax.random.split(jax.random.key(0, impl=kinds[0]), aval.shape) if aval.shape else jax.random.key(0, impl=kinds[0])
        )
    else:
        tile = TILE if jnp.issubdtype(aval.dtype, jnp.inexact) else (TILE > 0)
        made = np.resize(tile.astype(aval.dtype), aval.shape)
    return jax.device_put(made, place(aval, device))


def stats(device: Any) -> dict[str, int]:
    """The statistics of the device's allocator; empty if it has none, as on a CPU."""
    return device.memory_stats() or {}


def peak(program: dict[str, Any], device: Any) -> int:
    """The allocator's peak in bytes after one step."""
    with open(program["path"], "rb") as file:
        exported = export.deserialize(bytearray(file.read()))
    structs = [jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=place(aval, device)) for aval in exported.in_avals]
    jitted = jax.jit(exported.call, donate_argnums=tuple(program["donated"]))
    compiled = jitted.lower(*structs).compile(compiler_options=program["compiler_options"] or None)
    before = stats(device).get("peak_bytes_in_use", 0)
    results = jax.block_until_ready(compiled(*(argument(aval, device) for aval in exported.in_avals)))
    found = stats(device).get("peak_bytes_in_use")
    del results
    if found is None:
        raise RuntimeError(f"the allocator of {device.device_kind} reports no peak (memory_stats has no peak_bytes_in_use)")
    if found <= before:
        raise RuntimeError(
            f"compiling used more device memory ({before} bytes) than the step, so the peak of the step is unknown"
        )
    return found


def end_with(parent: int) -> None:
    """Exit when the parent process is gone, since nobody reads the answer then."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


def main() -> None:
    """Answer the request on standard input."""
    request = json.loads(sys.stdin.readline())
    threading.Thread(target=end_with, args=(request["parent"],), daemon=True).start()
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
            # Any error of the device or the compiler is the answer.
            answer = {"error": f"{type(error).__name__}: {error}"}
    print(json.dumps({"key": request["key"], **answer}), flush=True)


if __name__ == "__main__":
    main()
