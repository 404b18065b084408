"""`block.py` wraps the linearisation of each block in a checkpoint, whose policy selects residuals by their names."""

from __future__ import annotations

from remat_jax.core.block import BlockUnderPolicy as BlockUnderPolicy
from remat_jax.core.block import block_under_policy as block_under_policy
from remat_jax.core.block import is_smooth as is_smooth
from remat_jax.core.block import noting_differentiated as noting_differentiated
from remat_jax.core.stack_rows import StackRow as StackRow
