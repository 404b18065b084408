"""XLA's GPU compiler without a GPU: the CUDA plugin, and what it needs."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Iterator, Sequence

import jax
from jax._src import config as _config

from remat_jax.errors import CompileError, UnsupportedError

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


# The second is what WSL 2 has instead.
_DEVICES = ("/dev/nvidiactl", "/dev/dxg")


def keep_to_cpu_without_gpu() -> None:
    """Before JAX starts: where there is no NVIDIA device, keep it from trying the CUDA plugin, which prints a traceback."""
    if "JAX_PLATFORMS" not in os.environ and not any(map(os.path.exists, _DEVICES)):
        jax.config.update("jax_platforms", "cpu")


def without_source_lines() -> contextlib.AbstractContextManager[None]:
    """While programs are lowered, leave out which lines made them, so that equal programs are equal; scopes stay in."""
    context: contextlib.AbstractContextManager[None] = _config.traceback_in_locations_limit(0)
    return context


CUDNN_REMEDY = (
    "It needs cuDNN: pip install nvidia-cudnn-cu13 (no GPU is needed), or use another implementation of the operator, XLA's "
    "(implementation='xla') or a Pallas kernel"
)


# JAX's check that fails where cuDNN is missing, for whoever must see that without taking cuDNN away.
CUDNN_CHECK = "jax._src.cudnn.fused_attention_stablehlo.check_cudnn_version"


def wants_cudnn(message: str) -> bool:
    """Whether an error of JAX's or XLA's says that cuDNN is missing, or that it cannot do what is asked of it."""
    return "cudnn" in message.lower()


@contextlib.contextmanager
def cudnn_explained() -> Iterator[None]:
    """Around tracing: an operator that asks for cuDNN where there is none becomes an error that names it, and the remedy.

    Raises:
      CompileError: instead of the `RuntimeError` that JAX raises.
    """
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, CompileError) or not wants_cudnn(str(error)):
            raise
        raise CompileError(f"{_asking_for_cudnn(error)}: {error} {CUDNN_REMEDY}") from error


def _asking_for_cudnn(error: BaseException) -> str:
    """The function of JAX's that asked for cuDNN, and the line that called it."""
    operator, where, jax_folder = "a kernel", "", os.path.dirname(jax.__file__) + os.sep
    for frame, line in traceback.walk_tb(error.__traceback__):
        code = frame.f_code
        if code.co_filename.startswith(jax_folder):
            operator = code.co_name if "attention" in code.co_name else operator
        else:
            where = f" at {code.co_filename}:{line}"
    return f"{operator}{where}"


@contextlib.contextmanager
def lowering_for(target: str, device_kinds: Sequence[str]) -> Iterator[None]:
    """Lower for the GPU of one of the `device_kinds` where it is not there: a Pallas kernel asks the device what it is.

    Raises:
      UnsupportedError: the target says no kind.
    """
    if not device_kinds:
        raise UnsupportedError(
            f"target={target!r} has a Pallas kernel to compile and does not say what JAX calls the device: give "
            'device_kinds = ["NVIDIA H200"] or the like in its table'
        )
    device = jax.sharding.AbstractDevice(device_kind=device_kinds[0], num_cores=None, platform="gpu")
    mesh = jax.sharding.AbstractMesh((), (), abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
        yield
