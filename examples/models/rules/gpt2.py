"""The weights of `GPT2LMHeadModel`, whose `Conv1D` stores its kernels as (in, out), like Flax."""

from __future__ import annotations

from remat_jax.porting import Rules

from ..gpt2 import GPT2Config

TEXT = """
    transformer.wte.weight -> params/wte/embedding
    transformer.wpe.weight -> params/wpe/embedding
    transformer.h.{i}.ln_{n}.weight -> params/layers_{i}/ln_{n}/scale
    transformer.h.{i}.ln_{n}.bias -> params/layers_{i}/ln_{n}/bias
    transformer.h.{i}.{branch}.{name}.weight -> params/layers_{i}/{branch}/{name}/kernel
    transformer.h.{i}.{branch}.{name}.bias -> params/layers_{i}/{branch}/{name}/bias
    transformer.ln_f.weight -> params/ln_f/scale
    transformer.ln_f.bias -> params/ln_f/bias
    tie: transformer.wte.weight = lm_head.weight
"""


def rules(config: GPT2Config, scan: bool = False) -> Rules:
    """Return the weight map, its layers unrolled or stacked; it is the same for every configuration.

    >>> len(rules(GPT2Config()).rules)
    8
    """
    found = Rules.parse(TEXT)
    return found.stacked("layers_{i}", "layers") if scan else found
