"""The weights of `LlamaForCausalLM` and `Qwen3ForCausalLM`."""

from __future__ import annotations

from remat_jax.porting import Rules

from ..llama import LlamaConfig

TEXT = """
    model.embed_tokens.weight -> params/embed/embedding
    model.layers.{i}.input_layernorm.weight -> params/layers_{i}/input_norm/scale
    model.layers.{i}.self_attn.{name}_proj.weight -> params/layers_{i}/self_attn/{name}_proj/kernel | linear
    model.layers.{i}.self_attn.{name}_proj.bias -> params/layers_{i}/self_attn/{name}_proj/bias
    model.layers.{i}.self_attn.{name}_norm.weight -> params/layers_{i}/self_attn/{name}_norm/scale
    model.layers.{i}.post_attention_layernorm.weight -> params/layers_{i}/post_attention_norm/scale
    model.layers.{i}.mlp.{name}_proj.weight -> params/layers_{i}/mlp/{name}_proj/kernel | linear
    model.norm.weight -> params/norm/scale
    lm_head.weight -> params/lm_head/kernel | linear
"""
TIE = "tie: model.embed_tokens.weight = lm_head.weight"


def rules(config: LlamaConfig, scan: bool = False) -> Rules:
    """Return the weight map of a model of this configuration, its layers unrolled or stacked.

    >>> rules(LlamaConfig.qwen3_0_6b()).ties[0][1].text
    'lm_head.weight'
    """
    found = Rules.parse(TEXT + TIE if config.tie_embeddings else TEXT)
    return found.stacked("layers_{i}", "layers") if scan else found
