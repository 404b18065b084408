"""A byte-level language model of 630 million parameters as a workload: what does one training step need?

    remat-jax measure examples/byte_decoder.py:job --target h200 --policy off --policy full

Nothing is allocated: parameters and batch are shapes, the layers are scanned, and the compiler does the rest.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax

from remat_jax import Workload

from .models import linen

BATCH, LENGTH = 16, 2048


def job() -> Workload:
    """Return the workload: 32 layers of width 1280, 16 sequences of 2048 bytes, Adam, in bfloat16.

    >>> sum(leaf.size for leaf in jax.tree.leaves(job().params)) // 10**6
    632
    """
    model = linen.ByteDecoder(d_model=1280, nhead=20, num_layers=32, max_len=LENGTH, scan=True, param_dtype=jnp.bfloat16)
    tokens = jax.ShapeDtypeStruct((BATCH, LENGTH), jnp.int32)
    params = jax.eval_shape(model.init, jax.random.key(0), tokens)["params"]

    def loss(params, tokens, targets):
        return model.apply({"params": params}, tokens, targets, method="loss")

    return Workload(loss, params, (tokens, tokens), linen.DecoderLayer, optimizer=optax.adam(1e-4), name="byte decoder")
