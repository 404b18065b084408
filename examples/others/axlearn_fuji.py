"""axlearn's Fuji 7B with Adam in bfloat16, 12 × 2048 tokens, one H200.

    git clone https://github.com/apple/axlearn && git -C axlearn checkout 34aed43
    pip install absl-py einops ml_collections
    PYTHONPATH=.:axlearn python -m examples.others.axlearn_fuji
    PYTHONPATH=.:axlearn remat-jax measure examples/others/axlearn_fuji.py:job --target h200

axlearn repeats one layer in a scan under its own checkpoint; the policy given here takes that checkpoint's place. Its attention
stores the scores: flash attention is an option of axlearn. Printed by commit 34aed43 (8 July 2026) with JAX 0.10.2:

    as written: 99.8 GiB, 2089 ms
    full: 66.4 GiB, 2235 ms
    dots_with_no_batch_dims: 125.4 GiB, 2825 ms
    plan within 52%: 72.9 GiB, estimated 2152 ms, TransformerLayer in runs of 21, 9 and 2
      found in 41 s, the first answer that fits after 10 s
      best named policy that fits: full, 66.4 GiB, estimated 2235 ms
      as written: 99.8 GiB, estimated 2089 ms
    a step of a small one as written: loss 5.541679, parameters changed by 0.067164
    a step of a small one under full: loss 5.541679, parameters changed by 0.067164
    a step of a small one under its plan, TransformerLayer in one run of 4: loss 5.541679, parameters changed by 0.067164
"""

from __future__ import annotations

import importlib
from typing import Any

import jax
import jax.numpy as jnp
import optax

import remat_jax as rj

from .shared import show, without

# What reads data, writes checkpoints and compiles kernels is not installed.
without(*"cloudpickle datasets evaluate google.cloud grain nltk orbax prefixed sentencepiece seqio t5 tensorflow".split())
without(*"tensorflow_datasets tensorflow_text tensorstore tokamax tokenizers transformers wandb".split())

attention: Any = importlib.import_module("axlearn.common.attention")
modules: Any = importlib.import_module("axlearn.common.module")
fuji: Any = importlib.import_module("axlearn.experiments.text.gpt.fuji")


def job(rows: int = 12, length: int = 2048, words: int = 32768, width: int = 4096, layers: int = 32) -> rj.Workload:
    """A training step on tokens and their labels."""
    sizes = {"num_layers": layers, "hidden_dim": width, "num_heads": width // 128 or 1, "num_kv_heads": None}
    tokens = {"vocab_size": words, "rope_theta": 1e4, "shared_lm_head": False, "pad_token_id": 0, "eos_token_id": 1}
    config = fuji.model_config(**sizes, **tokens, ffn_dim=width * 43 // 16)
    model = config.set(name="model", dtype=jnp.bfloat16).instantiate(parent=None)
    params = jax.eval_shape(model.initialize_parameters_recursively, jax.random.key(0))
    params = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.bfloat16), params)

    def loss(params: Any, tokens: jax.Array, labels: jax.Array) -> jax.Array:
        inputs = {"input_batch": {"input_ids": tokens, "target_labels": labels}}
        options = {"prng_key": jax.random.key(0), "is_training": True, "state": params, "inputs": inputs}
        (value, _), _ = modules.functional(model, **options)
        return value

    ids = jax.ShapeDtypeStruct((rows, length), jnp.int32)
    return rj.Workload(loss, params, (ids, ids), attention.TransformerLayer, optimizer=optax.adam(1e-4), name="Fuji")


def small() -> rj.Workload:
    """Four layers of width 128."""
    return job(rows=2, length=32, words=256, width=128, layers=4)


if __name__ == "__main__":
    show(job, small, "52%")
