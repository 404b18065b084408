"""Does one framework compute what the other computes? The rule that decides, and its constants."""

from __future__ import annotations

from remat_jax.parity.rule import Row, float64_error, judge
from remat_jax.parity.tolerances import TOLERANCES, Tolerance, epsilon
from remat_jax.porting.float64 import keep_float64

__all__ = ["TOLERANCES", "Row", "Tolerance", "epsilon", "float64_error", "judge", "keep_float64"]
