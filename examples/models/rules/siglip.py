"""The weights of `SiglipVisionModel`; its pooling is a `torch.nn.MultiheadAttention` with one fused projection."""

from __future__ import annotations

from remat_jax.porting import Rules

from ..siglip import SiglipConfig

ENCODER = """
    embeddings.patch_embedding.weight -> params/patches/kernel | conv2d
    embeddings.patch_embedding.bias -> params/patches/bias
    embeddings.position_embedding.weight -> params/positions/embedding
    encoder.layers.{i}.layer_norm{n}.weight -> params/layers_{i}/layer_norm{n}/scale
    encoder.layers.{i}.layer_norm{n}.bias -> params/layers_{i}/layer_norm{n}/bias
    encoder.layers.{i}.self_attn.q_proj.weight -> params/layers_{i}/self_attn/query/kernel | linear
    encoder.layers.{i}.self_attn.q_proj.bias -> params/layers_{i}/self_attn/query/bias
    encoder.layers.{i}.self_attn.k_proj.weight -> params/layers_{i}/self_attn/key/kernel | linear
    encoder.layers.{i}.self_attn.k_proj.bias -> params/layers_{i}/self_attn/key/bias
    encoder.layers.{i}.self_attn.v_proj.weight -> params/layers_{i}/self_attn/value/kernel | linear
    encoder.layers.{i}.self_attn.v_proj.bias -> params/layers_{i}/self_attn/value/bias
    encoder.layers.{i}.self_attn.out_proj.weight -> params/layers_{i}/self_attn/out/kernel | linear
    encoder.layers.{i}.self_attn.out_proj.bias -> params/layers_{i}/self_attn/out/bias
    encoder.layers.{i}.mlp.{name}.weight -> params/layers_{i}/mlp/{name}/kernel | linear
    encoder.layers.{i}.mlp.{name}.bias -> params/layers_{i}/mlp/{name}/bias
    post_layernorm.weight -> params/post_norm/scale
    post_layernorm.bias -> params/post_norm/bias
"""

HEAD = """
    head.probe -> params/head/probe
    head.attention.in_proj_weight -> params/head/attention/{query,key,value}/kernel | split(0) | o i -> i o
    head.attention.in_proj_bias -> params/head/attention/{query,key,value}/bias | split(0)
    head.attention.out_proj.weight -> params/head/attention/out/kernel | linear
    head.attention.out_proj.bias -> params/head/attention/out/bias
    head.layernorm.weight -> params/head/layernorm/scale
    head.layernorm.bias -> params/head/layernorm/bias
    head.mlp.{name}.weight -> params/head/mlp/{name}/kernel | linear
    head.mlp.{name}.bias -> params/head/mlp/{name}/bias
"""


def rules(config: SiglipConfig, scan: bool = False) -> Rules:
    """Return the weight map, its layers unrolled or stacked; it is the same for every configuration.

    >>> len(rules(SiglipConfig()).rules[-8].flax)
    3
    """
    found = Rules.parse(ENCODER + HEAD)
    return found.stacked("layers_{i}", "layers") if scan else found
