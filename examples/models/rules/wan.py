"""The weights of `WanTransformer3DModel`, text to video."""

from __future__ import annotations

from remat_jax.porting import Rules

from ..wan import WanConfig

TEXT = """
    patch_embedding.weight -> params/patches/kernel | conv3d
    patch_embedding.bias -> params/patches/bias
    condition_embedder.time_embedder.linear_{n}.weight -> params/time_in/linear{n}/kernel | linear
    condition_embedder.time_embedder.linear_{n}.bias -> params/time_in/linear{n}/bias
    condition_embedder.time_proj.weight -> params/time_modulation/kernel | linear
    condition_embedder.time_proj.bias -> params/time_modulation/bias
    condition_embedder.text_embedder.linear_{n}.weight -> params/text_in/fc{n}/kernel | linear
    condition_embedder.text_embedder.linear_{n}.bias -> params/text_in/fc{n}/bias
    blocks.{i}.scale_shift_table -> params/layers_{i}/modulation | 1 k e -> k e
    blocks.{i}.norm2.weight -> params/layers_{i}/cross_norm/scale
    blocks.{i}.norm2.bias -> params/layers_{i}/cross_norm/bias
    blocks.{i}.ffn.net.0.proj.weight -> params/layers_{i}/mlp/fc1/kernel | linear
    blocks.{i}.ffn.net.0.proj.bias -> params/layers_{i}/mlp/fc1/bias
    blocks.{i}.ffn.net.2.weight -> params/layers_{i}/mlp/fc2/kernel | linear
    blocks.{i}.ffn.net.2.bias -> params/layers_{i}/mlp/fc2/bias
    proj_out.weight -> params/out/kernel | linear
    proj_out.bias -> params/out/bias
    scale_shift_table -> params/modulation | 1 k e -> k e
"""
DENSE = """
    blocks.{i}.THEIRS.weight -> params/layers_{i}/OURS/kernel | linear
    blocks.{i}.THEIRS.bias -> params/layers_{i}/OURS/bias
"""
NORM = """
    blocks.{i}.THEIRS.weight -> params/layers_{i}/OURS/scale
"""
ATTENTIONS = {"attn1": "self_attention", "attn2": "cross_attention"}
PROJECTIONS = {"to_q": "query", "to_k": "key", "to_v": "value", "to_out.0": "out"}
NORMS = {"norm_q": "query_norm", "norm_k": "key_norm"}


def rules(config: WanConfig, scan: bool = False) -> Rules:
    """Return the weight map, its layers unrolled or stacked; it is the same for every configuration.

    >>> len(rules(WanConfig()).rules)
    38
    """
    inside = [
        form.replace("THEIRS", f"{attn}.{theirs}").replace("OURS", f"{attention}/{ours}")
        for attn, attention in ATTENTIONS.items()
        for form, names in ((DENSE, PROJECTIONS), (NORM, NORMS))
        for theirs, ours in names.items()
    ]
    found = Rules.parse(TEXT + "".join(inside))
    return found.stacked("layers_{i}", "layers") if scan else found
