"""The heart: a block under its policy (`block`). Every residual is named by its module path, and the names carry the policy."""

from __future__ import annotations

from remat_jax.core.block import PlannedBlock, is_live, is_smooth, noting_differentiated, plan_block, zero_tangent
from remat_jax.core.stack_rows import StackRow

__all__ = ["PlannedBlock", "StackRow", "is_live", "is_smooth", "noting_differentiated", "plan_block", "zero_tangent"]
