"""The limits of the installed JAX, its plugin and its flags, found before they cause an error."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import re
from collections.abc import Iterator

import jax
from jax._src import xla_bridge as _bridge

from remat_jax.compat.gpu_compiler import require_gpu_compiler
from remat_jax.compat.rematerialisation import require_named_policies
from remat_jax.compat.versions import miscompiles_scanned_offload_here
from remat_jax.errors import UnsupportedError
from remat_jax.warning import warn

_PLUGINS = ("jax-cuda13-plugin", "jax-cuda12-plugin")


def limits() -> tuple[str, ...]:
    """The limits of this installation of JAX and its settings: one text each, with the reason and the remedy."""
    texts = []
    for require in (require_gpu_compiler, require_named_policies):
        try:
            require()
        except UnsupportedError as error:
            texts.append(str(error))
    if miscompiles_scanned_offload_here():
        texts.append(
            f"offload inside a scan is refused on GPUs with JAX {jax.__version__}, which compiles it wrongly "
            "(openxla/xla#46231): use JAX 0.11.1 or later, unroll the layers, or start with "
            "XLA_FLAGS=--xla_disable_hlo_passes=dynamic-slice-annotator"
        )
    return (*texts, *_other_plugins())


def _other_plugins() -> list[str]:
    """CUDA plugins whose version differs from jaxlib's, so that jaxlib ignores them; empty if one plugin has its version."""
    texts, fits = [], False
    jaxlib = importlib.metadata.version("jaxlib")
    for plugin in _PLUGINS:
        try:
            version = importlib.metadata.version(plugin)
        except importlib.metadata.PackageNotFoundError:
            continue
        if _numbers(version) == _numbers(jaxlib):
            fits = True
        else:
            texts.append(
                f"{plugin} has version {version} and jaxlib {jaxlib}, so JAX ignores the plugin and GPU targets cannot be "
                f"compiled: pip install {plugin}=={jaxlib}"
            )
    return [] if fits else texts


def _numbers(version: str) -> str:
    # Like jaxlib, compare only the numbers and ignore suffixes.
    numbers = re.match(r"\d+(\.\d+)*", version)
    return numbers.group() if numbers else version


_lost_threads = False
_asked = 0


def _after_fork() -> None:
    global _lost_threads
    _lost_threads = _bridge.backends_are_initialized()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def warn_of_lost_threads() -> None:
    """Warn, once for each process, if this process was forked from one in which JAX had started.

    JAX's threads exist only in the parent, and calls that need them never return.
    """
    global _asked
    if _lost_threads and _asked != os.getpid():
        _asked = os.getpid()
        warn(
            "this process was forked after JAX had started, and a fork does not copy JAX's threads: JAX may hang. Start "
            "processes with multiprocessing.get_context('spawn')"
        )


# JAX's errors for an eager move to the host: of one array while others are on a mesh, and inside a `shard_map`.
_NOT_EAGERLY = re.compile(r"Received incompatible devices for jitted computation|device_put with explicit device not allowed")


@contextlib.contextmanager
def eager_offload_explained() -> Iterator[None]:
    """A context for an offload, where JAX's error for an offload that needs `jax.jit` becomes one with the remedy.

    Raises:
      UnsupportedError: instead of JAX's ValueError.
    """
    try:
        yield
    except ValueError as error:
        if isinstance(error, UnsupportedError) or not _NOT_EAGERLY.search(str(error)):
            raise
        raise UnsupportedError(
            "a policy offloads outside jax.jit, where JAX cannot move arrays on several devices or inside a shard_map to the "
            f"host: put the function that takes the gradient under jax.jit. JAX's error: {error}"
        ) from error
