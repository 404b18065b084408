"""What a policy does to memory: the table of residuals, and the compiled bytes on a target."""

from remat_jax.memory.report import MemoryReport, Receipt
from remat_jax.memory.residuals import Residual, ResidualTable, residuals
from remat_jax.memory.measure import measure

__all__ = ["MemoryReport", "Receipt", "Residual", "ResidualTable", "measure", "residuals"]
