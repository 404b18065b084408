"""Planning a workload: its blocks' residuals, the cost to recompute them, and the fastest plan within a memory budget."""

from __future__ import annotations

from remat_jax.planning.batch import LargestBatch, largest_batch
from remat_jax.planning.batches import BatchRow, BatchTable
from remat_jax.planning.make_plan import plan
from remat_jax.planning.plan import Plan
from remat_jax.planning.train_step import JittedStep

__all__ = ["BatchRow", "BatchTable", "JittedStep", "LargestBatch", "Plan", "largest_batch", "plan"]
