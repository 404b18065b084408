"""MaxText's Llama 3.1 8B with Adam in bfloat16, 2 × 4096 tokens, one H200.

    git clone https://github.com/AI-Hypercomputer/maxtext && git -C maxtext checkout e591f30
    pip install omegaconf ml_collections chex aqtp qwix etils psutil pydantic transformers
    PYTHONPATH=.:maxtext/src python -m examples.others.maxtext_llama
    PYTHONPATH=.:maxtext/src remat-jax measure examples/others/maxtext_llama.py:job --target h200

MaxText wraps its layers in `jax.checkpoint` by its own `remat_policy`; the policy given here takes that checkpoint's place.
Printed by commit e591f30 (22 August 2026) with JAX 0.10.2 on two busy cores, MaxText's own messages left out:

    as written: 83.0 GiB, 1183 ms
    full: 83.0 GiB, 1183 ms
    dots_with_no_batch_dims: 103.0 GiB, 1082 ms
    plan within 65%: 91.2 GiB, estimated 1087 ms, LlamaDecoderLayer in runs of 15, 11 and 6
      found in 31 s, the first answer that fits after 8 s
      best named policy that fits: full, 83.0 GiB, estimated 1183 ms
      as written: 83.0 GiB, estimated 1183 ms
    a step of a small one as written: loss 5.541267, parameters changed by 0.025215
    a step of a small one under full: loss 5.541267, parameters changed by 0.025215
    a step of a small one under its plan, LlamaDecoderLayer in one run of 3: loss 5.541267, parameters changed by 0.025218

`--own` prints device bytes and matrix products of a step under MaxText's own policies and under ours: its
own `full` and our `full` need the same 89,074,109,312 bytes and compute the same 1382 products; its own `minimal` needs
110,574,087,856 bytes, our `dots_with_no_batch_dims` 768 more, with 1190 products each.

The 768 bytes come from how XLA packs temporary buffers, in units of 256 bytes. With 2 layers of 1024 tokens the difference is
one unit: 12,464,924,536 bytes under `minimal`, 256 more under ours, all of it in `temp_bytes`. The residual tables are equal
array by array (2,376,173,572 bytes), and so are the number of products (80) and the bytes of the buffers at the peak
(3,476,409,088, rounded up to units). The two programs differ in the layout of three of these buffers, and in one buffer of 8
bytes instead of 16; after packing, their sizes differ by one unit.
"""

from __future__ import annotations

import sys
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import remat_jax as rj
from remat_jax.cost.count import matmuls

from .shared import show, without

# Packages for reading data, for clusters, and for TPU kernels (hyper-connections among them, in the syntax of Python 3.12).
without("grain", "drjax", "pathwaysutils", "tiktoken", "sentencepiece", "tokamax", "maxtext.kernels.mhc")

import maxtext  # noqa: E402
from maxtext.configs import pyconfig  # noqa: E402
from maxtext.models.llama2 import LlamaDecoderLayer  # noqa: E402
from maxtext.utils import maxtext_utils, model_creation_utils  # noqa: E402

SETTINGS: dict[str, Any] = {
    "run_name": "remat",
    "hardware": "cpu",
    "skip_jax_distributed_system": True,
    "enable_checkpointing": False,
    "attention": "dot_product",
    "weight_dtype": "bfloat16",
}
SMALL = {"model_name": "default", "base_emb_dim": 64, "base_mlp_dim": 128, "base_num_decoder_layers": 3, "vocab_size": 256}
SMALL |= {"base_num_query_heads": 4, "base_num_kv_heads": 2, "head_dim": 16, "max_target_length": 32}


def job(remat_policy: str = "full", **settings: Any) -> rj.Workload:
    """A training step; `remat_policy` is MaxText's own."""
    size = {"model_name": "llama3.1-8b", "per_device_batch_size": 2, "max_target_length": 4096}
    files = ["", f"{maxtext.__path__[0]}/configs/base.yml"]
    config = pyconfig.initialize(files, remat_policy=remat_policy, **SETTINGS | size | settings)
    mesh = jax.sharding.Mesh(maxtext_utils.create_device_mesh(config), config.mesh_axes)
    with mesh:
        model = nnx.eval_shape(lambda: model_creation_utils.from_config(config, mesh=mesh, rngs=nnx.Rngs(0)))
    tokens = jax.ShapeDtypeStruct((config.global_batch_size_to_load, config.max_target_length), jnp.int32)

    def loss(model: Any, tokens: jax.Array, targets: jax.Array) -> jax.Array:
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        with mesh:
            logits = model(tokens, positions, jnp.ones_like(tokens), enable_dropout=False)
        return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), targets).mean()

    optimizer = optax.adam(1e-4)
    return rj.Workload.from_nnx(model, loss, (tokens, tokens), LlamaDecoderLayer, optimizer=optimizer, name="MaxText")


def small() -> rj.Workload:
    """Three layers of width 64."""
    return job(**SMALL)


def show_own(target: str = "h200", **settings: Any) -> None:
    """Print device bytes and matrix products of a step under MaxText's own policies and under ours."""
    pairs = (("full", "full"), ("minimal", "dots_with_no_batch_dims"))
    for own, ours in pairs:
        workload = job(own, **settings)
        for name, policy in ((f"MaxText's own {own}", "off"), (f"our {ours}", ours)):
            made = workload.step(policy)
            products = matmuls(made.function, *made.arguments)
            print(f"{name}: {rj.measure(workload, policy, target).device_bytes:,} bytes, {products} products", flush=True)


if __name__ == "__main__":
    if "--own" in sys.argv:
        show_own()
    else:
        show(job, small, "65%")
