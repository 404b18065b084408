"""The version of JAX, and an error in two of its versions."""

from __future__ import annotations

import re

import jax

from remat_jax.compat.flags import disabled_passes
from remat_jax.errors import UnsupportedError


def _numbers(version: str) -> tuple[int, ...]:
    """The three numbers of a release, also of candidates and nightly builds; JAX itself reads two from 0.13.0rc1."""
    numbers = re.match(r"\d+(\.\d+){0,2}", version)
    return tuple(int(part) for part in numbers.group().split(".")) if numbers else ()


JAX_VERSION: tuple[int, ...] = _numbers(jax.__version__)


# On GPUs, two JAX releases copy the offloaded residuals of a scanned block back from the wrong slot, so that gradients are
# silently wrong (openxla/xla#46231), as the compiled text shows. Unrolled offload and the CPU are not affected.
SCANNED_OFFLOAD_MISCOMPILED: frozenset[tuple[int, ...]] = frozenset({(0, 10, 2), (0, 11, 0)})


_PASS = "dynamic-slice-annotator"
# An entry of `xla_disable_hlo_passes` (field 30 of XLA's DebugOptions) in a serialised message: tag, length, text.
_ENTRY = b"\xf2\x01" + bytes([len(_PASS)]) + _PASS.encode()


def miscompiles_scanned_offload() -> bool:
    """Whether this JAX miscompiles offload inside a scan for GPUs, in a process that starts now with the current flags."""
    return JAX_VERSION in SCANNED_OFFLOAD_MISCOMPILED and _PASS not in disabled_passes()


def miscompiles_scanned_offload_here() -> bool:
    """`miscompiles_scanned_offload` for this process. XLA read its flags at the start; later changes have no effect."""
    if JAX_VERSION not in SCANNED_OFFLOAD_MISCOMPILED:
        return False
    cured = _cured_here()
    return _PASS not in disabled_passes() if cured is None else not cured


def refuse_miscompiled_offload() -> None:
    """Refuse offload inside a loop if this JAX could run it on a GPU with silently wrong gradients.

    Raises:
      UnsupportedError: there is a GPU (the default device or not), this JAX is affected, and the pass is not disabled.
    """
    if JAX_VERSION in SCANNED_OFFLOAD_MISCOMPILED and _has_gpu() and miscompiles_scanned_offload_here():
        raise UnsupportedError(
            f"offload inside a scan with JAX {jax.__version__} on a GPU: the compiled backward pass reads another layer's "
            "residuals, so gradients are silently wrong (openxla/xla#46231). Use JAX 0.11.1 or later, unroll the layers, or "
            "start with XLA_FLAGS=--xla_disable_hlo_passes=dynamic-slice-annotator (XLA reads these flags once, when it "
            "starts)"
        )


def _cured_here() -> bool | None:
    """Whether XLA itself reports that it omits the pass in this process; None if it cannot be asked."""
    try:
        from jaxlib import xla_client

        return _ENTRY in xla_client.CompileOptions().SerializeAsString()
    except (ImportError, AttributeError, TypeError):
        return None


def _has_gpu() -> bool:
    # While a function is traced, it is not known where its arrays will be, so any GPU counts.
    try:
        return bool(jax.devices("gpu"))
    except RuntimeError:
        return False
