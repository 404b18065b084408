"""The overlap of a compiled module at given rates."""

from __future__ import annotations

import sys
from dataclasses import replace

from remat_jax.hardware import Target
from remat_jax.hardware.rates import Rates
from remat_jax.memory.hlo.copies import Overlap
from remat_jax.memory.hlo.text import HloModule
from remat_jax.memory.step_time.schedule import step_time


def read_overlap(
    text: str | HloModule,
    target: Target,
    *,
    flops_per_s: float | None = None,
    hbm_bytes_per_s: float | None = None,
    host_link_bytes_per_s: float | None = None,
) -> Overlap:
    """How much of the host copies compute covers, by `step_time` at the target's rates except the given ones.

    With `flops_per_s`, for all products of all dtypes, a kernel launch takes no time; a memory rate of `math.inf` ignores
    the traffic of device memory.
    """
    rates = Rates.of(target)
    if flops_per_s is not None:
        rates = replace(rates, flops={"float32": flops_per_s}, launch_seconds=0.0, cores=None, products={})
    if hbm_bytes_per_s is not None:
        rates = replace(rates, hbm_bytes_per_s=min(hbm_bytes_per_s, sys.float_info.max))
    if host_link_bytes_per_s is not None:
        link = host_link_bytes_per_s
        rates = replace(rates, out_bytes_per_s=link, in_bytes_per_s=link, copy_seconds=0.0)
    return step_time(text, target, rates).overlap
