"""Proposes a weight map between two models, and proves it by running both."""

from __future__ import annotations

from remat_jax.porting.auto.propose import propose

__all__ = ["propose"]
