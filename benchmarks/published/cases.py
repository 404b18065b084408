"""The published steps: what ran, on what, and where the figure stands."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from benchmarks.published.model import Shape

ABSOLUTE = 0.20
"""The share of the published time by which an estimate may miss."""

LLAMA2_7B = Shape(32, 4096, 11008, 32, 32000)
LLAMA3_8B = Shape(32, 4096, 14336, 32, 128256, kv_heads=8)
LLAMA3_70B = Shape(80, 8192, 28672, 64, 128256, kv_heads=8)
LLAMA32_3B = Shape(28, 3072, 8192, 24, 128256, kv_heads=8, tied=True)
GPT_5B = Shape(24, 4096, 16384, 32, 50304, gated=False, tied=True)


def gpt2(layers: int, width: int, heads: int) -> Shape:
    """GPT-2 as llm.c trains it, its vocabulary padded."""
    return Shape(layers, width, 4 * width, heads, 50304, gated=False, tied=True)


# The products with parameters, and what attention gives. MaxText calls it `minimal_flash`; PyTorch's compiler and llm.c keep
# about as much, and compute chains of element-wise operations again, which `everything` would write and read.
WITH_ATTENTION = "save: @dots_with_no_batch_dims, *_attention*"
PROJECTIONS = "save: *query:dot_general#0, *key:dot_general#0, *value:dot_general#0"
DGXC = "NVIDIA/dgxc-benchmarking, {} (741c886)"
TOOLBOX = "NVIDIA/JAX-Toolbox, {}"


@dataclass(frozen=True)
class Case:
    """One published step.

    Attributes:
      name: what ran, in a few words.
      shape, batch, length: the decoder, sequences on each GPU, and tokens in each.
      target: the GPUs that are asked about; `mesh` their axes, empty for one.
      policy: for the layers.
      seconds: of a step, as published, or made from what was: `told` says how.
      told: the published figure in its own words.
      source: where it stands.
      bfloat16: whether parameters and Adam's state are bfloat16, too.
      chunks: into how many the head is cut.
      differs: what the published step has and this one has not; empty where nothing is known.
      beside: the name of the case without recomputation whose ratio is compared too.
      ratio_bound: by how much that ratio may miss: 4 points, or more where `differs` says why.
    """

    name: str
    shape: Shape
    batch: int
    length: int
    target: str
    policy: str
    seconds: float
    told: str
    source: str
    mesh: Mapping[str, int] = field(default_factory=dict)
    bfloat16: bool = False
    chunks: int = 0
    differs: str = ""
    beside: str = ""
    ratio_bound: float = 0.04


ONE_HOST = {"data": 1, "fsdp": 8}
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
        *(LLAMA2_7B, 2, 4096, "8xa100", WITH_ATTENTION, 8192 / 4550),
        "4550 tokens/s a GPU, compiled",
        "foundation-model-stack/fms-fsdp, README.md (5a296af)",
        ONE_HOST,
        differs="its 16 hosts sum their gradients",
    ),
    Case(
        "Llama 2 7B, 96 H100, fms-fsdp",
        *(LLAMA2_7B, 2, 4096, "8xh100", WITH_ATTENTION, 8192 / 9600),
        "9600 tokens/s a GPU, compiled",
        "foundation-model-stack/fms-fsdp, README.md (5a296af)",
        ONE_HOST,
        differs="its 12 hosts sum their gradients",
    ),
    Case(
        "Llama 3.2 3B, one A100, torchtune",
        *(LLAMA32_3B, 2, 4096, "a100", WITH_ATTENTION, 8192 / 9174),
        "9174 tokens/s, compiled, chunked loss",
        "pytorch/torchtune, README.md, Optimization flags (bd2a0fc)",
        bfloat16=True,
        chunks=8,
    ),
    Case(
        "Llama 3.2 3B, one A100, torchtune, full",
        *(LLAMA32_3B, 2, 4096, "a100", "full", 8192 / 7210),
        "7210 tokens/s with activation checkpointing",
        "pytorch/torchtune, README.md, Optimization flags (bd2a0fc)",
        bfloat16=True,
        chunks=8,
        differs="recomputes whole layers, and no part of the head",
        beside="Llama 3.2 3B, one A100, torchtune",
        ratio_bound=0.12,
    ),
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
