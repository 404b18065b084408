"""What a training loop needs beside the model: optimizer state in host memory, gradients of a batch in parts."""

from __future__ import annotations

from remat_jax.train.accumulate import accumulate_gradients
from remat_jax.train.offload import OffloadedOptimizer, StateLeaf, StatePlacement, offload_optimizer, plain

__all__ = ["accumulate_gradients", "OffloadedOptimizer", "StateLeaf", "StatePlacement", "offload_optimizer", "plain"]
