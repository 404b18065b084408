"""Keeping JAX's CUDA plugin quiet on a machine without a GPU.

The extra `gpu-compile` installs the plugin without NVIDIA's libraries. When JAX starts, the plugin looks for them, and JAX
prints a traceback of twenty lines about cuDNN. Where no NVIDIA device is, there is nothing that these libraries could run on,
and the plugin is asked not to look. The wheel's `remat_jax_quiet.pth` does the same for scripts that do not import this
package.
"""

from __future__ import annotations

import os

VARIABLE = "JAX_SKIP_CUDA_CONSTRAINTS_CHECK"
"""The plugin does not look for NVIDIA's libraries where this environment variable has a value."""

MARK = "remat_jax: no NVIDIA device"
"""The value by which a variable that was set here is known from a user's own."""

DEVICES = ("/dev/nvidiactl", "/dev/nvidia0", "/dev/dxg")
"""What JAX itself takes for a sign of an NVIDIA GPU; the last one is what WSL 2 has."""


def quiet_without_gpu() -> None:
    """Ask the plugin not to look for NVIDIA's libraries where no NVIDIA device is; before JAX starts its backends.

    On a machine with a GPU nothing is skipped: a variable that came with the environment of another machine (a job that was
    submitted from a login node) is taken away. A user's own value stays.
    """
    if not any(map(os.path.exists, DEVICES)):
        os.environ.setdefault(VARIABLE, MARK)
    elif os.environ.get(VARIABLE) == MARK:
        del os.environ[VARIABLE]


def startup_line() -> str:
    """The line of the wheel's `.pth` file, which Python runs when it starts: `quiet_without_gpu`, without an import of ours.

    >>> startup_line().partition(";")[0]  # all that it needs is loaded already when Python runs it
    'import os'
    """
    no_device = f"not any(map(os.path.exists, {DEVICES}))"
    otherwise = f"os.environ.get({VARIABLE!r}) == {MARK!r} and os.environ.pop({VARIABLE!r})"
    return f"import os; os.environ.setdefault({VARIABLE!r}, {MARK!r}) if {no_device} else {otherwise}\n"
