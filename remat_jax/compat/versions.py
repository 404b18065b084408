"""The version of JAX, and checks that find limits of the installed JAX, its plugin and its flags before they cause errors."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import re
from collections.abc import Iterator

import jax
from jax._src import config as _config
from jax._src import xla_bridge as _bridge

from remat_jax.compat.rematerialisation import remat3
from remat_jax.compat.xla import disabled_passes, require_gpu_compiler, require_tpu_compiler
from remat_jax.errors import UnsupportedError
from remat_jax.warning import is_silenced, warn


def _numbers(version: str) -> tuple[int, ...]:
    """The numbers of a version, also of a release candidate; JAX itself reads only (0, 13) from 0.13.0rc1."""
    numbers = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, numbers.group().split("."))) if numbers else ()


JAX_VERSION: tuple[int, ...] = _numbers(jax.__version__)[:3]


# On GPUs, two JAX releases copy the offloaded residuals of a scanned block back from the wrong slot, so that gradients are
# silently wrong (openxla/xla#46231). The text of the compiled module shows the wrong slot. Unrolled offload and the CPU are
# not affected.
SCANNED_OFFLOAD_MISCOMPILED: frozenset[tuple[int, ...]] = frozenset({(0, 10, 2), (0, 11, 0)})

_PASS = "dynamic-slice-annotator"
SCANNED_OFFLOAD_REMEDY = f"JAX 0.11.1 or later, unroll the layers, or start with XLA_FLAGS=--xla_disable_hlo_passes={_PASS}"
# `_PASS` as an entry of `xla_disable_hlo_passes` (field 30 of XLA's DebugOptions) in a serialised message: tag, length, text.
_ENTRY = b"\xf2\x01" + bytes([len(_PASS)]) + _PASS.encode()


def miscompiles_scanned_offload() -> bool:
    """Whether this JAX miscompiles offload inside a scan for GPUs, in a process that starts now with the current flags."""
    return JAX_VERSION in SCANNED_OFFLOAD_MISCOMPILED and _PASS not in disabled_passes()


def _miscompiles_scanned_offload_here() -> bool:
    """`miscompiles_scanned_offload` for this process, where flags changed after XLA's start have no effect."""
    if JAX_VERSION not in SCANNED_OFFLOAD_MISCOMPILED:
        return False
    cured = _cured_here()
    return _PASS not in disabled_passes() if cured is None else not cured


def _cured_here() -> bool | None:
    """Whether XLA itself reports that it omits `_PASS` in this process; None if this jaxlib does not report passes."""
    try:
        from jaxlib import xla_client

        return _ENTRY in xla_client.CompileOptions().SerializeAsString()
    except (ImportError, AttributeError, TypeError):
        return None


def has_gpu() -> bool:
    """Whether JAX sees a GPU."""
    return _has("gpu")


def has_accelerator() -> bool:
    """Whether JAX sees a GPU or a TPU."""
    return _has("gpu") or _has("tpu")


def _has(platform: str) -> bool:
    # During tracing it is unknown on which device the function will run, so any device counts.
    try:
        return bool(jax.devices(platform))
    except RuntimeError:
        return False


def refuse_miscompiled_offload() -> None:
    """Raise UnsupportedError for offload in a loop, if a GPU is here and this JAX would silently compute wrong gradients."""
    if JAX_VERSION in SCANNED_OFFLOAD_MISCOMPILED and has_gpu() and _miscompiles_scanned_offload_here():
        raise UnsupportedError(
            f"offload inside a scan with JAX {jax.__version__} on a GPU: the compiled backward pass reads another layer's "
            f"residuals, so gradients are silently wrong (openxla/xla#46231). Use {SCANNED_OFFLOAD_REMEDY} (XLA reads these "
            "flags once, when it starts)"
        )


def require_named_policies() -> None:
    """Raise UnsupportedError if this JAX, with its settings, would silently ignore a policy that is a function."""
    if remat3() and JAX_VERSION < (0, 12, 0):
        raise UnsupportedError(
            f"jax_remat3=True with JAX {jax.__version__}: this JAX version silently recomputes the arrays that a policy "
            'function saves; switch jax_remat3 off with jax.config.update("jax_remat3", False), or use JAX 0.12 or later'
        )


def upgrade_flags() -> tuple[str, ...]:
    """The names of the flags that this JAX marks as upgrades: it will switch them on by default in a future version."""
    helps = {name: about.get("help") or "" for name, (*_, about) in jax.config.meta.items()}
    return tuple(name for name, text in helps.items() if _config.UPGRADE_BOOL_HELP in text)


# The upgrade flags under which remat_jax is tested: each alone, and all together without jax_scan3.
_TESTED_FLAGS = frozenset(
    {
        "jax_custom_jvp3",
        "jax_custom_vjp3",
        "jax_disable_bwd_checks",
        "jax_enable_custom_prng",
        "jax_mutable_array_checks",
        "jax_refs_to_pins",
        "jax_remat3",
        "jax_remat_barrier_no_cotangents",
        "jax_scan3",
        "jax_softmax_custom_jvp",
        "jax_threefry_partitionable",
        "jax_use_shardy_partitioner",
    }
)


def _limits_of_flags() -> Iterator[str]:
    """A text for each upgrade flag of JAX that is on and limits what works, or under which remat_jax is not tested."""
    on = [name for name in upgrade_flags() if getattr(jax.config, name)]
    if "jax_scan3" in on and not _scans_have_gradients():
        yield (
            f"jax_scan3=True with JAX {jax.__version__}: JAX has no gradient of lax.scan and ignores its reverse=True, so "
            'scanned layers, in_chunks and micro-batches do not train: jax.config.update("jax_scan3", False)'
        )
    if "jax_remat3" in on and JAX_VERSION >= (0, 12, 0):
        yield (
            "jax_remat3=True: outside the blocks of a policy, JAX saves no array that is named inside a derivative rule; "
            "blocks use JAX's established rematerialisation and are not affected"
        )
    for name in on:
        if name not in _TESTED_FLAGS:
            yield f'{name}=True: remat_jax is not tested with this flag; if something fails, jax.config.update("{name}", False)'


def _scans_have_gradients() -> bool:
    def last(x: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda carry, _: (2 * carry, None), x, None, length=1)[0]

    try:
        jax.make_jaxpr(jax.grad(last))(1.0)
    except NotImplementedError:
        return False
    return True


def limits() -> tuple[str, ...]:
    """The limits of this installation of JAX and its settings: one text each, with the reason and the remedy."""
    texts = [*_limits_of_flags()]
    # Without libtpu nothing of TPUs is wanted here; a libtpu of another JAX is a fault.
    required = [require_gpu_compiler, require_named_policies, *([require_tpu_compiler] if installed_version("libtpu") else [])]
    for require in required:
        try:
            require()
        except UnsupportedError as error:
            texts.append(str(error))
    if _miscompiles_scanned_offload_here():
        texts.append(
            f"offload inside a scan is refused on GPUs with JAX {jax.__version__}, which compiles it wrongly "
            f"(openxla/xla#46231): use {SCANNED_OFFLOAD_REMEDY}"
        )
    return (*texts, *_ignored_plugins())


_PLUGINS = ("jax-cuda13-plugin", "jax-cuda12-plugin")


def _ignored_plugins() -> list[str]:
    """A text for each CUDA plugin that jaxlib ignores because of its version; empty if a plugin has jaxlib's version."""
    texts = []
    jaxlib = importlib.metadata.version("jaxlib")
    for plugin in _PLUGINS:
        version = installed_version(plugin)
        if version is None:
            continue
        # Like jaxlib, compare only the numbers and ignore suffixes.
        if _numbers(version) == _numbers(jaxlib):
            return []
        texts.append(
            f"{plugin} has version {version} and jaxlib {jaxlib}, so JAX ignores the plugin and GPU targets cannot be "
            f"compiled: pip install {plugin}=={jaxlib}"
        )
    return texts


def installed_version(package: str) -> str | None:
    """The version of a package; None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


_lost_threads = False


def _after_fork() -> None:
    global _lost_threads
    _lost_threads = _bridge.backends_are_initialized()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def warn_of_lost_threads() -> None:
    """Warn, once per process, if this process was forked after JAX had started."""
    global _lost_threads
    if _lost_threads and not is_silenced():
        _lost_threads = False
        warn(
            "this process was forked after JAX had started, and a fork does not copy JAX's threads: JAX may hang. Start "
            "processes with multiprocessing.get_context('spawn')"
        )


# JAX's errors for an eager copy to the host while other arrays are on a mesh, and for a copy inside a `shard_map`.
_NOT_EAGERLY = re.compile(r"Received incompatible devices for jitted computation|device_put with explicit device not allowed")


@contextlib.contextmanager
def eager_offload_explained() -> Iterator[None]:
    """A context for an offload: turns JAX's ValueError for an offload that needs `jax.jit` into an UnsupportedError."""
    try:
        yield
    except ValueError as error:
        if isinstance(error, UnsupportedError) or not _NOT_EAGERLY.search(str(error)):
            raise
        raise UnsupportedError(
            "a policy offloads outside jax.jit, where JAX cannot move arrays on several devices or inside a shard_map to the "
            f"host: put the function that takes the gradient under jax.jit. JAX's error: {error}"
        ) from error
