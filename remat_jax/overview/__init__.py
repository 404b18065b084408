"""One page with all that is known of a workload: what policies cost, where its memory is, its plan, its parity with PyTorch."""

from __future__ import annotations

from remat_jax.overview.save import save_report

__all__ = ["save_report"]
