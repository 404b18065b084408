"""Planning a workload: what its blocks keep, what making that again costs, and which plan fits a budget."""

from __future__ import annotations

from remat_jax.planning.batch import LargestBatch, largest_batch
from remat_jax.planning.make import plan
from remat_jax.planning.plan import Plan

__all__ = ["LargestBatch", "Plan", "largest_batch", "plan"]
