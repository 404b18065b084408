"""Lists this machine's NVIDIA GPUs, and silences JAX's CUDA plugin on a machine without a GPU.

The extra `gpu-compile` installs the plugin, but of NVIDIA's libraries only the CUDA runtime. When JAX starts, the plugin
looks for the other libraries, and JAX prints a traceback about cuDNN. A machine without a GPU does not need the libraries, so
an environment variable skips the search. `quiet_without_gpu` sets this variable. For scripts that do not import this package,
`remat_jax_quiet.pth` sets the variable in the same way: Python runs this file of the wheel at startup.
"""

from __future__ import annotations

import os
import subprocess

VARIABLE = "JAX_SKIP_CUDA_CONSTRAINTS_CHECK"
"""If this environment variable has a value, the plugin does not look for NVIDIA's libraries."""

MARK = "remat_jax: no NVIDIA device"
"""The value that this package sets. Any other value is the user's."""

DEVICES = ("/dev/nvidiactl", "/dev/nvidia0", "/dev/dxg")
"""JAX assumes an NVIDIA GPU if one of these files exists. The last file is for WSL 2."""

_FIELDS = ("name", "driver_version", "memory.total")


def gpus() -> list[dict[str, str]]:
    """Name, driver and memory of each NVIDIA GPU according to the driver; empty if `nvidia-smi` lists none or fails."""
    command = ["nvidia-smi", f"--query-gpu={','.join(_FIELDS)}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return []
    rows = [line.split(", ") for line in done.stdout.splitlines()] if done.returncode == 0 else []
    return [dict(zip(_FIELDS, row, strict=True)) for row in rows if len(row) == len(_FIELDS)]


def quiet_without_gpu() -> None:
    """Keep the plugin from looking for NVIDIA's libraries if there is no GPU. Call this before JAX starts its backends.

    With a GPU, remove the variable if this package set it: a job may inherit it from the login node that submitted the job. A
    value that the user set is not changed.
    """
    if not any(map(os.path.exists, DEVICES)):
        os.environ.setdefault(VARIABLE, MARK)
    elif os.environ.get(VARIABLE) == MARK:
        del os.environ[VARIABLE]
