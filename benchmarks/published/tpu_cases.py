"""Published steps on TPUs: MaxText, in its own repository and in tpu-recipes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from benchmarks.published.cases import Case
from benchmarks.published.model import TENSOR, Attention, Shape

MINIMAL = "dots_with_no_batch_dims"
"""MaxText's policy `minimal`."""
OFFLOADED = "offload: @inputs, *query:dot_general#0, *key:dot_general#0, *value:dot_general#0"
"""MaxText's tensors `decoder_layer_input`, `query_proj`, `key_proj` and `value_proj`."""
OUT_TOO = f"{OFFLOADED}, *out:dot_general#0"
ON_DEVICE = "save: *query:dot_general#0, *key:dot_general#0, *value:dot_general#0, *_attention*"

LLAMA31_8B = Shape(32, 4096, 14336, 32, 128256, kv_heads=8, attention="splash")
LLAMA31_70B = Shape(80, 8192, 28672, 64, 128256, kv_heads=8, attention="splash")
LLAMA2_70B = replace(LLAMA31_70B, vocab=32000)
MISTRAL_7B = replace(LLAMA31_8B, vocab=32000)
GPT3_175B = Shape(96, 12288, 49152, 96, 50304, gated=False, tied=True, attention="splash")


def maxtext_2023(layers: int, width: int, hidden: int, heads: int, attention: Attention = "splash_512") -> Shape:
    """A decoder of MaxText in 2023."""
    shape = Shape(layers, width, hidden, heads, 32768, head_size=256, gated=False, parallel=True)
    return replace(shape, tied=True, attention=attention)


# The flags that were published with the steps, without those that let the SparseCore run collectives.
_PARALLEL = "--xla_tpu_enable_data_parallel_all_reduce_opt=true --xla_tpu_data_parallel_opt_different_sized_ops=true"
_FUSED = (
    "--xla_tpu_enable_async_collective_fusion=true --xla_tpu_enable_async_collective_fusion_multiple_steps=true "
    "--xla_tpu_overlap_compute_collective_tc=true --xla_enable_async_all_gather=true"
)
_GATHERS = f"{_FUSED} --xla_tpu_enable_async_collective_fusion_fuse_all_gather=true"
_LARGE_BLOCKS = "--xla_tpu_scoped_vmem_limit_kib=98304"
_OFFLOAD = (
    "--xla_tpu_use_minor_sharding_for_major_trivial_input=true --xla_tpu_relayout_group_size_threshold_for_reduce_scatter=1 "
    "--xla_tpu_assign_all_reduce_scatter_layout=true --xla_tpu_enable_all_experimental_scheduler_features=true "
    "--xla_tpu_enable_scheduler_memory_pressure_tracking=true --xla_tpu_host_transfer_overlap_limit=24 "
    "--xla_tpu_aggressive_opt_barrier_removal=ENABLED --xla_lhs_prioritize_async_depth_over_stall=ENABLED "
    "--xla_tpu_enable_ag_backward_pipelining=true --xla_should_allow_loop_variant_parameter_in_chain=ENABLED "
    "--xla_should_add_loop_invariant_op_in_chain=ENABLED --xla_max_concurrent_host_send_recv=100 "
    "--xla_tpu_scheduler_percent_shared_memory_limit=100 --xla_latency_hiding_scheduler_rerun=2"
)
FLAGS_V4 = "--xla_enable_async_all_gather=true"
FLAGS_V5E = f"{_PARALLEL} {_GATHERS}"
FLAGS_V5P = (
    "--xla_tpu_megacore_fusion_allow_ags=false --xla_enable_async_collective_permute=true "
    f"--xla_tpu_enable_ag_backward_pipelining=true {_PARALLEL} {_FUSED}"
)
FLAGS_V6E = f"{_LARGE_BLOCKS} {_OFFLOAD} {FLAGS_V5E}"
FLAGS_V6E_8 = f"{FLAGS_V6E} --xla_jf_spmd_threshold_for_windowed_einsum_mib=1000000"
FLAGS_GPT3 = f"{_LARGE_BLOCKS} {FLAGS_V5E} --xla_tpu_use_bundle_aware_cost_model_for_fusions=false"
FLAGS_TPU7X = "--xla_tpu_scoped_vmem_limit_kib=61440 --xla_tpu_bf16_emission_mode=NATIVE_EMISSION"
CHUNKED = "head not in chunks"
BIASES = "adds position biases to the scores and does not normalise values; the compiled step rotates queries and keys"
ONE_HOT = "embeds tokens by a matmul with one-hot rows; the compiled step gathers rows of the table"
MAXTEXT, RECIPES = "AI-Hypercomputer/maxtext, {}", "AI-Hypercomputer/tpu-recipes, training/{} (c8cfe2f)"
COUNTED = {0.0: "without attention", 0.5: "half of attention's", 1.0: "all of attention's"}


def operations(shape: Shape, length: int, attention: float) -> float:
    """MaxText's count of a step's operations for one token: 6 for each parameter, and a share of attention's.

    >>> round(operations(maxtext_2023(48, 6144, 24576, 24), 1024, 0.0) / 6e9, 2)  # the published 22B
    21.94
    """
    parameters = shape.matrices - (0 if shape.tied else shape.vocab * shape.width)
    return 6 * parameters + attention * 12 * shape.layers * shape.heads * shape.size * length


def counted(
    name: str,
    shape: Shape,
    batch: int,
    length: int,
    target: str,
    policy: str,
    tera: float,
    attention: float,
    source: str,
    mesh: Mapping[str, int],
    flags: str,
    differs: str,
) -> Case:
    """A step whose rate is published in TFLOP/s for each chip, with the share of attention's operations that was counted."""
    seconds = batch * length * operations(shape, length, attention) / (tera * 1e12)
    told = f"{tera:g} TFLOP/s for each chip, 6 operations for each parameter and token, {COUNTED[attention]}"
    return Case(name, shape, batch, length, target, policy, seconds, told, source, mesh, flags=flags, differs=differs)


def fsdp(devices: int, tensor: int = 1) -> dict[str, int]:
    """A mesh that shards parameters over `devices`, `tensor` of which share heads and hidden features."""
    return {"data": 1, "fsdp": devices // tensor} | ({TENSOR: tensor} if tensor > 1 else {})


V4 = MAXTEXT.format("README.md (281e04b)")
V5E = MAXTEXT.format("README.md and MaxText/configs/v5e (76bd53b)")
V5P = MAXTEXT.format("MaxText/configs/v5p (76bd53b)")
B16, B32 = maxtext_2023(32, 5120, 32768, 32), maxtext_2023(32, 10240, 32768, 32)
B64 = replace(B32, layers=64)
B22, B52 = maxtext_2023(48, 6144, 24576, 24, "dense"), maxtext_2023(32, 12288, 49152, 32, "dense")

TPU_CASES = (
    counted("MaxText 22B, v4-128", B22, 16, 1024, "v4-128", "full", 156, 0.0, V4, fsdp(64), FLAGS_V4, BIASES),
    counted("MaxText 52B, v4-384", B52, 10, 1024, "v4-384", "full", 154, 0.0, V4, fsdp(192), FLAGS_V4, BIASES),
    counted("MaxText 16B, v5e-256", B16, 6, 2048, "v5e-256", "full", 120, 1.0, V5E, fsdp(256), FLAGS_V5E, ONE_HOT),
    counted("MaxText 32B, v5e-256", B32, 4, 2048, "v5e-256", "full", 132, 1.0, V5E, fsdp(256), FLAGS_V5E, ONE_HOT),
    counted("MaxText 64B, v5e-256", B64, 2, 2048, "v5e-256", "full", 118, 1.0, V5E, fsdp(256), FLAGS_V5E, ONE_HOT),
    counted("MaxText 32B, v5p-128", B32, 8, 2048, "v5p-128", MINIMAL, 328, 0.5, V5P, fsdp(64, 4), FLAGS_V5P, ONE_HOT),
    counted("MaxText 64B, v5p-128", B64, 4, 2048, "v5p-128", MINIMAL, 323, 0.5, V5P, fsdp(64, 4), FLAGS_V5P, ONE_HOT),
    Case(
        "Llama 3.1 8B, v6e-8",
        *(LLAMA31_8B, 3, 8192, "v6e-8", OUT_TOO, 3.443, "step time 3.443 s"),
        RECIPES.format("trillium/Llama3.1-8B-MaxText"),
        fsdp(8),
        flags=FLAGS_V6E_8,
        chunks=4,
        differs=CHUNKED,
    ),
    Case(
        "Mistral 7B, v6e-8",
        *(MISTRAL_7B, 6, 8192, "v6e-8", OUT_TOO, 6.320, "step time 6.320 s"),
        RECIPES.format("trillium/Mistral-7B-MaxText"),
        fsdp(8),
        flags=FLAGS_V6E_8,
        chunks=4,
        differs=CHUNKED,
    ),
    Case(
        "Llama 3.1 70B, v6e-64",
        *(LLAMA31_70B, 2, 8192, "v6e-64", OFFLOADED, 18.688, "step time 18.688 s"),
        RECIPES.format("trillium/Llama3.1-70B-MaxText"),
        fsdp(64),
        flags=FLAGS_V6E,
    ),
    Case(
        "Llama 3.1 70B, v6e-256",
        *(LLAMA31_70B, 5, 8192, "v6e-256", OFFLOADED, 42.656, "step time 42.656 s"),
        RECIPES.format("trillium/Llama3.1-70B-MaxText"),
        fsdp(256),
        flags=FLAGS_V6E,
    ),
    Case(
        "GPT-3 175B, v6e-256",
        *(GPT3_175B, 3, 2048, "v6e-256", "full", 17.182, "step time 17.182 s"),
        RECIPES.format("trillium/GPT3-175B-MaxText"),
        fsdp(256),
        flags=FLAGS_GPT3,
    ),
    Case(
        "Llama 3.1 70B, 64 TPU7x",
        *(LLAMA31_70B, 2, 8192, "tpu7x-128", ON_DEVICE, 12.20, "step time 12.20 s"),
        RECIPES.format("ironwood"),
        fsdp(128),
        flags=FLAGS_TPU7X,
    ),
)
