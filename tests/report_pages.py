"""Inputs of reports: a workload, a handmade plan for it, and a failed comparison."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp

import remat_jax as rj
from remat_jax.parity.report import ParityReport
from remat_jax.parity.report_data import Check, MemoryRow, TensorRow
from remat_jax.planning.model import Model
from remat_jax.planning.plan_data import Point
from tests.plan_by_hand import plan
from tests.plan_models import MlpLayer, job

JOB = job(scanned=True, layers=3, activation=jnp.sin)
POLICIES = ("off", "full", "save: *up*")
BUDGET = 6 * 2**20


def plan_for(workload: rj.Workload, **changes: Any) -> rj.Plan:
    """A plan for the workload, within `BUDGET`, with made-up figures."""
    by_hand = plan()
    sizes = zip((2, 4, 9), by_hand.frontier, strict=True)
    frontier = tuple(dataclasses.replace(point, device_bytes=size * 2**20) for size, point in sizes)
    values = {
        "policies": {MlpLayer: rj.Policy.parse("full")},
        "frontier": frontier,
        "device_bytes": frontier[1].device_bytes,
        "named": (*by_hand.named, Point("off", 20 * 2**20, 0, 0.012, False)),
        "budget": BUDGET,
        "workload": workload.name,
        "target": "cpu",
        "model": Model.of(workload),
    }
    return plan(**values | changes)


PLAN = plan_for(JOB)


def parity_report() -> ParityReport:
    """Two tensors, of which one gradient is wrong."""
    good = TensorRow("output", "loss", "", (), 1.0, {"off": 1e-16})
    wrong = TensorRow("gradient", "h.1.up.weight", "params/h_1/up/kernel", (8, 4), 2.0, {"off": 2.0})
    wrong.fail("2.0 off in float64", "off")
    divergence = {"torch_path": "h/1/up", "flax_path": "h_1/up", "what": "gradient", "error": 2.0, "reference": 1.0}
    return ParityReport(
        rows=(good, wrong),
        checks=(Check("planted faults in float64", True, "all found"),),
        memory=(MemoryRow("off", "PyTorch", 4096, 0, 8192, "tracked"), MemoryRow("off", "JAX", 4096, 0, 9000, "compiled")),
        torch="Net",
        flax="FlaxNet",
        rules="h.{i}.up.weight -> params/h_{i}/up/kernel | linear",
        modes=("off",),
        dtypes=("float64",),
        divergences={"forward": None, "backward": divergence},
    )
