"""π0 and π0.5 at their published sizes as workloads: what does one training step need?

    export XLA_FLAGS=--xla_gpu_enable_triton_gemm=false
    remat-jax measure examples/pi0_true.py:job --target h200 --policy off --policy full
    remat-jax measure examples/pi0_true.py:adaptive_job --target h200 --policy full

Without this flag, XLA fails to compile some products of these models with Triton: in JAX 0.10.2 with "Couldn't find output tile
sizes", in JAX 0.12.0.1 with "No supported config found".

Nothing is allocated: parameters and batch are shapes, the layers of both transformers are scanned.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import optax

from remat_jax import Workload

from .models import pi0
from .models.pi0_config import Pi0Config
from .models.siglip import SiglipBlock

BATCH = 32


def job() -> Workload:
    """Return π0: 32 observations of three cameras and a prompt of 48 tokens, AdamW, in bfloat16.

    >>> sum(leaf.size for leaf in jax.tree.leaves(job().params)) // 10**6
    3238
    """
    return _workload(Pi0Config.pi0(), "π0")


def adaptive_job() -> Workload:
    """Return π0.5: prompts of 200 tokens, and an expert whose norms depend on the time."""
    return _workload(Pi0Config.pi05(), "π0.5")


def _workload(config: Pi0Config, name: str) -> Workload:
    model = pi0.Pi0(config, scan=True, param_dtype=jnp.bfloat16)
    observation, actions, time, noise = config.shapes(BATCH, jnp.bfloat16)
    params = jax.eval_shape(model.init, jax.random.key(0), observation, actions, time)["params"]
    loss = functools.partial(pi0.flow_matching_loss, model)
    blocks = (pi0.JointLayer, SiglipBlock)
    return Workload(loss, params, (observation, actions, noise, time), blocks, optimizer=optax.adamw(2.5e-5), name=name)
