"""Targets as data: memory, rates, links and compiler descriptions. Does not import JAX."""

from __future__ import annotations

from remat_jax.hardware.google import quiet_without_tpu
from remat_jax.hardware.nvidia import gpus, quiet_without_gpu
from remat_jax.hardware.target import Target, find_attached_with, target, targets

__all__ = ["Target", "find_attached_with", "gpus", "quiet_without_gpu", "quiet_without_tpu", "target", "targets"]
