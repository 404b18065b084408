"""XLA: the flags that a process reads when it starts, quick compilation, and the GPU compiler without a GPU."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.metadata
import importlib.util
import os
import re
import sys
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import jax
from jax._src import config as _config

from remat_jax.compat.tracing import setting
from remat_jax.errors import CompileError, UnsupportedError
from remat_jax.reading import read_limited

# The largest flag file to read, in bytes. Its content becomes an environment variable, which cannot be much longer.
_MOST_BYTES = 2**16

_DISABLED_PASSES = re.compile(r"(?<!\S)--xla_disable_hlo_passes=(\S*)")


def xla_flags(*more: str) -> str:
    """`XLA_FLAGS` for a process that starts now, followed by `more`.

    XLA reads a value that does not begin with `-` as the name of a file with flags. Flags cannot be appended to a file's name,
    so this function reads the file. Raises CompileError if the file cannot be read.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    if flags and not flags.lstrip(" \t\r\n").startswith("-"):
        flags = _content(flags)
    return " ".join(filter(None, (flags.strip(), *more)))


def disabled_passes() -> tuple[str, ...]:
    """The passes that XLA omits in a process that starts now; repeated flags add up. Raises CompileError like `xla_flags`."""
    lists = _DISABLED_PASSES.findall(xla_flags())
    return tuple(name for names in lists for name in names.strip("'\"").split(",") if name)


_QUICK = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
    "xla_cpu_use_fusion_emitters": False,
}


@functools.cache
def quick_compile_options() -> dict[str, Any]:
    """On a CPU: options to compile about five times faster, for programs that run only a few times. Elsewhere: no options.

    Options that this XLA does not know are omitted.
    """
    return (
        {name: value for name, value in _QUICK.items() if accepts_option(name, value)} if jax.default_backend() == "cpu" else {}
    )


@functools.cache
def accepts_option(name: str, value: Any) -> bool:
    """Whether this XLA has the compiler option `name` and accepts `value`. On a CPU, options for GPUs are checked too."""
    try:
        jax.jit(lambda: 1).lower().compile(compiler_options={name: value})
    except jax.errors.JaxRuntimeError as error:
        if "No such compile option" not in str(error) and "is not a valid enum value" not in str(error):
            raise
        return False
    return True


def _content(path: str) -> str:
    try:
        content = read_limited(path, _MOST_BYTES)
        if b"\0" in content:
            raise ValueError("it has a null byte")
    except (OSError, ValueError) as error:
        raise CompileError(
            f"XLA_FLAGS={path[:200]!r} does not begin with '-', so XLA reads it as the name of a file with flags, and this "
            f"file cannot be read ({error}): name an existing file, give flags that begin with '-', or unset it"
        ) from None
    return os.fsdecode(content)


# --- the GPU compiler ----------------------------------------------------------------------------------------------------

GPU_COMPILER_ENVIRONMENT: dict[str, str] = {"JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}
"""Without this variable the CUDA plugin refuses to load if cuDNN is not installed."""

GPU_COMPILER_FLAGS = "--xla_gpu_autotune_level=0"
"""Switches off XLA's autotuning, which needs a GPU to time kernels."""

_PLUGINS = ("jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12")


def gpu_compiler_installed() -> bool:
    """Whether JAX's CUDA plugin, which contains XLA's GPU compiler, is installed. The plugin is not loaded."""
    return any(importlib.util.find_spec("jax_plugins") and importlib.util.find_spec(name) for name in _PLUGINS)


def require_gpu_compiler() -> None:
    """Raise UnsupportedError unless XLA's GPU compiler is installed; on Linux the message has the install command."""
    if not sys.platform.startswith("linux"):
        raise UnsupportedError(
            f"sys.platform={sys.platform!r}: XLA's GPU compiler is published for Linux only; use target='cpu' here"
        )
    if not gpu_compiler_installed():
        raise UnsupportedError(
            "XLA's GPU compiler is not installed: pip install 'remat-jax[gpu-compile]' (jax-cuda13-plugin; neither a GPU "
            "nor a CUDA toolkit is needed), or use target='cpu'"
        )


# --- the TPU compiler ---------------------------------------------------------------------------------------------------


def require_tpu_compiler() -> None:
    """Raise UnsupportedError unless libtpu, which contains XLA's TPU compiler, is installed in the version of this JAX."""
    if not sys.platform.startswith("linux"):
        raise UnsupportedError(
            f"sys.platform={sys.platform!r}: XLA's TPU compiler is published for Linux only; use target='cpu' here"
        )
    remedy = "pip install 'remat-jax[tpu-compile]' (libtpu; no TPU is needed), or use target='cpu'"
    if importlib.util.find_spec("libtpu") is None:
        raise UnsupportedError(f"XLA's TPU compiler is not installed: {remedy}")
    wanted, version = _libtpu_of_jax(), _version_of("libtpu")
    if wanted is not None and version is not None and not f"{version}.".startswith(wanted.removesuffix("*")):
        raise UnsupportedError(
            f"libtpu {version} does not belong to JAX {jax.__version__}, which needs libtpu=={wanted}: {remedy}"
        )


def _version_of(package: str) -> str | None:
    """The version of an installed package; None if a package of another name provides its module, such as a nightly build."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


@functools.cache
def _libtpu_of_jax() -> str | None:
    """The version of libtpu that the extra `jax[tpu]` of the installed JAX asks for, such as "0.0.42.*"; None if unknown."""
    for requirement in importlib.metadata.requires("jax") or ():
        if (match := re.match(r"libtpu==([\d.*]+)", requirement)) is not None:
            return match[1]
    return None


# The second path is the device on WSL 2.
_DEVICES = ("/dev/nvidiactl", "/dev/dxg")


def keep_to_cpu_without_gpu() -> None:
    """Without an NVIDIA device, make JAX use the CPU: the CUDA plugin would print a traceback. Call this before JAX starts."""
    if "JAX_PLATFORMS" not in os.environ and not any(map(os.path.exists, _DEVICES)):
        jax.config.update("jax_platforms", "cpu")


def without_source_lines() -> contextlib.AbstractContextManager[None]:
    """Inside this context lowered programs have scopes but no source lines.

    The key of the compile cache hashes the exported program. Without source lines, moving code to another line keeps the key.
    """
    context: contextlib.AbstractContextManager[None] = _config.traceback_in_locations_limit(0)
    return context


CUDNN_REMEDY = (
    "The operator needs cuDNN: pip install nvidia-cudnn-cu13 (no GPU is needed), or use another implementation: XLA's "
    "(implementation='xla') or a Pallas kernel"
)


def attention_kernel() -> Any:
    """JAX's Pallas attention kernel for GPUs, which compiles without a GPU. Raises ImportError if this JAX lacks it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return importlib.import_module("jax.experimental.pallas.ops.gpu.attention").mha


def wants_cudnn(message: str) -> bool:
    """Whether an error message of JAX or XLA names cuDNN, because cuDNN is missing or does not support an operation."""
    return "cudnn" in message.lower()


@contextlib.contextmanager
def cudnn_explained() -> Iterator[None]:
    """A context for tracing: turns JAX's error about missing cuDNN into a CompileError with the operator and the remedy."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, CompileError) or not wants_cudnn(str(error)):
            raise
        raise CompileError(f"{_asking_for_cudnn(error)}: {error} {CUDNN_REMEDY}") from error


def _asking_for_cudnn(error: BaseException) -> str:
    """The JAX function that needs cuDNN, and the line that called it."""
    operator, where, jax_folder = "a kernel", "", os.path.dirname(jax.__file__) + os.sep
    for frame, line in traceback.walk_tb(error.__traceback__):
        code = frame.f_code
        if code.co_filename.startswith(jax_folder):
            operator = code.co_name if "attention" in code.co_name else operator
        else:
            where = f" at {code.co_filename}:{line}"
    return f"{operator}{where}"


_lowered_device: ContextVar[Any] = ContextVar("lowered_device", default=None)
"""The `AbstractDevice` of `lowering_for`."""


@contextlib.contextmanager
def lowering_for(target: str, device_kinds: Sequence[str], platform: str = "gpu", cores: int | None = None) -> Iterator[None]:
    """In this context JAX lowers for a GPU or TPU (`platform`) named `device_kinds[0]`, which need not be present.

    `cores` is JAX's number of cores in a TPU device, which Pallas kernels read too.

    Pallas kernels read the name. A kernel in a `shard_map` reads the name from the mesh of the `shard_map`; `mesh.under` gives
    the name to that mesh.
    Raises UnsupportedError if `device_kinds` is empty.
    """
    if not device_kinds:
        raise UnsupportedError(
            f"target={target!r} does not state JAX's name for the device, which a Pallas kernel needs to compile: add it to "
            'the target\'s table, for example device_kinds = ["NVIDIA H200"]'
        )
    device = jax.sharding.AbstractDevice(device_kind=device_kinds[0], num_cores=cores, platform=platform)
    mesh = jax.sharding.AbstractMesh((), (), abstract_device=device)
    with setting(_lowered_device, device), jax.sharding.use_abstract_mesh(mesh):
        yield


def lacks_mesh(error: BaseException) -> bool:
    """Whether `error` is JAX's error for a bare `PartitionSpec` in a sharding constraint that is traced without a mesh."""
    return isinstance(error, RuntimeError) and "requires a non-empty mesh in context" in str(error)


@contextlib.contextmanager
def lacking_mesh_explained() -> Iterator[None]:
    """Add to JAX's error for a bare `PartitionSpec` without a mesh how a workload and a step get one."""
    try:
        yield
    except RuntimeError as error:
        if lacks_mesh(error) and _GIVE_A_MESH not in getattr(error, "__notes__", ()):
            error.add_note(_GIVE_A_MESH)
        raise


_GIVE_A_MESH = (
    "remat_jax: the model constrains shardings by bare PartitionSpecs, which need a mesh. On one device, give a workload mesh="
    '{"data": 1}, and run a step inside jax.set_mesh(jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,)))'
)


def with_lowered_device(mesh: jax.sharding.AbstractMesh) -> jax.sharding.AbstractMesh:
    """`mesh` with the device of `lowering_for`; outside `lowering_for`, `mesh` itself."""
    device = _lowered_device.get()
    return mesh if device is None else mesh.update(abstract_device=device)
