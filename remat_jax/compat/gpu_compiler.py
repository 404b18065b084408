"""XLA's GPU compiler without a GPU: the CUDA plugin, and what it needs."""

from __future__ import annotations

import importlib.util
import os
import sys

import jax

from remat_jax.errors import UnsupportedError

GPU_COMPILER_ENVIRONMENT: dict[str, str] = {"JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}
"""Without it the CUDA plugin refuses to load where cuDNN is not installed."""


GPU_COMPILER_FLAGS = "--xla_gpu_autotune_level=0"
"""There is nothing to time kernels on."""


_PLUGINS = ("jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12")


def gpu_compiler_installed() -> bool:
    """Whether JAX's CUDA plugin, which holds XLA's GPU compiler, is installed; it is not loaded."""
    return any(importlib.util.find_spec("jax_plugins") and importlib.util.find_spec(name) for name in _PLUGINS)


def require_gpu_compiler() -> None:
    """Raise where XLA's GPU compiler is not there.

    Raises:
      UnsupportedError: with the command that installs it, or that there is none for this platform.
    """
    if not sys.platform.startswith("linux"):
        raise UnsupportedError(
            f"sys.platform={sys.platform!r}: XLA's GPU compiler is published for Linux only; use target='cpu' here"
        )
    if not gpu_compiler_installed():
        raise UnsupportedError(
            "XLA's GPU compiler is not installed: pip install 'remat-jax[gpu-compile]' (jax-cuda13-plugin; no NVIDIA library "
            "and no GPU is needed), or use target='cpu'"
        )


def keep_to_cpu_without_gpu() -> None:
    """Before JAX starts: where there is no NVIDIA device, keep it from trying the CUDA plugin, which prints a traceback."""
    if "JAX_PLATFORMS" not in os.environ and not os.path.exists("/dev/nvidiactl"):
        jax.config.update("jax_platforms", "cpu")
