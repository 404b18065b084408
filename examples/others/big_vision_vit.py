"""big_vision's ViT So400m/14 with Adam, 512 images of 224 × 224, one H200.

    git clone https://github.com/google-research/big_vision && git -C big_vision checkout 0127fb6
    pip install absl-py einops ml_collections
    PYTHONPATH=.:big_vision python -m examples.others.big_vision_vit
    PYTHONPATH=.:big_vision remat-jax measure examples/others/big_vision_vit.py:job --target h200

With `scan=True` big_vision puts `nn.remat` around its encoder blocks, by its own `remat_policy`; the policy given here takes
that checkpoint's place. Printed by commit 0127fb6 (19 May 2025) with JAX 0.10.2:

    as written: 22.9 GiB, 890 ms
    full: 22.9 GiB, 890 ms
    dots_with_no_batch_dims: 80.7 GiB, 858 ms
    plan within 50%: 68.1 GiB, estimated 853 ms, Encoder1DBlock in runs of 15, 10 and 2
      found in 36 s, the first answer that fits after 14 s
      best named policy that fits: full, 22.9 GiB, estimated 890 ms
      as written: 22.9 GiB, estimated 890 ms
    a step of a small one as written: loss 3.614692, parameters changed by 0.297223
    a step of a small one under full: loss 3.614692, parameters changed by 0.297223
    a step of a small one under its plan, Encoder1DBlock in one run of 3: loss 3.614692, parameters changed by 0.297224
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

import remat_jax as rj

from .shared import show, without

without("tensorflow")  # big_vision only reads files with it

from big_vision import utils  # noqa: E402
from big_vision.models import vit  # noqa: E402


def job(variant: str = "So400m/14", images: int = 512, side: int = 224, **settings: Any) -> rj.Workload:
    """A training step on labelled images."""
    model = vit.Model(num_classes=1000, variant=variant, scan=True, dtype_mm="bfloat16", **settings)
    batch = jax.ShapeDtypeStruct((images, side, side, 3), jnp.float32), jax.ShapeDtypeStruct((images, 1000), jnp.float32)
    params = jax.eval_shape(model.init, jax.random.key(0), batch[0])["params"]

    def loss(params: Any, images: jax.Array, labels: jax.Array) -> jax.Array:
        logits, _ = model.apply({"params": params}, images)
        return utils.softmax_xent(logits=logits, labels=labels)

    return rj.Workload(loss, params, batch, vit.Encoder1DBlock, optimizer=optax.adamw(1e-3), name="big_vision ViT")


def small() -> rj.Workload:
    """Three layers of width 32."""
    return job("mu/16", images=4, side=32, depth=3)


if __name__ == "__main__":
    show(job, small, "50%")
