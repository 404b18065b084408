"""The effect of a policy on memory: the table of residuals, and the compiled memory on a target."""

from __future__ import annotations

from remat_jax.memory.advice import Advice
from remat_jax.memory.measure import measure
from remat_jax.memory.report import MemoryReport, Receipt
from remat_jax.memory.residuals import Residual, ResidualTable, SharedInput, residuals

__all__ = ["Advice", "MemoryReport", "Receipt", "Residual", "ResidualTable", "SharedInput", "measure", "residuals"]
