"""One HTML page about a workload: the cost of policies, memory by module, the plan, and parity with PyTorch."""

from __future__ import annotations

from remat_jax.overview.save import save_report

__all__ = ["save_report"]
