"""The published steps: what ran, on which GPUs, and where the figure was published."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from benchmarks.published.model import Shape

ABSOLUTE, RATIO = 0.20, 0.04
"""The largest allowed error of an estimated time, relative to the published time, and of an estimated ratio, absolute."""
MISSED_SHARE = 1 / 6
"""The share of steps that may exceed a bound: two of twelve, chosen without regard to today's misses."""

LLAMA2_7B = Shape(32, 4096, 11008, 32, 32000)
LLAMA2_13B = Shape(40, 5120, 13824, 40, 32000, unrolled=True)
LLAMA3_8B = Shape(32, 4096, 14336, 32, 128256, kv_heads=8, unrolled=True)
LLAMA3_70B = Shape(80, 8192, 28672, 64, 128256, kv_heads=8)
LLAMA32_3B = Shape(28, 3072, 8192, 24, 128256, kv_heads=8, tied=True, unrolled=True)
GPT_5B = Shape(24, 4096, 16384, 32, 50304, gated=False, tied=True)
GPT_22B = Shape(48, 6144, 24576, 64, 51200, gated=False, unrolled=True)
GPT_1T = Shape(128, 25600, 102400, 160, 51200, gated=False, unrolled=True)


def gpt2(layers: int, width: int, heads: int) -> Shape:
    """GPT-2 as llm.c trains it, with a padded vocabulary."""
    return Shape(layers, width, 4 * width, heads, 50304, gated=False, tied=True, unrolled=True)


# Saves the matmuls with parameters and the attention's output. MaxText calls this `minimal_flash`. PyTorch's compiler and llm.c
# save about as much, and recompute chains of element-wise operations, whose results `everything` would write and read.
WITH_ATTENTION = "save: @dots_with_no_batch_dims, *_attention*"
PROJECTIONS = "save: *query:dot_general#0, *key:dot_general#0, *value:dot_general#0"
DGXC = "NVIDIA/dgxc-benchmarking, {} (741c886)"
TOOLBOX = "NVIDIA/JAX-Toolbox, {}"
TUNE = "pytorch/torchtune, README.md, Optimization flags (bd2a0fc)"
TITAN = "pytorch/torchtitan, docs/performance.md (3faaa1a), 64 A100"
MEGATRON = "Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models (arXiv:2205.05198), {}"
EAGER = "not compiled: element-wise operations run as separate kernels"
SECOND = {"Block": "full", "Kept": WITH_ATTENTION}
"""Recomputes every second layer."""
OPERATIONS = "save: *query:dot_general#0, *value:dot_general#0, *gate:dot_general#0, *_attention*"
"""torchtitan's selective `op` saves attention and every second matmul: the first, third, fifth and last matmul of a layer."""
OVERLAPPED = "--xla_gpu_enable_latency_hiding_scheduler=true"
"""Makes XLA overlap collectives and copies with compute. Megatron overlaps the all-reduce of a layer's gradient with the
computation of weight gradients; torchtune copies on separate streams."""


@dataclass(frozen=True)
class Case:
    """One published step.

    Attributes:
      name: what ran, in a few words.
      shape, batch, length: the decoder, the sequences on each GPU, and the tokens in each sequence.
      target: the GPUs to compile for; `mesh` has the sizes of their axes, and is empty for one GPU.
      policy: one policy for all layers, or a policy by the name of the layer's class.
      seconds: the published time of a step, or a time computed from `told`; None if only the ratio is published.
      told: the published figure and its unit, in words.
      source: where the figure was published.
      bfloat16: whether parameters and Adam's state are bfloat16 too.
      chunks: the number of chunks in which the head runs; 0 for no chunks.
      tensor: the number of GPUs that share each layer, or 0. If it is set, `batch` is for all GPUs, and the step is one layer.
      flags: the flags for XLA, or for libtpu.
      differs: how the published step differs from the compiled step; empty if no difference is known.
      beside: the name of the case to which this case's time has a published ratio; empty if there is none.
      ratio: the published ratio to `beside`; None if it follows from the published seconds.
    """

    name: str
    shape: Shape
    batch: int
    length: int
    target: str
    policy: str | Mapping[str, str]
    seconds: float | None
    told: str
    source: str
    mesh: Mapping[str, int] = field(default_factory=dict)
    bfloat16: bool = False
    chunks: int = 0
    tensor: int = 0
    flags: str = ""
    differs: str = ""
    beside: str = ""
    ratio: float | None = None


ONE_HOST = {"data": 1, "fsdp": 8}
EIGHT_HOSTS = {"data": 8, "fsdp": 8}


def whole(shape: Shape) -> Shape:
    """`shape` with `whole` set: torchtune compiles each layer by itself, and Megatron's checkpoint does not stop early."""
    return replace(shape, whole=True)


def pairs(shape: Shape) -> Shape:
    """`shape` with `pairs` set, so that every second layer has its own policy."""
    return replace(shape, pairs=True)


def megatron(name: str, shape: Shape, batch: int, where: str, figures: Mapping[str, float | None]) -> Iterator[Case]:
    """One layer under each policy in `figures`: published seconds, a published ratio (a figure above 1), or None."""
    policies = {"": "off", "full": "full", "selective": "dots_with_no_batch_dims"}
    for policy, figure in figures.items():
        ratio = figure if figure is not None and figure > 1 else None
        seconds = None if ratio else figure
        text = f"{1e3 * seconds:.1f} ms" if seconds else f"{ratio:.2f} times the layer without recomputation" if ratio else ""
        yield Case(
            f"{name}, {policy}".removesuffix(", "),
            whole(shape) if policy == "full" else shape,
            *(batch, 2048, "8xa100", policies[policy], seconds, text or "the layer that others are held against"),
            MEGATRON.format(where),
            tensor=8,
            flags=OVERLAPPED,
            beside=name if policy else "",
            ratio=ratio,
        )


CASES = (
    Case(
        "Llama 2 7B, 8 H100, MaxText, 2 sequences",
        *(LLAMA2_7B, 2, 4096, "8xh100", WITH_ATTENTION, 0.721),
        "step time 0.721 s",
        TOOLBOX.format("docs/frameworks/maxtext/README.md (bcbbfa5)"),
        ONE_HOST,
    ),
    Case(
        "Llama 2 7B, 8 H100, MaxText, 4 sequences",
        *(LLAMA2_7B, 4, 4096, "8xh100", WITH_ATTENTION, 1.445),
        "492 TFLOP/s a GPU, 6 operations for each parameter and token and half of the attention's",
        "AI-Hypercomputer/maxtext, src/maxtext/configs/gpu/a3/llama_2_7b/README.md (e591f30)",
        ONE_HOST,
    ),
    Case(
        "Llama 3 70B, 128 H100, MaxText",
        *(LLAMA3_70B, 2, 8192, "16x8xh100", PROJECTIONS, 15.563),
        "step time 15.563 s",
        DGXC.format("maxtext/README_70b.md"),
        {"data": 16, "fsdp": 8},
    ),
    Case(
        "GPT 5B, 256 H100, Pax",
        *(GPT_5B, 8, 2048, "32x8xh100", "dots_with_no_batch_dims", 2048 / 1657.24),
        "1657.24 sequences/s",
        TOOLBOX.format("rosetta/rosetta/projects/pax/README.md (28603900)"),
        {"data": 32, "fsdp": 8},
    ),
    Case(
        "GPT 5B, 256 A100, Pax",
        *(GPT_5B, 8, 2048, "32x8xa100", "dots_with_no_batch_dims", 2048 / 718.19),
        "718.19 sequences/s",
        TOOLBOX.format("rosetta/rosetta/projects/pax/README.md (28603900)"),
        {"data": 32, "fsdp": 8},
    ),
    Case(
        "Llama 2 7B, 128 A100, fms-fsdp",
        *(replace(LLAMA2_7B, unrolled=True), 2, 4096, "16x8xa100", WITH_ATTENTION, 8192 / 4550),
        "4550 tokens/s a GPU, compiled",
        "foundation-model-stack/fms-fsdp, README.md (5a296af)",
        {"data": 16, "fsdp": 8},
    ),
    Case(
        "Llama 2 7B, 96 H100, fms-fsdp",
        *(replace(LLAMA2_7B, unrolled=True), 2, 4096, "12x8xh100", WITH_ATTENTION, 8192 / 9600),
        "9600 tokens/s a GPU, compiled",
        "foundation-model-stack/fms-fsdp, README.md (5a296af)",
        {"data": 12, "fsdp": 8},
    ),
    Case(
        "Llama 3.2 3B, one A100, torchtune",
        *(LLAMA32_3B, 2, 4096, "a100", WITH_ATTENTION, 8192 / 9174),
        *("9174 tokens/s, compiled, chunked loss", TUNE),
        bfloat16=True,
    ),
    Case(
        "Llama 3.2 3B, one A100, torchtune, full",
        *(whole(LLAMA32_3B), 2, 4096, "a100", "full", 8192 / 7210),
        *("7210 tokens/s with activation checkpointing", TUNE),
        bfloat16=True,
        beside="Llama 3.2 3B, one A100, torchtune",
    ),
    Case(
        "Llama 3.2 3B, one A100, torchtune, full, fused update",
        *(whole(LLAMA32_3B), 2, 4096, "a100", "full", 8192 / 7309),
        *("7309 tokens/s, the optimizer's step in the backward pass", TUNE),
        bfloat16=True,
    ),
    Case(
        "Llama 3.2 3B, one A100, torchtune, offload",
        *(whole(LLAMA32_3B), 2, 4096, "a100", "offload_inputs", 8192 / 7301),
        *("7301 tokens/s with activation offloading besides", TUNE),
        bfloat16=True,
        flags=OVERLAPPED,
        beside="Llama 3.2 3B, one A100, torchtune, full, fused update",
    ),
    Case(
        "Llama 2 13B, 64 A100, torchtitan",
        *(LLAMA2_13B, 2, 4096, "8x8xa100", WITH_ATTENTION, 8192 / 2162),
        *("2162 tokens/s a GPU", TITAN, EIGHT_HOSTS),
        differs=EAGER,
    ),
    Case(
        "Llama 2 13B, 64 A100, torchtitan, every second layer",
        *(pairs(LLAMA2_13B), 2, 4096, "8x8xa100", SECOND, 8192 / 1914),
        *("1914 tokens/s a GPU", TITAN, EIGHT_HOSTS),
        differs=EAGER,
        beside="Llama 2 13B, 64 A100, torchtitan",
    ),
    Case(
        "Llama 2 13B, 64 A100, torchtitan, every second product",
        *(LLAMA2_13B, 2, 4096, "8x8xa100", OPERATIONS, 8192 / 1904),
        *("1904 tokens/s a GPU", TITAN, EIGHT_HOSTS),
        differs=EAGER,
        beside="Llama 2 13B, 64 A100, torchtitan",
    ),
    Case(
        "Llama 3 8B, 64 A100, torchtitan, every second layer",
        *(pairs(LLAMA3_8B), 1, 8192, "8x8xa100", SECOND, 8192 / 2904),
        *("2904 tokens/s a GPU", TITAN, EIGHT_HOSTS),
        differs=EAGER,
    ),
    Case(
        "Llama 3 8B, 64 A100, torchtitan, every second product",
        *(LLAMA3_8B, 1, 8192, "8x8xa100", OPERATIONS, 8192 / 2973),
        *("2973 tokens/s a GPU", TITAN, EIGHT_HOSTS),
        differs=EAGER,
    ),
    *megatron(
        *("GPT 22B, a layer on 8 A100, Megatron", GPT_22B, 4, "Table 4"),
        {"": 19.6e-3, "full": 27.2e-3, "selective": 20.9e-3},
    ),
    *megatron("GPT 1T, a layer on 8 A100, Megatron", GPT_1T, 1, "Figure 8 and its text", {"": None, "full": 1.36}),
    Case(
        "GPT-2 1558M, 8 H100, llm.c",
        *(gpt2(48, 1600, 25), 16, 1024, "8xh100", WITH_ATTENTION, 2.80 / 8),
        "2.80 s for 8 micro-batches",
        "karpathy/llm.c, scripts/run_gpt2_1558M.sh (f1e2ace)",
        ONE_HOST,
        differs="updates its parameters once in 8 micro-batches",
    ),
    Case(
        "GPT-2 124M, 8 A100, llm.c",
        *(gpt2(12, 768, 12), 64, 1024, "8xa100", WITH_ATTENTION, 0.300),
        "about 300 ms",
        "karpathy/llm.c, scripts/run_gpt2_124M.sh (f1e2ace)",
        ONE_HOST,
    ),
    Case(
        "GPT-2 350M, 8 A100, llm.c",
        *(gpt2(24, 1024, 16), 64, 1024, "8xa100", WITH_ATTENTION, 0.820),
        "about 820 ms",
        "karpathy/llm.c, scripts/run_gpt2_350M.sh (f1e2ace)",
        ONE_HOST,
    ),
    Case(
        "GPT-2 774M, 8 A100, llm.c",
        *(gpt2(36, 1280, 20), 32, 1024, "8xa100", WITH_ATTENTION, 1.7 / 2),
        "about 1.7 s for 2 micro-batches",
        "karpathy/llm.c, scripts/run_gpt2_774M.sh (f1e2ace)",
        ONE_HOST,
        differs="updates its parameters once in 2 micro-batches",
    ),
    Case(
        "Llama 3 8B, one H200, KempnerForge, full",
        *(LLAMA3_8B, 4, 4096, "h200", "full", 3.13 / 2),
        "3.13 s for 2 micro-batches, compiled",
        "KempnerInstitute/KempnerForge, benchmarks/mfu_scaling/mfu_scaling.md (5666d0d)",
        bfloat16=True,
        differs="updates its parameters once in 2 micro-batches",
    ),
)
