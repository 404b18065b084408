"""The weights of Qwen-Image: `QwenImageTransformer2DModel` of `diffusers`, and `QwenImageDiT` of DiffSynth-Studio.

The names are the same. The activation is not: give the configuration `activation="quick_gelu"` for DiffSynth-Studio.
"""

from __future__ import annotations

from remat_jax.porting import Rules

from ..qwen_image import QwenImageConfig
from .choosing import named

STREAMS = """
    transformer_blocks.{i}.IMG_mod.1.weight -> params/layers_{i}/IMAGE_modulation/kernel | linear
    transformer_blocks.{i}.IMG_mod.1.bias -> params/layers_{i}/IMAGE_modulation/bias
    transformer_blocks.{i}.IMG_mlp.net.0.proj.weight -> params/layers_{i}/IMAGE_mlp/fc1/kernel | linear
    transformer_blocks.{i}.IMG_mlp.net.0.proj.bias -> params/layers_{i}/IMAGE_mlp/fc1/bias
    transformer_blocks.{i}.IMG_mlp.net.2.weight -> params/layers_{i}/IMAGE_mlp/fc2/kernel | linear
    transformer_blocks.{i}.IMG_mlp.net.2.bias -> params/layers_{i}/IMAGE_mlp/fc2/bias
"""
DENSE = """
    transformer_blocks.{i}.attn.THEIRS.weight -> params/layers_{i}/attention/OURS/kernel | linear
    transformer_blocks.{i}.attn.THEIRS.bias -> params/layers_{i}/attention/OURS/bias
"""
PROJECTIONS = {
    "to_q": "image_query",
    "to_k": "image_key",
    "to_v": "image_value",
    "to_out.0": "image_out",
    "add_q_proj": "text_query",
    "add_k_proj": "text_key",
    "add_v_proj": "text_value",
    "to_add_out": "text_out",
}
AROUND = """
    img_in.weight -> params/image_in/kernel | linear
    img_in.bias -> params/image_in/bias
    txt_norm.weight -> params/text_norm/scale
    txt_in.weight -> params/text_in/kernel | linear
    txt_in.bias -> params/text_in/bias
    time_text_embed.timestep_embedder.linear_{n}.weight -> params/time_in/linear{n}/kernel | linear
    time_text_embed.timestep_embedder.linear_{n}.bias -> params/time_in/linear{n}/bias
    transformer_blocks.{i}.attn.norm_q.weight -> params/layers_{i}/attention/image_query_norm/scale
    transformer_blocks.{i}.attn.norm_k.weight -> params/layers_{i}/attention/image_key_norm/scale
    transformer_blocks.{i}.attn.norm_added_q.weight -> params/layers_{i}/attention/text_query_norm/scale
    transformer_blocks.{i}.attn.norm_added_k.weight -> params/layers_{i}/attention/text_key_norm/scale
    norm_out.linear.weight -> params/modulation/kernel | linear
    norm_out.linear.bias -> params/modulation/bias
    proj_out.weight -> params/out/kernel | linear
    proj_out.bias -> params/out/bias
"""
NAMES = {"diffusers": AROUND, "diffsynth": AROUND}


def rules(config: QwenImageConfig, scan: bool = False, names: str = "diffusers") -> Rules:
    """Return the weight map, its layers unrolled or stacked; it is the same for every configuration.

    `names`: "diffusers" or "diffsynth", whose names are the same.

    Raises:
        ValueError: `names` is neither.

    >>> len(rules(QwenImageConfig()).rules)
    43
    >>> rules(QwenImageConfig(), names="diffsynth") == rules(QwenImageConfig())
    True
    """
    streams = [STREAMS.replace("IMG", short).replace("IMAGE", name) for short, name in (("img", "image"), ("txt", "text"))]
    dense = [DENSE.replace("THEIRS", theirs).replace("OURS", ours) for theirs, ours in PROJECTIONS.items()]
    found = Rules.parse(named(names, NAMES) + "".join(streams + dense))
    return found.stacked("layers_{i}", "layers") if scan else found
