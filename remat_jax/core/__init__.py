"""The heart: one pass over a jaxpr that finds the blocks, names every residual by its module path, and sets the policy."""

from __future__ import annotations

from remat_jax.core.block import PlannedBlock, is_live, is_smooth, noting_differentiated, plan_block, zero_tangent
from remat_jax.core.stack_rows import StackRow

__all__ = ["PlannedBlock", "StackRow", "is_live", "is_smooth", "noting_differentiated", "plan_block", "zero_tangent"]
