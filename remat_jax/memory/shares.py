"""The share of each residual that one device of a mesh holds, as the compiler shards it.

The training step under `everything` is compiled once with its residuals as results, and their sharded shapes are read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import jax

from remat_jax import compat
from remat_jax.core.origins import origin
from remat_jax.hardware import Target
from remat_jax.memory.compile.compiler import result_shapes
from remat_jax.memory.compile.devices import check_devices
from remat_jax.memory.compile.exporting import export_step
from remat_jax.memory.compile.options import DEFAULT_TIMEOUT
from remat_jax.workload import Workload


@dataclass(frozen=True)
class Shares:
    """`by_name`: residual name → its share on one device, from 1 / devices to 1. `mean`: the mean share, weighted by bytes."""

    by_name: Mapping[str, float]
    mean: float

    def of(self, name: str) -> float:
        """The share of the residual `name`; the mean share if `name` is unknown."""
        return self.by_name.get(name, self.mean)

    def of_parts(self, parts: int) -> Shares:
        """The shares if each array is one of `parts` equal parts, as in a `shard_map`: `parts` times as large, at most 1.

        >>> Shares({"x": 0.25, "y": 1.0}, 0.4).of_parts(2)
        Shares(by_name={'x': 0.5, 'y': 1.0}, mean=0.8)
        """
        scaled = {name: min(1.0, share * parts) for name, share in self.by_name.items()}
        return Shares(scaled, min(1.0, self.mean * parts)) if parts > 1 else self


def residual_shares(workload: Workload, target: Target, *, timeout: float = DEFAULT_TIMEOUT) -> Shares:
    """The share of each residual on one device of the workload's mesh; compiles one step for `target`."""
    check_devices(workload, target)
    step, function = workload.step_with_residuals("everything")
    jaxpr = jax.make_jaxpr(function)(*step.arguments).jaxpr
    shapes = result_shapes(export_step("everything, its residuals as results", step, target), target, timeout=timeout)
    shares: dict[str, float] = {}
    local = whole = 0.0
    for atom, shape in zip(jaxpr.outvars, shapes, strict=False):
        size = math.prod(atom.aval.shape)
        if not size or hasattr(atom, "val") or (source := origin(jaxpr, atom)).kind in ("argument", "constant"):
            continue
        share = math.prod(shape) / size
        shares = dict.fromkeys((source.name, *source.aliases), share) | shares
        size *= compat.itemsize(atom.aval.dtype)
        local, whole = local + share * size, whole + size
    return Shares(shares, local / whole if whole else 1.0)
