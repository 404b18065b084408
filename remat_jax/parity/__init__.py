"""Does one framework compute what the other computes? The comparison, the rule that decides, and its constants."""

from __future__ import annotations

from remat_jax.parity.asserting import assert_parity
from remat_jax.parity.comparison import compare
from remat_jax.parity.optimizers import Optimizer
from remat_jax.parity.report import Check, MemoryRow, ParityReport, TensorRow
from remat_jax.parity.rule import Row, float64_error, judge
from remat_jax.parity.tolerances import TOLERANCES, Tolerance, epsilon
from remat_jax.parity.wide import keep_float64

__all__ = [
    "TOLERANCES",
    "Check",
    "MemoryRow",
    "Optimizer",
    "ParityReport",
    "Row",
    "TensorRow",
    "Tolerance",
    "assert_parity",
    "compare",
    "epsilon",
    "float64_error",
    "judge",
    "keep_float64",
]
