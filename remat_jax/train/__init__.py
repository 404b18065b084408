"""Helpers for a training loop: optimizer state in host memory, gradients in micro-batches, a head in chunks."""

from __future__ import annotations

from remat_jax.train.accumulate import accumulate_gradients
from remat_jax.train.chunks import in_chunks
from remat_jax.train.offload import OffloadedOptimizer, StateLeaf, StatePlacement, offload_optimizer, plain

__all__ = [
    "accumulate_gradients",
    "in_chunks",
    "OffloadedOptimizer",
    "StateLeaf",
    "StatePlacement",
    "offload_optimizer",
    "plain",
]
