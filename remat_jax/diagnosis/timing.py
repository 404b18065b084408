"""How long the copies of the last block take, and what there is to hide them."""

from __future__ import annotations

import math
from typing import Any

from remat_jax import compat
from remat_jax.core.products import eqn_flops
from remat_jax.core.walk import bodies
from remat_jax.diagnosis.watch import Observed, Region, contains_live_region, is_region
from remat_jax.hardware import Target

BACKWARD = 3
"""What follows the last block runs forwards once, and backwards at the price of two forward passes."""


def exposed_copies(observed: Observed, target: Target) -> tuple[str, int, float, float] | None:
    """Path, bytes, seconds of copying and seconds of compute of the last block, where the copies cannot be hidden.

    None where they may be, where blocks are in a loop (the last round cannot be told apart), or where only one block offloads.
    An array goes out while the rest of its block and what follows run, and is back before its block's backward pass begins.
    Compute is counted high: all of the block, every operation by itself, each array read and written.
    """
    offloading = [region for region in observed.regions if region.ours and any(one.on_host for one in region.kept)]
    last = next((region for region in offloading if observed.order and observed.order[-1] in region.paths), None)
    after = _after_last_region(observed.jaxpr)
    if last is None or last.looped or after is None or sum(len(region.paths) for region in offloading) < 2:
        return None
    rate = _rate(last, target)
    if rate is None or not target.host_link_bytes_per_s or not target.hbm_bytes_per_s:
        return None
    sizes = [one.nbytes for one in last.kept if one.on_host]
    # Out and back have a direction of the link each; the last array to leave returns last.
    copying = (sum(sizes) + min(sizes)) / target.host_link_bytes_per_s
    block = _seconds(last.block.jaxpr.jaxpr.eqns, rate, target.hbm_bytes_per_s)
    computing = block + BACKWARD * _seconds(after, rate, target.hbm_bytes_per_s)
    return (observed.order[-1], sum(sizes), copying, computing) if copying > computing else None


def _rate(region: Region, target: Target) -> float | None:
    """The nominal rate of the block's own dtype."""
    dtypes = [str(eqn.invars[0].aval.dtype) for eqn in region.block.jaxpr.jaxpr.eqns if eqn_flops(eqn)]
    known = target.peak_flops
    return min((known[dtype] for dtype in dtypes if dtype in known), default=known.get("float32"))


def _after_last_region(jaxpr: Any) -> list[Any] | None:
    """The equations that run after the last region; None if that is in a loop or a branch, or there is none."""
    eqns = jaxpr.jaxpr.eqns
    for index in reversed(range(len(eqns))):
        if is_region(eqns[index]):
            return list(eqns[index + 1 :])
        if contains_live_region(eqns[index]):
            if eqns[index].primitive.name in ("scan", "while", "cond"):
                return None
            inside = _after_last_region(bodies(eqns[index])[0])
            return None if inside is None else [*inside, *eqns[index + 1 :]]
    return None


def _seconds(eqns: list[Any], flops_per_s: float, hbm_bytes_per_s: float) -> float:
    total = 0.0
    for eqn in eqns:
        inside = [_seconds(body.jaxpr.eqns, flops_per_s, hbm_bytes_per_s) for body in bodies(eqn)]
        if inside:
            total += sum(inside) * (eqn.params["length"] if eqn.primitive.name == "scan" else 1)
            continue
        traffic = sum(map(_bytes, (*eqn.invars, *eqn.outvars)))
        total += max(eqn_flops(eqn) / flops_per_s, traffic / hbm_bytes_per_s)
    return total


def _bytes(atom: Any) -> int:
    shape, dtype = getattr(atom.aval, "shape", None), getattr(atom.aval, "dtype", None)
    return 0 if shape is None or dtype is None else math.prod(shape) * compat.itemsize(dtype)
