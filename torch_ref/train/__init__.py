"""Parts of a training loop: optimizer state in host memory, and gradient accumulation."""

from __future__ import annotations

from torch_ref.train.accumulate import Accumulated, StepOutcome, accumulate_gradients, accumulated_step, micro_batches
from torch_ref.train.hybrid import HybridOptimizer, StatePlacement

__all__ = [
    "Accumulated",
    "HybridOptimizer",
    "StatePlacement",
    "StepOutcome",
    "accumulate_gradients",
    "accumulated_step",
    "micro_batches",
]
