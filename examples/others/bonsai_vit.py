"""bonsai's ViT-B/16 with AdamW, 256 images, one H200.

    git clone https://github.com/jax-ml/bonsai && git -C bonsai checkout 3628425
    PYTHONPATH=.:bonsai python -m examples.others.bonsai_vit
    PYTHONPATH=.:bonsai remat-jax plan examples/others/bonsai_vit.py:job --target h200 --budget 15%

An NNX model without checkpoints of its own; its 12 layers are unrolled.

Printed by commit 3628425 (27 March 2026) with JAX 0.10.2:

    off: 47.3 GiB, 143 ms
    full: 7.4 GiB, 175 ms
    dots_with_no_batch_dims: 19.8 GiB, 161 ms
    plan within 15%: 20.9 GiB, estimated 153 ms, TransformerEncoder in runs of 4, 7 and 1
      found in 86 s, the first answer that fits after 22 s
      best named policy that fits: dots_with_no_batch_dims, 19.8 GiB, estimated 161 ms
    a step of a small one as written: loss 6.921469, parameters changed by 0.039804
    a step of a small one under full: loss 6.921469, parameters changed by 0.039804
    a step of a small one under its plan, TransformerEncoder in one run of 2: loss 6.921469, parameters changed by 0.039804
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax
from bonsai.models.vit.modeling import ModelConfig, TransformerEncoder, ViTClassificationModel
from flax import nnx

import remat_jax as rj

from .shared import show


def loss(model: Any, images: jax.Array, labels: jax.Array) -> jax.Array:
    """The cross entropy of the labels."""
    return optax.softmax_cross_entropy_with_integer_labels(model(images, rngs=None), labels).mean()


def job(images: int = 256, **sizes: Any) -> rj.Workload:
    """A training step; `sizes` are bonsai's own names."""
    config = dataclasses.replace(ModelConfig.vit_p16_224(), **sizes)
    model = nnx.eval_shape(lambda: ViTClassificationModel(config, rngs=nnx.Rngs(0)))
    batch = (jax.ShapeDtypeStruct((images, *config.image_size, 3), jnp.float32), jax.ShapeDtypeStruct((images,), jnp.int32))
    return rj.Workload.from_nnx(model, loss, batch, blocks=TransformerEncoder, optimizer=optax.adamw(1e-4), name="ViT-B/16")


def small() -> rj.Workload:
    """Two layers of width 64."""
    return job(2, image_size=(32, 32), hidden_dim=64, mlp_dim=128, num_heads=4, num_layers=2)


if __name__ == "__main__":
    show(job, small, "15%")
