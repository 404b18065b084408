"""levanter's Llama 2 7B with Adam in bfloat16, 4 × 2048 tokens, one H200.

    git clone https://github.com/stanford-crfm/levanter && git -C levanter checkout 9263f81
    git clone https://github.com/stanford-crfm/haliax && git -C haliax checkout f41e7d4
    pip install draccus einops equinox jaxtyping safetensors
    PYTHONPATH=.:levanter/src:haliax/src python -m examples.others.levanter_llama
    PYTHONPATH=.:levanter/src:haliax/src remat-jax measure examples/others/levanter_llama.py:job --target h200

haliax scans the layers under a checkpoint of its own that is wider than a layer: it names the parameters too. The policy
given here takes that checkpoint's place. Printed by commit 9263f81 (26 September 2025) with JAX 0.10.2:

    as written: 54.4 GiB, 766 ms
    full: 54.4 GiB, 766 ms
    dots_with_no_batch_dims: 72.9 GiB, 672 ms
    plan within 46%: 63.9 GiB, estimated 640 ms, LlamaDecoderLayer in runs of 17, 10 and 5
      found in 43 s, the first answer that fits after 10 s
      best named policy that fits: full, 54.4 GiB, estimated 766 ms
      as written: 54.4 GiB, estimated 766 ms
    a step of a small one as written: loss 5.543223, parameters changed by 0.030646
    a step of a small one under full: loss 5.543223, parameters changed by 0.030646
    a step of a small one under its plan, LlamaDecoderLayer in one run of 4: loss 5.543223, parameters changed by 0.030643
"""

from __future__ import annotations

import importlib
from typing import Any

import jax
import jax.numpy as jnp
import optax

import remat_jax as rj

from .shared import masks_may_be_numbers, package, show, without

# What trains, reads data and converts checkpoints is not needed. `levanter/__init__.py` would import all of it.
without(*"async_lru braceexpand datasets deepspeed fsspec gcsfs git huggingface_hub humanfriendly jinja2 jmp lenses".split())
without(*"levanter.compat levanter.tracker pyarrow ray tblib tensorstore tqdm tqdm_loggable transformers wandb".split())
package("levanter")
masks_may_be_numbers()

import equinox as eqx  # noqa: E402
import haliax  # noqa: E402

models: Any = importlib.import_module("levanter.models.lm_model")
checkpoints: Any = importlib.import_module("levanter.compat.hf_checkpoints")
checkpoints.HFCompatConfig, checkpoints.HFCheckpointConverter = models.LmConfig, dict
llama: Any = importlib.import_module("levanter.models.llama")


def job(rows: int = 4, length: int = 2048, words: int = 32000, **sizes: int) -> rj.Workload:
    """A training step; `sizes` are levanter's own names."""
    config = llama.LlamaConfig(seq_len=length, **sizes)
    vocabulary, batch = haliax.Axis("vocab", words), haliax.Axis("batch", rows)

    def init(key: jax.Array) -> Any:
        model = llama.LlamaLMHeadModel.init(vocabulary, config, key=key)
        return jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16) if eqx.is_inexact_array(leaf) else leaf, model)

    shapes = eqx.filter_eval_shape(init, jax.random.key(0))
    params, static = eqx.partition(shapes, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))

    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        named = haliax.named(tokens, (batch, config.Pos))
        mask = models.LmExample.causal_loss_mask(config.Pos).broadcast_axis(batch)
        example = models.LmExample(named, mask)
        return models.compute_next_token_loss(eqx.combine(params, static), example).scalar()

    tokens = jax.ShapeDtypeStruct((rows, length), jnp.int32)
    return rj.Workload(loss, params, (tokens,), llama.LlamaDecoderLayer, optimizer=optax.adam(1e-4), name="levanter")


def small() -> rj.Workload:
    """Four layers of width 64."""
    sizes = {"hidden_dim": 64, "intermediate_dim": 128, "num_layers": 4, "num_heads": 4, "num_kv_heads": 4}
    return job(rows=2, length=32, words=256, **sizes)


if __name__ == "__main__":
    show(job, small, "46%")
