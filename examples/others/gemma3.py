"""Google DeepMind's Gemma 3 4B with Adafactor, 2 × 2048 tokens, one H200.

    git clone https://github.com/google-deepmind/gemma && git -C gemma checkout 7691fd4
    pip install kauldron einops grain immutabledict lark mediapy portpicker toolz typeguard  # for imports alone
    PYTHONPATH=.:gemma python -m examples.others.gemma3
    PYTHONPATH=.:gemma remat-jax measure examples/others/gemma3.py:job --target h200

Gemma's blocks have no checkpoint of their own. Its 34 layers are unrolled: five with local attention, then one with global.

Printed by commit 7691fd4 (24 July 2026) with JAX 0.10.2:

    off: 32.8 GiB, 209 ms
    full: 12.2 GiB, 258 ms
    dots_with_no_batch_dims: 19.6 GiB, 219 ms
    plan within 15%: 19.6 GiB, estimated 219 ms, Block in runs of 5, 1, 5, 1, 5, 1, 5, 1, 5, 1 and 4
      found in 302 s, the first answer that fits after 91 s
      best named policy that fits: dots_with_no_batch_dims, 19.6 GiB, estimated 219 ms
    a step of a small one as written: loss 6.187500, parameters changed by 0.000318
    a step of a small one under full: loss 6.187500, parameters changed by 0.000318
    a step of a small one under its plan, Block in runs of 5 and 1: loss 6.187500, parameters changed by 0.000318

The plan is `dots_with_no_batch_dims`; its runs follow the model's local and global layers. On two cores one compilation
of the unrolled layers takes a minute, so the search ends at its timeout of 300 s. On busy cores it ended before this policy was
compiled.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax

import remat_jax as rj

from .shared import show, without

without("tensorflow", "tensorflow_datasets", "clu", "tensorboard", "pandas", "IPython", "dialog", "sentencepiece")

from gemma import gm  # noqa: E402
from gemma.gm.nn._modules import Block  # noqa: E402


def job(rows: int = 2, length: int = 2048, **sizes: Any) -> rj.Workload:
    """A training step; `sizes` are Gemma's own names."""
    model = gm.nn.Gemma3_4B(text_only=True)
    model = dataclasses.replace(model, config=dataclasses.replace(model.config, **sizes)) if sizes else model
    tokens = jax.ShapeDtypeStruct((rows, length), jnp.int32)
    params = jax.eval_shape(model.init, jax.random.key(0), tokens)

    def loss(params: Any, tokens: Any) -> jax.Array:
        logits = model.apply(params, tokens).logits[:, :-1]
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    return rj.Workload(loss, params, (tokens,), blocks=Block, optimizer=optax.adafactor(1e-4), name="Gemma 3 4B")


def small() -> rj.Workload:
    """Six layers of width 64: five local, one global."""
    sizes = {"embed_dim": 64, "hidden_dim": 128, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "num_embed": 512}
    kinds = gm.nn.Gemma3_4B.config.attention_types[:6]
    return job(2, 64, **sizes, attention_types=kinds)


if __name__ == "__main__":
    show(job, small, "15%")
