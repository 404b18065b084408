"""The weights of `GemmaForCausalLM`. The port multiplies by 1 + scale like the original, so the map adds nothing."""

from __future__ import annotations

from remat_jax.porting import Rules

from ..gemma import GemmaConfig

TEXT = """
    model.embed_tokens.weight -> params/embed/embedding
    model.layers.{i}.input_layernorm.weight -> params/layers_{i}/input_norm/scale
    model.layers.{i}.self_attn.{name}_proj.weight -> params/layers_{i}/self_attn/{name}_proj/kernel | linear
    model.layers.{i}.post_attention_layernorm.weight -> params/layers_{i}/post_attention_norm/scale
    model.layers.{i}.mlp.{name}_proj.weight -> params/layers_{i}/mlp/{name}_proj/kernel | linear
    model.norm.weight -> params/norm/scale
    tie: model.embed_tokens.weight = lm_head.weight
"""


def rules(config: GemmaConfig, scan: bool = False) -> Rules:
    """Return the weight map, its layers unrolled or stacked; it is the same for every configuration.

    >>> print(rules(GemmaConfig(), scan=True).rules[1])
    model.layers.{i}.input_layernorm.weight -> params/layers/input_norm/scale[{i}]
    """
    found = Rules.parse(TEXT)
    return found.stacked("layers_{i}", "layers") if scan else found
