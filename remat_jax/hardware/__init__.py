"""What targets are: memory, rates, links and compiler descriptions, as data. Knows nothing of JAX."""

from __future__ import annotations

from remat_jax.hardware.target import Target, target, targets

__all__ = ["Target", "target", "targets"]
