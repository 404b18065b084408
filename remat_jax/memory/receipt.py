"""The receipt of an offload: what was offered, what is in host memory, and what the device gets back."""

from __future__ import annotations

import jax

from remat_jax import compat
from remat_jax.hardware import Target
from remat_jax.memory.compile.backends import backend_of
from remat_jax.memory.compile.sizes import Sizes
from remat_jax.memory.report import Receipt
from remat_jax.memory.residuals import ResidualTable
from remat_jax.report import format_bytes


def receipt_of(sizes: Sizes, baseline: Sizes | None, kept: ResidualTable | None, target: Target) -> Receipt:
    """What an offload came to: the sizes of its step beside those of `baseline`, the step that saves the same residuals."""
    offered = kept.host_bytes if kept else None
    returned = baseline.device - sizes.device if baseline else None
    warnings, is_miscompiled = [], backend_of(target).separate_host_memory and sizes.is_miscompiled
    if offered == 0:
        stays = "; inputs that several blocks read stay on the device" if kept and kept.shared else ""
        warnings.append(f"the policy offloads nothing that the backward pass reads{stays}")
    if not backend_of(target).separate_host_memory:
        warnings.append("a CPU has one memory: offloaded arrays stay in temp, and host_bytes is 0; ask for a GPU or TPU target")
    else:
        on_host = sizes.host_temp * target.devices
        if offered is not None and on_host < offered:
            warnings.append(f"only {format_bytes(on_host)} of the {format_bytes(offered)} offered are in host memory")
        if returned is not None and returned <= 0:
            warnings.append(
                f"offload frees no device memory: the step needs {format_bytes(-returned)} more than with the offloaded arrays "
                "saved on the device"
            )
        if is_miscompiled:
            evidence = (
                "as the compiled step shows: gradients are"
                if sizes.miscompiled
                else "and this step's copies could not be checked: gradients may be"
            )
            warnings.append(
                f"JAX {jax.__version__} miscompiles offload inside scan for GPUs, {evidence} silently wrong "
                f"(openxla/xla#46231). The memory figures are right. To run the step, use {compat.SCANNED_OFFLOAD_REMEDY}"
            )
    return Receipt(offered, sizes.host_temp, returned, tuple(warnings), kept.shared if kept else (), is_miscompiled)
