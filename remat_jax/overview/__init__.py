"""One page about a workload: the cost of policies, its memory by module, its plan, and its parity with PyTorch."""

from __future__ import annotations

from remat_jax.overview.save import save_report

__all__ = ["save_report"]
