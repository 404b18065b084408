"""A handmade plan: no model is traced, nothing is compiled."""

from __future__ import annotations

import flax.linen as nn

from remat_jax.memory.compile.options import OPTION
from remat_jax.planning.findings import PlanFinding
from remat_jax.planning.model import Model
from remat_jax.planning.plan import Plan
from remat_jax.planning.plan_data import LayerRow, Part, Point
from remat_jax.policy import LayerPolicies, Policy, as_block_policy

MIB = 2**20


class PlannedLayer(nn.Module):
    """The step that the plan is for."""

    @nn.compact
    def __call__(self, x):
        return x + nn.Dense(4, name="down")(nn.tanh(nn.Dense(8, name="up")(x)))


ROWS = (
    LayerRow("input#0", "save", 2 * MIB, None),
    LayerRow("up:add#0", "offload", 8 * MIB, 3e-4),
    LayerRow("tanh#0", "recompute", 8 * MIB, 2e-5),
)


def part(first, layers, policy, rows=ROWS):
    sizes = [layers * sum(row.bytes for row in rows if row.action == action) for action in ("save", "offload", "recompute")]
    return Part("PlannedLayer", first, layers, policy, *sizes, rows, 1e-3, 2e-3, 2e-5, 1e-4)


def plan(**changes):
    """The plan, with other values for some of its attributes."""
    parts = (part(0, 3, "offload: *up:add#0"), part(3, 1, "full", (ROWS[0], ROWS[2])))
    values = {
        "policies": {PlannedLayer: LayerPolicies.of([Policy.parse("offload: *up:add#0")] * 3 + [Policy.parse("full")])},
        "device_bytes": 90 * MIB,
        "predicted_bytes": 88 * MIB,
        "host_bytes": 24 * MIB,
        "recompute_flops": 5 * 10**9,
        "seconds": 0.0125,
        "base_seconds": 0.012,
        "frontier": (
            Point("", 60 * MIB, 32 * MIB, 0.0131, False, parts),
            Point("", 90 * MIB, 24 * MIB, 0.0125, True, parts),
            Point("", 120 * MIB, 0, 0.012, False, parts[1:]),
        ),
        "named": (
            Point("full", 80 * MIB, 0, 0.0128, True, parts[1:]),
            Point("everything", 120 * MIB, 0, 0.012, False, parts[1:]),
            Point("dots", None, 0, None, False, remark="it selects nothing"),
        ),
        "parts": parts,
        "workload": "by hand",
        "target": "h200",
        "budget": 100 * MIB,
        "host_budget": None,
        "next_gib_seconds": 0.0005,
        "tried": (("full", 80 * MIB), ("a plan", 90 * MIB)),
        "findings": (PlanFinding("not_shown", "info", "A note."),),
        "model": Model(
            (("params/up/kernel", (4, 8), "float32"), ("params/up/bias", (8,), "float32")),
            (("0", (2, 4), "float32"),),
            (("class", "PlannedLayer", PlannedLayer.__module__),),
        ),
        "jax_version": "0.0.0",
        "compiler_options": {OPTION: 29},
        "lower_bound": 0.0124,
    }
    return Plan(**{**values, **changes})


def plan_of(job, policy="1 x full | 1 x dots", **changes):
    """A plan of the workload that no search made."""
    policies = dict.fromkeys(job.blocks, as_block_policy(policy))
    changes = {"compiler_options": {}, "host_bytes": 0, **changes}
    return plan(policies=policies, workload=job.name, model=Model.of(job), **changes)
