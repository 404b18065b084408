"""Does one framework compute what the other computes? The rule that decides, its constants, and where the two first part."""

from __future__ import annotations

from remat_jax.parity.capture_flax import capture_flax
from remat_jax.parity.capture_torch import capture_torch
from remat_jax.parity.divergence import Divergence
from remat_jax.parity.exciting import excite
from remat_jax.parity.localise import Divergences, first_divergences
from remat_jax.parity.rule import Row, float64_error, judge
from remat_jax.parity.semantics import Difference, differences
from remat_jax.parity.tolerances import TOLERANCES, Tolerance, epsilon
from remat_jax.porting.float64 import keep_float64

__all__ = [
    "TOLERANCES",
    "Difference",
    "Divergence",
    "Divergences",
    "Row",
    "Tolerance",
    "capture_flax",
    "capture_torch",
    "differences",
    "epsilon",
    "excite",
    "first_divergences",
    "float64_error",
    "judge",
    "keep_float64",
]
