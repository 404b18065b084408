"""Which JAX this is, and what one of them cannot do."""

from __future__ import annotations

import os
import re

import jax

from remat_jax.errors import UnsupportedError

JAX_VERSION: tuple[int, ...] = tuple(int(part) for part in jax.__version__.split(".")[:3])


# Two JAX releases bake the wrong slot into the copy back of a scanned block's offloaded residuals on GPUs, so that gradients
# are silently wrong (openxla/xla#46231). Read from the compiled text; unrolled offload and CPU are not touched.
SCANNED_OFFLOAD_MISCOMPILED: frozenset[tuple[int, ...]] = frozenset({(0, 10, 2), (0, 11, 0)})


_DISABLED_PASSES = re.compile(r"--xla_disable_hlo_passes=(\S*)")


def miscompiles_scanned_offload() -> bool:
    """Whether this JAX compiles offload inside a scan wrongly for GPUs, with the flags that are set."""
    return JAX_VERSION in SCANNED_OFFLOAD_MISCOMPILED and not _cured()


def refuse_miscompiled_offload() -> None:
    """Refuse offload inside a loop where this JAX could run it on a GPU and silently get wrong gradients.

    Raises:
      UnsupportedError: a GPU is there, the default device or not, this JAX is one of the two, and the pass is not switched off.
    """
    if miscompiles_scanned_offload() and _has_gpu():
        raise UnsupportedError(
            f"offload inside a scan with JAX {jax.__version__} on a GPU: the compiler reads another layer's residuals back, "
            "and gradients are silently wrong (openxla/xla#46231). Use JAX 0.11.1 or later, unroll the layers, or start with "
            "XLA_FLAGS=--xla_disable_hlo_passes=dynamic-slice-annotator"
        )


def _cured() -> bool:
    """Whether XLA is told to leave the pass out; of a flag that is given twice, the last one holds."""
    given = _DISABLED_PASSES.findall(os.environ.get("XLA_FLAGS", ""))
    return bool(given) and "dynamic-slice-annotator" in given[-1].split(",")


def _has_gpu() -> bool:
    # What the arrays will be put on is not known while a function is traced.
    try:
        return bool(jax.devices("gpu"))
    except RuntimeError:
        return False
