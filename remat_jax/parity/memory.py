"""The memory rows of a comparison: what both frameworks keep between the passes in a mode, and their peaks."""

from __future__ import annotations

import jax

from remat_jax.parity.flax_side import FlaxSide
from remat_jax.parity.kept import KeptAlone, kept_alone
from remat_jax.parity.report_data import MemoryRow
from remat_jax.parity.torch_peak import torch_peak
from remat_jax.parity.torch_side import TorchSide


def memory_of(
    torch: TorchSide, flax: FlaxSide, dtype: str, mode: str, target: str | None
) -> tuple[list[MemoryRow], list[KeptAlone]]:
    """A row for each framework, and the arrays that only one of them keeps.

    JAX's peak is that of its step as it is compiled for the target; without one, as it was compiled to run here.
    """
    saved, residuals = torch.saved(dtype, mode), flax.kept(dtype, mode)
    peak = flax.peak(dtype, mode, target) if target else flax.peak_here(dtype, mode)
    known = f"compiled for {target or jax.default_backend()}, without an optimizer"
    rows = [
        MemoryRow(mode, "PyTorch", saved.device_bytes, saved.host_bytes, *torch_peak(torch, dtype, mode)),
        MemoryRow(mode, "JAX", residuals.device_bytes, residuals.host_bytes, peak, known),
    ]
    return rows, kept_alone(mode, saved, residuals)
