"""Compare a Flax model with a PyTorch model by the parity rule, and name the first module that diverges."""

from __future__ import annotations

from remat_jax.parity.capture_flax import capture_flax
from remat_jax.parity.capture_torch import capture_torch
from remat_jax.parity.comparison import assert_parity, compare
from remat_jax.parity.divergence import Divergence
from remat_jax.parity.localise import Divergences, first_divergences
from remat_jax.parity.optimizers import Optimizer
from remat_jax.parity.report import ParityReport
from remat_jax.parity.report_data import Check, MemoryRow, TensorRow
from remat_jax.parity.rule import Row, float64_error, judge
from remat_jax.parity.semantics import Difference, differences
from remat_jax.parity.tolerances import LOSS_STEPS, TOLERANCES, Tolerance, epsilon
from remat_jax.parity.trees import excite
from remat_jax.porting.float64 import keep_float64

__all__ = [
    "Check",
    "Difference",
    "Divergence",
    "Divergences",
    "MemoryRow",
    "Optimizer",
    "ParityReport",
    "Row",
    "LOSS_STEPS",
    "TOLERANCES",
    "TensorRow",
    "Tolerance",
    "assert_parity",
    "capture_flax",
    "capture_torch",
    "compare",
    "differences",
    "epsilon",
    "excite",
    "first_divergences",
    "float64_error",
    "judge",
    "keep_float64",
]
