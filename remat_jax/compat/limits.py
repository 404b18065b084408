"""What the installed JAX, its plugin and its flags cannot do: found before anything is asked of them."""

from __future__ import annotations

import importlib.metadata
import os
import re

import jax
from jax._src import xla_bridge as _bridge

from remat_jax.compat.gpu_compiler import require_gpu_compiler
from remat_jax.compat.rematerialisation import require_named_policies
from remat_jax.compat.versions import miscompiles_scanned_offload_here
from remat_jax.errors import UnsupportedError

_PLUGINS = ("jax-cuda13-plugin", "jax-cuda12-plugin")


def limits() -> tuple[str, ...]:
    """What cannot be done with this JAX as it is installed and set up: one text each, with the reason and the remedy."""
    found = []
    for require in (require_gpu_compiler, require_named_policies):
        try:
            require()
        except UnsupportedError as error:
            found.append(str(error))
    if miscompiles_scanned_offload_here():
        found.append(
            f"offload inside a scan is refused on GPUs with JAX {jax.__version__}, which compiles it wrongly "
            "(openxla/xla#46231): use JAX 0.11.1 or later, unroll the layers, or start with "
            "XLA_FLAGS=--xla_disable_hlo_passes=dynamic-slice-annotator"
        )
    return (*found, *_other_plugins())


def _other_plugins() -> list[str]:
    """Plugins that are not of the version of jaxlib, which warns of them and goes on without; nothing where one is of it."""
    found, fits = [], False
    jaxlib = importlib.metadata.version("jaxlib")
    for plugin in _PLUGINS:
        try:
            version = importlib.metadata.version(plugin)
        except importlib.metadata.PackageNotFoundError:
            continue
        if _numbers(version) == _numbers(jaxlib):
            fits = True
        else:
            found.append(
                f"{plugin} is {version} and jaxlib {jaxlib}, so JAX leaves it out, and GPU targets are refused: "
                f"pip install {plugin}=={jaxlib}"
            )
    return [] if fits else found


def _numbers(version: str) -> str:
    # As jaxlib compares them: what follows the numbers does not count.
    found = re.match(r"\d+(\.\d+)*", version)
    return found.group() if found else version


def lost_threads() -> bool:
    """Whether JAX started in the process that this one was forked from: its threads stayed there, and what asks them waits.

    Known on Linux, and as long as this process has started no thread of its own.
    """
    try:
        return len(os.listdir("/proc/self/task")) == 1 and _bridge.backends_are_initialized()
    except OSError:
        return False
