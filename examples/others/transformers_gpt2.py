"""transformers' Flax GPT-2 medium with AdamW, 16 × 1024 tokens, one H200.

    pip install transformers==4.56.2  # the last with Flax models
    python -m examples.others.transformers_gpt2
    remat-jax plan examples/others/transformers_gpt2.py:job --target h200 --budget 30%

The wrapper that users call, `FlaxGPT2LMHeadModel`, is no Flax module: `wrapper.module` is. Its 24 layers are unrolled.

Printed with transformers 4.56.2 and JAX 0.10.2:

    off: 49.1 GiB, 116 ms
    full: 9.6 GiB, 145 ms
    dots_with_no_batch_dims: 15.6 GiB, 136 ms
    plan within 30%: 40.6 GiB, estimated 121 ms, FlaxGPT2Block in runs of 11, 12 and 1
      found in 87 s, the first answer that fits after 33 s
      best named policy that fits: dots, 28.5 GiB, estimated 128 ms
    a step of a small one as written: loss 6.240728, parameters changed by 0.034224
    a step of a small one under full: loss 6.240728, parameters changed by 0.034224
    a step of a small one under its plan, FlaxGPT2Block in runs of 1 and 1: loss 6.240727, parameters changed by 0.034224

Other work kept the two cores busy.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from transformers import FlaxGPT2LMHeadModel, GPT2Config
from transformers.models.gpt2.modeling_flax_gpt2 import FlaxGPT2Block

import remat_jax as rj

from .shared import show


def job(rows: int = 16, length: int = 1024, **sizes: Any) -> rj.Workload:
    """A training step; `sizes` are transformers' own names."""
    config = GPT2Config(**{"n_layer": 24, "n_embd": 1024, "n_head": 16, **sizes})
    wrapper = FlaxGPT2LMHeadModel(config, dtype=jnp.bfloat16, _do_init=False)
    tokens = jax.ShapeDtypeStruct((rows, length), jnp.int32)

    def loss(params: Any, tokens: Any) -> jax.Array:
        logits = wrapper(tokens, params=params, dropout_rng=jax.random.key(0), train=True).logits[:, :-1]
        return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), tokens[:, 1:]).mean()

    return rj.Workload(
        loss, wrapper.params_shape_tree, (tokens,), blocks=FlaxGPT2Block, optimizer=optax.adamw(1e-4), name="GPT-2 medium"
    )


def small() -> rj.Workload:
    """Two layers of width 64."""
    return job(2, 32, n_layer=2, n_embd=64, n_head=4, vocab_size=512)


if __name__ == "__main__":
    show(job, small, "30%")
