"""maxdiffusion's Wan 2.1 1.3B with Adam, one video of 17 frames of 480 × 832, one H200.

    git clone https://github.com/AI-Hypercomputer/maxdiffusion && git -C maxdiffusion checkout 7cfb880
    pip install einops absl-py transformers
    PYTHONPATH=.:maxdiffusion/src python -m examples.others.maxdiffusion_wan
    PYTHONPATH=.:maxdiffusion/src remat-jax measure examples/others/maxdiffusion_wan.py:job --target h200

An NNX model whose 30 layers are scanned with `nnx.scan`, with the model's dot-product attention. The loss is flow matching, as
in its trainer. maxdiffusion's own `remat_policy` wraps the body of the scan in `nnx.remat`; the policy given here replaces it.
The model constrains shardings by bare `PartitionSpec`s, so the workload has a mesh, of one device.

Printed by commit 7cfb880 (21 August 2026) with JAX 0.10.2:

    as written: 15.7 GiB, 371 ms
    full: 15.7 GiB, 371 ms
    dots_with_no_batch_dims: 25.0 GiB, 352 ms
    plan within 25%: 26.2 GiB, estimated 342 ms, WanTransformerBlock in one run of 30
      found in 161 s, the first answer that fits after 113 s
      best named policy that fits: dots_with_no_batch_dims, 25.0 GiB, estimated 352 ms
      as written: 15.7 GiB, estimated 371 ms
    a step of a small one as written: loss 0.031066, parameters changed by 0.002210
    a step of a small one under full: loss 0.031066, parameters changed by 0.002210
    a step of a small one under its plan, WanTransformerBlock in one run of 2: loss 0.031066, parameters changed by 0.002210

Other work kept the two cores busy.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import remat_jax as rj

from .shared import show, without

without("tensorboardX", "google.cloud", "google_cloud_mldiagnostics", "ftfy", "qwix", "aqt", "orbax", "grain", "tensorflow")

from maxdiffusion.models.wan.transformers.transformer_wan import WanModel, WanTransformerBlock  # noqa: E402

STEPS = 1000


def loss(model: Any, latents: jax.Array, text: jax.Array, timesteps: jax.Array, noise: jax.Array, key: jax.Array) -> jax.Array:
    """Flow matching: the model predicts what leads from the video to noise."""
    share = (timesteps.astype(jnp.float32) / STEPS).reshape(-1, 1, 1, 1, 1).astype(latents.dtype)
    mixed = (1 - share) * latents + share * noise
    predicted = model(mixed, timesteps, text, deterministic=False, rngs=nnx.Rngs(dropout=key))
    return jnp.mean((noise - latents - predicted).astype(jnp.float32) ** 2)


def job(frames: int = 5, height: int = 60, width: int = 104, words: int = 512, **sizes: Any) -> rj.Workload:
    """A training step on latents: a frame stands for four of the video, a row or a column for eight."""
    options = {"num_attention_heads": 12, "ffn_dim": 8960, "num_layers": 30, "remat_policy": "FULL"} | sizes
    dtypes = {"dtype": jnp.bfloat16, "weights_dtype": jnp.bfloat16}
    model = nnx.eval_shape(lambda: WanModel(nnx.Rngs(0), attention="dot_product", **dtypes, **options))
    latents = jax.ShapeDtypeStruct((1, 16, frames, height, width), jnp.bfloat16)
    text = jax.ShapeDtypeStruct((1, words, options.get("text_dim", 4096)), jnp.bfloat16)
    key = jax.eval_shape(lambda: jax.random.key(0))
    batch = (latents, text, jax.ShapeDtypeStruct((1,), jnp.int32), latents, key)
    return rj.Workload.from_nnx(
        model, loss, batch, blocks=WanTransformerBlock, optimizer=optax.adam(1e-5), mesh={"data": 1}, name="Wan 2.1 1.3B"
    )


def small() -> rj.Workload:
    """Two layers of width 64, one frame."""
    sizes = {"num_attention_heads": 4, "attention_head_dim": 16, "ffn_dim": 128, "text_dim": 32, "freq_dim": 16}
    return job(1, 8, 8, words=8, num_layers=2, **sizes)


if __name__ == "__main__":
    show(job, small, "25%")
