"""The one place that knows private JAX and Flax, differences between JAX versions, and the CUDA plugin.

Everything else in the package uses public JAX. Supported: JAX 0.10.2 and later.
"""

from __future__ import annotations

from remat_jax.compat.capture import not_captured
from remat_jax.compat.gpu_compiler import (
    GPU_COMPILER_ENVIRONMENT,
    GPU_COMPILER_FLAGS,
    gpu_compiler_installed,
    keep_to_cpu_without_gpu,
    require_gpu_compiler,
)
from remat_jax.compat.jaxprs import (
    bind,
    closed,
    dce,
    eqn_context,
    eqn_outputs,
    hoist_consts,
    inner_context,
    is_jaxpr,
    itemsize,
    jaxpr_function,
    like,
    optimization_barrier,
    scan_layout,
    scopes,
    source_line,
    uses_references,
)
from remat_jax.compat.rematerialisation import (
    BLOCK_NAME,
    OFFLOAD,
    checkpoint_parts,
    classic_rematerialisation,
    executed_bodies,
    given_name,
    is_block,
    is_checkpoint,
    offloaded_by,
    remat3,
    require_named_policies,
)
from remat_jax.compat.tracing import (
    in_loop,
    is_array,
    is_on_host,
    is_traced,
    made_by,
    on_device,
    trace_context,
    trace_context_value,
)
from remat_jax.compat.versions import JAX_VERSION, SCANNED_OFFLOAD_MISCOMPILED, refuse_miscompiled_offload

__all__ = [
    "BLOCK_NAME",
    "GPU_COMPILER_ENVIRONMENT",
    "GPU_COMPILER_FLAGS",
    "JAX_VERSION",
    "OFFLOAD",
    "SCANNED_OFFLOAD_MISCOMPILED",
    "bind",
    "checkpoint_parts",
    "classic_rematerialisation",
    "closed",
    "dce",
    "eqn_context",
    "eqn_outputs",
    "executed_bodies",
    "given_name",
    "gpu_compiler_installed",
    "hoist_consts",
    "in_loop",
    "inner_context",
    "is_array",
    "is_block",
    "is_checkpoint",
    "is_jaxpr",
    "is_on_host",
    "is_traced",
    "itemsize",
    "jaxpr_function",
    "keep_to_cpu_without_gpu",
    "like",
    "made_by",
    "not_captured",
    "offloaded_by",
    "on_device",
    "optimization_barrier",
    "refuse_miscompiled_offload",
    "remat3",
    "require_gpu_compiler",
    "require_named_policies",
    "scan_layout",
    "scopes",
    "source_line",
    "trace_context",
    "trace_context_value",
    "uses_references",
]
