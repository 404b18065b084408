"""tunix's Qwen3 1.7B with AdamW in bfloat16, 4 × 2048 tokens, one H200.

    git clone https://github.com/google/tunix && git -C tunix checkout c7d8950
    pip install jaxtyping
    PYTHONPATH=.:tunix python -m examples.others.tunix_qwen3
    PYTHONPATH=.:tunix remat-jax measure examples/others/tunix_qwen3.py:job --target h200

An NNX model whose 28 layers are unrolled, each under tunix's own `nnx.remat`; the policy given here takes its place.

Printed by commit c7d8950 (21 August 2026) with JAX 0.10.2:

    as written: 18.4 GiB, 293 ms
    full: 18.4 GiB, 293 ms
    dots_with_no_batch_dims: 26.0 GiB, 261 ms
    plan within 40%: 40.3 GiB, estimated 240 ms, DecoderLayer in one run of 28
      found in 218 s, the first answer that fits after 218 s
      best named policy that fits: dots, 40.3 GiB, estimated 240 ms
      as written: 19.5 GiB, estimated 282 ms
    a step of a small one as written: loss 4.856150, parameters changed by 0.000919
    a step of a small one under full: loss 4.856150, parameters changed by 0.000919
    a step of a small one under its plan, DecoderLayer in one run of 2: loss 4.856150, parameters changed by 0.000919

Other work kept the two cores busy.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import remat_jax as rj

from .shared import show, without

without("grain", "metrax", "orbax", "pandas", "perfetto", "qwix", "sentencepiece", "tensorboardX", "wandb")

from tunix.models.qwen3.model import DecoderLayer, ModelConfig, Qwen3, RematConfig  # noqa: E402


def loss(model: Any, tokens: jax.Array, targets: jax.Array) -> jax.Array:
    """The cross entropy of the next tokens."""
    length = tokens.shape[1]
    positions = jnp.broadcast_to(jnp.arange(length), tokens.shape)
    causal = jnp.broadcast_to(jnp.tril(jnp.ones((length, length), bool)), (*tokens.shape, length))
    logits, _ = model(tokens, positions, None, causal)
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), targets).mean()


def job(rows: int = 4, length: int = 2048, **sizes: Any) -> rj.Workload:
    """A training step; `sizes` are tunix's own names."""
    options = {"remat_config": RematConfig.DECODER, "dtype": jnp.bfloat16, "param_dtype": jnp.bfloat16} | sizes
    config = dataclasses.replace(ModelConfig.qwen3_1p7b(), **options)
    model = nnx.eval_shape(lambda: Qwen3(config, rngs=nnx.Rngs(0)))
    tokens = jax.ShapeDtypeStruct((rows, length), jnp.int32)
    return rj.Workload.from_nnx(
        model, loss, (tokens, tokens), blocks=DecoderLayer, optimizer=optax.adamw(1e-5), name="Qwen3 1.7B"
    )


def small() -> rj.Workload:
    """Two layers of width 64."""
    sizes = {"num_layers": 2, "vocab_size": 128, "embed_dim": 64, "hidden_dim": 128, "num_heads": 4, "head_dim": 16}
    return job(2, 32, num_kv_heads=2, **sizes)


if __name__ == "__main__":
    show(job, small, "40%")
