"""The weights of Wan, text to video: `WanTransformer3DModel` of `diffusers`, and `WanModel` of DiffSynth-Studio.

DiffSynth-Studio has the names of the published checkpoint.
"""

from __future__ import annotations

from remat_jax.porting import Rules

from ..wan import WanConfig
from .choosing import named

DENSE = """
    THEIRS.weight -> params/OURS/kernel | linear
    THEIRS.bias -> params/OURS/bias
"""
SCALE = """
    THEIRS.weight -> params/OURS/scale
"""
NORM = f"""{SCALE}
    THEIRS.bias -> params/OURS/bias
"""
PATCHES = """
    patch_embedding.weight -> params/patches/kernel | conv3d
    patch_embedding.bias -> params/patches/bias
"""
TABLE = """
    THEIRS -> params/OURS | 1 k e -> k e
"""
DIFFUSERS = {
    "condition_embedder.time_embedder.linear_1": ("time_in/linear1", DENSE),
    "condition_embedder.time_embedder.linear_2": ("time_in/linear2", DENSE),
    "condition_embedder.time_proj": ("time_modulation", DENSE),
    "condition_embedder.text_embedder.linear_1": ("text_in/fc1", DENSE),
    "condition_embedder.text_embedder.linear_2": ("text_in/fc2", DENSE),
    "blocks.{i}.scale_shift_table": ("layers_{i}/modulation", TABLE),
    "blocks.{i}.attn1.to_q": ("layers_{i}/self_attention/query", DENSE),
    "blocks.{i}.attn1.to_k": ("layers_{i}/self_attention/key", DENSE),
    "blocks.{i}.attn1.to_v": ("layers_{i}/self_attention/value", DENSE),
    "blocks.{i}.attn1.to_out.0": ("layers_{i}/self_attention/out", DENSE),
    "blocks.{i}.attn1.norm_q": ("layers_{i}/self_attention/query_norm", SCALE),
    "blocks.{i}.attn1.norm_k": ("layers_{i}/self_attention/key_norm", SCALE),
    "blocks.{i}.norm2": ("layers_{i}/cross_norm", NORM),
    "blocks.{i}.attn2.to_q": ("layers_{i}/cross_attention/query", DENSE),
    "blocks.{i}.attn2.to_k": ("layers_{i}/cross_attention/key", DENSE),
    "blocks.{i}.attn2.to_v": ("layers_{i}/cross_attention/value", DENSE),
    "blocks.{i}.attn2.to_out.0": ("layers_{i}/cross_attention/out", DENSE),
    "blocks.{i}.attn2.norm_q": ("layers_{i}/cross_attention/query_norm", SCALE),
    "blocks.{i}.attn2.norm_k": ("layers_{i}/cross_attention/key_norm", SCALE),
    "blocks.{i}.ffn.net.0.proj": ("layers_{i}/mlp/fc1", DENSE),
    "blocks.{i}.ffn.net.2": ("layers_{i}/mlp/fc2", DENSE),
    "scale_shift_table": ("modulation", TABLE),
    "proj_out": ("out", DENSE),
}
DIFFSYNTH = {
    "time_embedding.0": ("time_in/linear1", DENSE),
    "time_embedding.2": ("time_in/linear2", DENSE),
    "time_projection.1": ("time_modulation", DENSE),
    "text_embedding.0": ("text_in/fc1", DENSE),
    "text_embedding.2": ("text_in/fc2", DENSE),
    "blocks.{i}.modulation": ("layers_{i}/modulation", TABLE),
    "blocks.{i}.self_attn.q": ("layers_{i}/self_attention/query", DENSE),
    "blocks.{i}.self_attn.k": ("layers_{i}/self_attention/key", DENSE),
    "blocks.{i}.self_attn.v": ("layers_{i}/self_attention/value", DENSE),
    "blocks.{i}.self_attn.o": ("layers_{i}/self_attention/out", DENSE),
    "blocks.{i}.self_attn.norm_q": ("layers_{i}/self_attention/query_norm", SCALE),
    "blocks.{i}.self_attn.norm_k": ("layers_{i}/self_attention/key_norm", SCALE),
    "blocks.{i}.norm3": ("layers_{i}/cross_norm", NORM),
    "blocks.{i}.cross_attn.q": ("layers_{i}/cross_attention/query", DENSE),
    "blocks.{i}.cross_attn.k": ("layers_{i}/cross_attention/key", DENSE),
    "blocks.{i}.cross_attn.v": ("layers_{i}/cross_attention/value", DENSE),
    "blocks.{i}.cross_attn.o": ("layers_{i}/cross_attention/out", DENSE),
    "blocks.{i}.cross_attn.norm_q": ("layers_{i}/cross_attention/query_norm", SCALE),
    "blocks.{i}.cross_attn.norm_k": ("layers_{i}/cross_attention/key_norm", SCALE),
    "blocks.{i}.ffn.0": ("layers_{i}/mlp/fc1", DENSE),
    "blocks.{i}.ffn.2": ("layers_{i}/mlp/fc2", DENSE),
    "head.modulation": ("modulation", TABLE),
    "head.head": ("out", DENSE),
}
NAMES = {"diffusers": DIFFUSERS, "diffsynth": DIFFSYNTH}


def rules(config: WanConfig, scan: bool = False, names: str = "diffusers") -> Rules:
    """Return the weight map, its layers unrolled or stacked; it is the same for every configuration.

    `names`: "diffusers" or "diffsynth".

    Raises:
        ValueError: `names` is neither.

    >>> len(rules(WanConfig()).rules)
    42
    >>> print(rules(WanConfig(), scan=True, names="diffsynth").rules[13])
    blocks.{i}.self_attn.q.weight -> params/layers/self_attention/query/kernel[{i}] | linear
    """
    lines = [form.replace("THEIRS", theirs).replace("OURS", ours) for theirs, (ours, form) in named(names, NAMES).items()]
    found = Rules.parse(PATCHES + "".join(lines))
    return found.stacked("layers_{i}", "layers") if scan else found
