"""One row: a policy or the plan of one workload, compiled for one target, as plain data."""

from __future__ import annotations

import time
from typing import Any

import remat_jax as rj
from remat_jax.errors import CompileError, InfeasibleBudget
from remat_jax.planning import Plan

PLAN = "plan"
TIMEOUT = 3600.0
_SHOWN = 300

Row = dict[str, Any]


def row(work: rj.Workload, policy: str, target: str, budget: int) -> Row:
    """What `policy` needs, a policy or `plan`; where it does not compile, or nothing fits, the row says why."""
    begin = time.perf_counter()
    told: Row = {"workload": work.name, "target": target, "budget": budget, "policy": policy}
    try:
        found = _of_plan(rj.plan(work, budget, target, timeout=TIMEOUT)) if policy == PLAN else _of_policy(work, policy, target)
    except InfeasibleBudget as error:
        found = {"infeasible": error.least_bytes, "held_by": error.held_by}
    except CompileError as error:
        found = {"error": " ".join(str(error).split())[:_SHOWN]}
    return told | found | {"wall_seconds": time.perf_counter() - begin}


def _of_policy(work: rj.Workload, policy: str, target: str) -> Row:
    found = rj.measure(work, policy, target, timeout=TIMEOUT)
    return {
        "device_bytes": found.device_bytes,
        "argument_bytes": found.argument_bytes,
        "temp_bytes": found.temp_bytes,
        "host_bytes": found.host_bytes,
        "residual_device_bytes": found.residual_device_bytes,
        "residual_host_bytes": found.residual_host_bytes,
    }


def _of_plan(found: Plan) -> Row:
    return {
        "device_bytes": found.device_bytes,
        "predicted_bytes": found.predicted_bytes,
        "host_bytes": found.host_bytes,
        "estimated_seconds": found.seconds,
        "base_seconds": found.base_seconds,
        "named_seconds": {one.name: one.seconds for one in found.named if one.seconds is not None and not one.remark},
        "policies": found.texts,
        "layers": [{"where": part.where, "policy": part.policy} for part in found.parts],
        "is_maximal": found.is_maximal,
        "tried": found.tried,
        "notes": found.notes,
    }
