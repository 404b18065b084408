"""Helpers for a training loop: optimizer state in host memory, gradients in micro-batches, a head in chunks."""

from __future__ import annotations

from remat_jax.train.offload import OffloadedOptimizer, StateLeaf, StatePlacement, offload_optimizer, plain
from remat_jax.train.parts import accumulate_gradients, in_chunks

__all__ = [
    "accumulate_gradients",
    "in_chunks",
    "OffloadedOptimizer",
    "StateLeaf",
    "StatePlacement",
    "offload_optimizer",
    "plain",
]
