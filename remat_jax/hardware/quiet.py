"""Keeps JAX's CUDA plugin quiet on a machine without a GPU.

The extra `gpu-compile` installs the plugin without NVIDIA's libraries. When JAX starts, the plugin looks for them, and JAX
prints a traceback of twenty lines about cuDNN. Without an NVIDIA device the libraries are useless, so the plugin is told not to
look. The wheel's `remat_jax_quiet.pth` does the same for scripts that do not import this package.
"""

from __future__ import annotations

import os

VARIABLE = "JAX_SKIP_CUDA_CONSTRAINTS_CHECK"
"""If this environment variable has a value, the plugin does not look for NVIDIA's libraries."""

MARK = "remat_jax: no NVIDIA device"
"""The value that distinguishes a variable set here from a user's own."""

DEVICES = ("/dev/nvidiactl", "/dev/nvidia0", "/dev/dxg")
"""The files that JAX itself takes as a sign of an NVIDIA GPU; the last is for WSL 2."""


def quiet_without_gpu() -> None:
    """Without an NVIDIA device, tell the plugin not to look for NVIDIA's libraries. Call it before JAX starts its backends.

    With a GPU, a variable that this package set on another machine (a login node that submitted the job) is removed. A user's
    own value stays.
    """
    if not any(map(os.path.exists, DEVICES)):
        os.environ.setdefault(VARIABLE, MARK)
    elif os.environ.get(VARIABLE) == MARK:
        del os.environ[VARIABLE]


def startup_line() -> str:
    """The line of the wheel's `.pth` file, which Python runs at startup: `quiet_without_gpu` without importing this package.

    >>> startup_line().partition(";")[0]  # all that it needs is loaded already when Python runs it
    'import os'
    """
    no_device = f"not any(map(os.path.exists, {DEVICES}))"
    otherwise = f"os.environ.get({VARIABLE!r}) == {MARK!r} and os.environ.pop({VARIABLE!r})"
    return f"import os; os.environ.setdefault({VARIABLE!r}, {MARK!r}) if {no_device} else {otherwise}\n"
