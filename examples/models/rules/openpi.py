"""The weights of OpenPI's π0 and π0.5: the parameters of its JAX model, and the state dict of its PyTorch model.

OpenPI's JAX parameters are a tree; `flax.traverse_util.flatten_dict(tree, sep="/")` gives the names that are used here. The
layers are stacked on axis 0, names of the action expert end in `_1`, and heads have an axis of their own.
"""

from __future__ import annotations

from remat_jax.porting import Rules

from ..pi0_config import Pi0Config
from .siglip import ENCODER

# Names between percent signs are sizes of the configuration.
JAX_AROUND = """
    PaliGemma/img/embedding/kernel -> params/vision/patches/kernel
    PaliGemma/img/embedding/bias -> params/vision/patches/bias
    PaliGemma/img/pos_embedding -> params/vision/positions/embedding | 1 t e -> t e
    PaliGemma/img/Transformer/encoder_norm/scale -> params/vision/post_norm/scale
    PaliGemma/img/Transformer/encoder_norm/bias -> params/vision/post_norm/bias
    PaliGemma/img/head/kernel -> params/vision/projector/kernel
    PaliGemma/img/head/bias -> params/vision/projector/bias
    PaliGemma/llm/embedder/input_embedding -> params/embed_tokens/embedding
    PaliGemma/llm/final_norm/scale -> params/prefix_norm/scale
    PaliGemma/llm/final_norm_1/scale -> params/suffix_norm/scale
    PaliGemma/llm/final_norm_1/Dense_0/kernel -> params/suffix_norm/modulation/kernel
    PaliGemma/llm/final_norm_1/Dense_0/bias -> params/suffix_norm/modulation/bias
    {name}/kernel -> params/{name}/kernel
    {name}/bias -> params/{name}/bias
"""
# For one layer: OpenPI's name, the port's names, and the axes. The axis c separates several arrays in one.
JAX_VISION = {
    "LayerNorm_0/scale": ("layer_norm1/scale", "e -> e"),
    "LayerNorm_0/bias": ("layer_norm1/bias", "e -> e"),
    "LayerNorm_1/scale": ("layer_norm2/scale", "e -> e"),
    "LayerNorm_1/bias": ("layer_norm2/bias", "e -> e"),
    "MultiHeadDotProductAttention_0/query/kernel": ("self_attn/query/kernel", "e n h -> e (n h), h=%vision%"),
    "MultiHeadDotProductAttention_0/query/bias": ("self_attn/query/bias", "n h -> (n h), h=%vision%"),
    "MultiHeadDotProductAttention_0/key/kernel": ("self_attn/key/kernel", "e n h -> e (n h), h=%vision%"),
    "MultiHeadDotProductAttention_0/key/bias": ("self_attn/key/bias", "n h -> (n h), h=%vision%"),
    "MultiHeadDotProductAttention_0/value/kernel": ("self_attn/value/kernel", "e n h -> e (n h), h=%vision%"),
    "MultiHeadDotProductAttention_0/value/bias": ("self_attn/value/bias", "n h -> (n h), h=%vision%"),
    "MultiHeadDotProductAttention_0/out/kernel": ("self_attn/out/kernel", "n h e -> (n h) e, h=%vision%"),
    "MultiHeadDotProductAttention_0/out/bias": ("self_attn/out/bias", "e -> e"),
    "MlpBlock_0/Dense_0/kernel": ("mlp/fc1/kernel", "i o -> i o"),
    "MlpBlock_0/Dense_0/bias": ("mlp/fc1/bias", "o -> o"),
    "MlpBlock_0/Dense_1/kernel": ("mlp/fc2/kernel", "i o -> i o"),
    "MlpBlock_0/Dense_1/bias": ("mlp/fc2/bias", "o -> o"),
}
JAX_EXPERT = {
    "attn/attn_vec_einsum%_1%/w": ("o_proj/kernel", "n h e -> (n h) e, h=%head%"),
    "mlp%_1%/gating_einsum": ("mlp/gate_proj/kernel, mlp/up_proj/kernel", "c i o -> i o"),
    "mlp%_1%/linear": ("mlp/down_proj/kernel", "i o -> i o"),
    "pre_attention_norm%_1%/scale": ("input_norm/scale", "e -> e"),
    "pre_attention_norm%_1%/Dense_0/kernel": ("input_norm/modulation/kernel", "i o -> i o"),
    "pre_attention_norm%_1%/Dense_0/bias": ("input_norm/modulation/bias", "o -> o"),
    "pre_ffw_norm%_1%/scale": ("post_attention_norm/scale", "e -> e"),
    "pre_ffw_norm%_1%/Dense_0/kernel": ("post_attention_norm/modulation/kernel", "i o -> i o"),
    "pre_ffw_norm%_1%/Dense_0/bias": ("post_attention_norm/modulation/bias", "o -> o"),
}
JAX_GROUPED = {
    "attn/q_einsum%_1%/w": ("q_proj/kernel", "n e h -> e (n h), h=%head%"),
    "attn/kv_einsum%_1%/w": ("k_proj/kernel, v_proj/kernel", "c n e h -> e (n h), h=%head%"),
}
JAX_UNGROUPED = {
    "attn/qkv_einsum%_1%/w": ("q_proj/kernel, k_proj/kernel, v_proj/kernel", "c n e h -> e (n h), h=%head%"),
}

GEMMA = """
    layers.{i}.self_attn.{name}.weight -> params/layers_{i}/EXPERT/{name}/kernel | linear
    layers.{i}.mlp.{name}.weight -> params/layers_{i}/EXPERT/mlp/{name}/kernel | linear
    layers.{i}.input_layernorm.weight -> params/layers_{i}/EXPERT/input_norm/scale
    layers.{i}.input_layernorm.dense.weight -> params/layers_{i}/EXPERT/input_norm/modulation/kernel | linear
    layers.{i}.input_layernorm.dense.bias -> params/layers_{i}/EXPERT/input_norm/modulation/bias
    layers.{i}.post_attention_layernorm.weight -> params/layers_{i}/EXPERT/post_attention_norm/scale
    layers.{i}.post_attention_layernorm.dense.weight -> params/layers_{i}/EXPERT/post_attention_norm/modulation/kernel | linear
    layers.{i}.post_attention_layernorm.dense.bias -> params/layers_{i}/EXPERT/post_attention_norm/modulation/bias
    norm.weight -> params/STREAM_norm/scale
    norm.dense.weight -> params/STREAM_norm/modulation/kernel | linear
    norm.dense.bias -> params/STREAM_norm/modulation/bias
"""
PYTORCH_AROUND = """
    PALIGEMMA.model.multi_modal_projector.linear.weight -> params/vision/projector/kernel | linear
    PALIGEMMA.model.multi_modal_projector.linear.bias -> params/vision/projector/bias
    PALIGEMMA.model.language_model.embed_tokens.weight -> params/embed_tokens/embedding
    {name}.weight -> params/{name}/kernel | linear
    {name}.bias -> params/{name}/bias
    # Neither head computes anything; PaliGemma's is its embedding.
    tie: PALIGEMMA.model.language_model.embed_tokens.weight = PALIGEMMA.lm_head.weight
    extra: ACTION.lm_head.weight
"""
PALIGEMMA, ACTION = "paligemma_with_expert.paligemma", "paligemma_with_expert.gemma_expert"


def pytorch_rules(config: Pi0Config, scan: bool = False) -> Rules:
    """Return the map of the state dict of OpenPI's `PI0Pytorch`; it is the same for every configuration.

    >>> str(pytorch_rules(Pi0Config()).rules[-3]).removeprefix("paligemma_with_expert.paligemma.model.")
    'language_model.embed_tokens.weight -> params/embed_tokens/embedding'
    """
    tower = _under(f"{PALIGEMMA}.model.vision_tower.vision_model", ENCODER.replace("params/", "params/vision/"))
    prefix = _under(f"{PALIGEMMA}.model.language_model", GEMMA.replace("EXPERT", "experts_0").replace("STREAM", "prefix"))
    suffix = _under(f"{ACTION}.model", GEMMA.replace("EXPERT", "experts_1").replace("STREAM", "suffix"))
    around = PYTORCH_AROUND.replace("PALIGEMMA", PALIGEMMA).replace("ACTION", ACTION)
    found = Rules.parse(tower + prefix + suffix + around)
    return found.stacked("layers_{i}", "layers") if scan else found


def jax_rules(config: Pi0Config, scan: bool = False) -> Rules:
    """Return the map of the parameters of OpenPI's JAX `Pi0`, whose layers are stacked.

    >>> found = jax_rules(Pi0Config(), scan=True)
    >>> print(next(rule for rule in found.rules if "q_einsum_1" in str(rule)))
    PaliGemma/llm/layers/attn/q_einsum_1/w -> params/layers/experts_1/q_proj/kernel | l n e h -> l e (n h), h=16
    """
    stacks = _layers(
        "PaliGemma/img/Transformer/encoderblock", "params/vision/LAYER", JAX_VISION, None if scan else config.vision_depth
    )
    grouped = config.num_kv_heads != config.num_heads
    experts = (JAX_GROUPED if grouped else JAX_UNGROUPED) | JAX_EXPERT
    for index, suffix in enumerate(("", "_1")):
        table = {theirs.replace("%_1%", suffix): ours for theirs, ours in experts.items()}
        stacks += _layers("PaliGemma/llm/layers", f"params/LAYER/experts_{index}", table, None if scan else config.depth)
    text = "\n".join(stacks).replace("%head%", str(config.head_dim))
    return Rules.parse(JAX_AROUND + text.replace("%vision%", str(config.vision_width // config.vision_heads)))


def _layers(source: str, target: str, table: dict[str, tuple[str, str]], depth: int | None) -> list[str]:
    """One rule for each of OpenPI's stacks: to our stacks, or to single layers."""
    lines = []
    for theirs, (ours, axes) in table.items():
        arrays = [f"{target}/{name}" for name in ours.split(", ")]
        left, right = axes.split(" -> ")
        inside = left.removeprefix("c ")
        if depth is None:
            names = [array.replace("LAYER", "layers") for array in arrays]
            steps = f"l {left} -> l {right}" if inside == left else f"split(1) | l 1 {inside} -> l {right}"
        else:
            names = [array.replace("LAYER", f"layers_{layer}") for layer in range(depth) for array in arrays]
            joined = "" if inside == left else f"l {left} -> (l c) {inside}, c={len(arrays)} | "
            steps = f"{joined}split(0) | 1 {inside} -> {right}"
        lines.append(f"{source}/{theirs} -> {', '.join(names)} | {steps}")
    return lines


def _under(prefix: str, text: str) -> str:
    return "".join(f"{prefix}.{line.strip()}\n" for line in text.strip().splitlines())
