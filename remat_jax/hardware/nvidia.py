"""This machine's NVIDIA GPUs according to the driver, and a CUDA plugin that is quiet without one.

The extra `gpu-compile` installs the plugin without NVIDIA's libraries. The plugin looks for them when JAX starts, and JAX
prints a traceback about cuDNN. Without a GPU they are useless, so the plugin is told not to look. The wheel's
`remat_jax_quiet.pth`, which Python runs at startup, does what `quiet_without_gpu` does for scripts that do not import this
package.
"""

from __future__ import annotations

import os
import subprocess

VARIABLE = "JAX_SKIP_CUDA_CONSTRAINTS_CHECK"
"""If this environment variable has a value, the plugin does not look for NVIDIA's libraries."""

MARK = "remat_jax: no NVIDIA device"
"""The value that distinguishes a variable set here from a user's own."""

DEVICES = ("/dev/nvidiactl", "/dev/nvidia0", "/dev/dxg")
"""The files that JAX itself takes as a sign of an NVIDIA GPU; the last is for WSL 2."""

_FIELDS = ("name", "driver_version", "memory.total")


def gpus() -> list[dict[str, str]]:
    """Name, driver and memory of each NVIDIA GPU according to the driver; empty if there is none."""
    command = ["nvidia-smi", f"--query-gpu={','.join(_FIELDS)}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return []
    rows = [line.split(", ") for line in done.stdout.splitlines()] if done.returncode == 0 else []
    return [dict(zip(_FIELDS, row, strict=True)) for row in rows if len(row) == len(_FIELDS)]


def quiet_without_gpu() -> None:
    """Without a GPU, tell the plugin not to look for NVIDIA's libraries. Call it before JAX starts its backends.

    With a GPU, a variable that this package set on another machine (a login node that submitted the job) is removed. A user's
    own value stays.
    """
    if not any(map(os.path.exists, DEVICES)):
        os.environ.setdefault(VARIABLE, MARK)
    elif os.environ.get(VARIABLE) == MARK:
        del os.environ[VARIABLE]
