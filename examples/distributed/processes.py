"""The processes and devices of a run: finding them, arranging them in a mesh, and keeping them consistent."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import signal
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh

from remat_jax.errors import ArgumentError

# Both axes partition the batch; fsdp also partitions parameters and optimizer state.
AXES = ("data", "fsdp")


def start(coordinator: str | None, num_processes: int | None, process_id: int | None, found: bool, heartbeat: int) -> None:
    """Join the other processes, if there are any: by address and number, or as JAX finds them (`found`).

    JAX finds them under Slurm, Open MPI, Kubernetes and on Cloud TPUs, and by `JAX_COORDINATOR_ADDRESS`. If a process is silent
    for `heartbeat` seconds, all other processes end: otherwise they would wait for this process in a collective.

    Raises:
      ArgumentError: a part of the address is missing, or JAX finds no other processes.
    """
    given = {"--coordinator": coordinator, "--num-processes": num_processes, "--process-id": process_id}
    lacking = [name for name, value in given.items() if value is None]
    if found or "JAX_COORDINATOR_ADDRESS" in os.environ:
        lacking = []
    elif len(lacking) == len(given):
        return
    if lacking:
        raise ArgumentError(f"{', '.join(lacking)}: missing; give all of {', '.join(given)}, or --distributed alone")
    if coordinator is not None and not re.fullmatch(r".+:\d+", coordinator):
        raise ArgumentError(f"--coordinator {coordinator}: expected HOST:PORT, an address of the first process")
    if num_processes is not None and num_processes < 1:
        raise ArgumentError(f"--num-processes {num_processes}: expected at least 1")
    if process_id is not None and not 0 <= process_id < (num_processes or process_id + 1):
        raise ArgumentError(
            f"--process-id {process_id}: expected 0 to {(num_processes or 1) - 1}, another one for each process"
        )
    limits = {"heartbeat_timeout_seconds": heartbeat, "shutdown_timeout_seconds": heartbeat}
    try:
        jax.distributed.initialize(coordinator, num_processes, process_id, **limits)
    except (TypeError, ValueError) as error:
        raise ArgumentError(f"--distributed: JAX found no other processes ({error}); give {', '.join(given)}") from error


class Ending:
    """Whether the run was asked to end, the same answer in every process.

    Schedulers ask by SIGTERM before they kill a job. JAX handles the signal for joined processes; a single process
    handles it itself, inside the `with` block.

    Args:
      step: the number of steps done before.
    """

    def __init__(self, step: int) -> None:
        self._heard = False
        # JAX ends a run at the step after the last reported step, so a resumed run reports where it starts.
        self.is_due(step)

    def __enter__(self) -> Ending:
        if not jax.distributed.is_initialized():
            self._before = signal.signal(signal.SIGTERM, self._hear)
        return self

    def __exit__(self, *_: object) -> None:
        if hasattr(self, "_before"):
            signal.signal(signal.SIGTERM, self._before)

    def is_due(self, step: int) -> bool:
        """Whether to end after `step` steps; every process asks after each step."""
        try:
            return self._heard or multihost_utils.reached_preemption_sync_point(step)
        except RuntimeError:  # jax_enable_preemption_service is off: the signal ends the process
            return False

    def _hear(self, *_: object) -> None:
        self._heard = True


def parsed_mesh(written: str) -> dict[str, int]:
    """The sizes of a mesh by axis, from `data=2,fsdp=4`.

    Raises:
      ArgumentError: the text is not of this form, or an axis is unknown.

    >>> parsed_mesh("data=2,fsdp=4")
    {'data': 2, 'fsdp': 4}
    """
    parts = [re.fullmatch(r"\s*(\w+)\s*=\s*([1-9]\d*)\s*", part) for part in written.split(",")]
    sizes = {part[1]: int(part[2]) for part in parts if part}
    if len(sizes) != len(parts) or not sizes.keys() <= set(AXES):
        raise ArgumentError(f"--mesh {written}: expected sizes of the axes {' and '.join(AXES)}, such as data=2,fsdp=4")
    return sizes


def make_mesh(sizes: dict[str, int] | None) -> Mesh:
    """A mesh of all devices of all processes; without sizes one axis, fsdp.

    Raises:
      ArgumentError: the mesh has more devices than there are, or fewer.
    """
    devices = jax.device_count()
    sizes = sizes or {"fsdp": devices}
    wanted = math.prod(sizes.values())
    if wanted != devices:
        of = (
            f"{jax.process_count()} processes with {jax.local_device_count()} each"
            if jax.process_count() > 1
            else "one process"
        )
        raise ArgumentError(
            f"--mesh {written(sizes)} is of {wanted} devices, and there are {devices} ({of}): change the mesh, or the devices "
            "(CUDA_VISIBLE_DEVICES; JAX_NUM_CPU_DEVICES on a processor)"
        )
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


def written(sizes: Any) -> str:
    """A mesh as `--mesh` takes it."""
    return ",".join(f"{name}={size}" for name, size in dict(sizes).items())


def check_batch(batch: int, sizes: Any) -> None:
    """Refuse a batch that the devices cannot share evenly.

    Raises:
      ArgumentError: the message names the next larger batch that the devices can share.
    """
    devices = math.prod(dict(sizes).values())
    if batch % devices:
        raise ArgumentError(
            f"--batch {batch} does not divide among the {devices} devices of --mesh {written(sizes)}: take "
            f"{math.ceil(batch / devices) * devices}, or another multiple of {devices}"
        )


def all_agree(holds: bool) -> bool:
    """Whether `holds` is true in every process; each process must call this."""
    return bool(multihost_utils.process_allgather(np.array([holds])).all())


def check_same(told: dict[str, Any]) -> None:
    """Refuse processes whose arguments or text differ, because each would train something else.

    Raises:
      ArgumentError: in every process; the message names the processes that differ from process 0.
    """
    digest = hashlib.sha256(json.dumps(told, sort_keys=True).encode()).digest()[:8]
    found = multihost_utils.process_allgather(np.frombuffer(digest, np.uint8)[None]).reshape(-1, 8)
    others = [str(index) for index, one in enumerate(found) if not np.array_equal(one, found[0])]
    if others:
        raise ArgumentError(
            f"processes {', '.join(others)} have other arguments or another text than process 0; here it is {told}: start all "
            "with the same command and the same version of Python"
        )
