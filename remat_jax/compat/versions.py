"""Which JAX this is, and what one of them cannot do."""

from __future__ import annotations

import re

import jax

from remat_jax.compat.flags import disabled_passes
from remat_jax.errors import UnsupportedError


def _numbers(version: str) -> tuple[int, ...]:
    """The three numbers of a release, of its candidates and of its nightly builds; JAX's own reading of 0.13.0rc1 has two."""
    found = re.match(r"\d+(\.\d+){0,2}", version)
    return tuple(int(part) for part in found.group().split(".")) if found else ()


JAX_VERSION: tuple[int, ...] = _numbers(jax.__version__)


# Two JAX releases bake the wrong slot into the copy back of a scanned block's offloaded residuals on GPUs, so that gradients
# are silently wrong (openxla/xla#46231). Read from the compiled text; unrolled offload and CPU are not touched.
SCANNED_OFFLOAD_MISCOMPILED: frozenset[tuple[int, ...]] = frozenset({(0, 10, 2), (0, 11, 0)})


_PASS = "dynamic-slice-annotator"
# An entry of `xla_disable_hlo_passes` (field 30 of XLA's DebugOptions) in a serialised message: tag, length, text.
_ENTRY = b"\xf2\x01" + bytes([len(_PASS)]) + _PASS.encode()


def miscompiles_scanned_offload() -> bool:
    """Whether this JAX compiles offload inside a scan wrongly for GPUs, in a process that starts with the flags as they are."""
    return JAX_VERSION in SCANNED_OFFLOAD_MISCOMPILED and _PASS not in disabled_passes()


def miscompiles_scanned_offload_here() -> bool:
    """The same of this process, where XLA has read the flags when it started: what is set afterwards changes nothing."""
    if JAX_VERSION not in SCANNED_OFFLOAD_MISCOMPILED:
        return False
    cured = _cured_here()
    return _PASS not in disabled_passes() if cured is None else not cured


def refuse_miscompiled_offload() -> None:
    """Refuse offload inside a loop where this JAX could run it on a GPU and silently get wrong gradients.

    Raises:
      UnsupportedError: a GPU is there, the default device or not, this JAX is one of the two, and the pass is not switched off.
    """
    if JAX_VERSION in SCANNED_OFFLOAD_MISCOMPILED and _has_gpu() and miscompiles_scanned_offload_here():
        raise UnsupportedError(
            f"offload inside a scan with JAX {jax.__version__} on a GPU: the compiler reads another layer's residuals back, "
            "and gradients are silently wrong (openxla/xla#46231). Use JAX 0.11.1 or later, unroll the layers, or start with "
            "XLA_FLAGS=--xla_disable_hlo_passes=dynamic-slice-annotator, which XLA reads once, when it starts"
        )


def _cured_here() -> bool | None:
    """Whether XLA leaves the pass out in this process, by what it says itself; None where it does not say."""
    try:
        from jaxlib import xla_client

        return _ENTRY in xla_client.CompileOptions().SerializeAsString()
    except (ImportError, AttributeError, TypeError):
        return None


def _has_gpu() -> bool:
    # What the arrays will be put on is not known while a function is traced.
    try:
        return bool(jax.devices("gpu"))
    except RuntimeError:
        return False
