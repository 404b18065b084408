"""One row as plain data: a policy or the plan of one workload, compiled for one target."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import remat_jax as rj
from remat_jax.errors import CompileError, InfeasibleBudget
from remat_jax.hardware import target as target_named
from remat_jax.planning import Plan
from remat_jax.planning.check_budget import budget_bytes, host_budget_bytes

PLAN = "plan"
TIMEOUT = 3600.0
_ERROR_LENGTH = 300
"""The number of characters of a compiler's error that a row keeps."""

Row = dict[str, Any]


class Card(NamedTuple):
    """A target, with budgets in bytes for device memory and host memory; without a host budget (None) there is no limit."""

    target: str
    budget: int
    host_budget: int | None = None

    @classmethod
    def from_text(cls, text: str) -> Card:
        """
        >>> Card.from_text("h100=80GB"), Card.from_text("h200=141GB+256GB").host_budget
        (Card(target='h100', budget=80000000000, host_budget=None), 256000000000)
        """
        name, _, budgets = text.partition("=")
        budget, _, host = budgets.partition("+")
        described = target_named(name)
        return cls(name, budget_bytes(budget, described), host_budget_bytes(host) if host else None)


def row(work: rj.Workload, policy: str, card: Card) -> Row:
    """Measure `policy`, a policy or `plan`. If the compilation fails, or nothing fits the budget, the row has the reason."""
    begin = time.perf_counter()
    fields: Row = {"workload": work.name, **card._asdict(), "policy": policy}
    try:
        figures = _of_plan(work, card) if policy == PLAN else _of_policy(work, policy, card.target)
    except InfeasibleBudget as error:
        figures = {"infeasible": error.least_bytes, "held_by": error.held_by}
    except CompileError as error:
        figures = {"error": " ".join(str(error).split())[:_ERROR_LENGTH]}
    return fields | figures | {"wall_seconds": time.perf_counter() - begin}


def _of_policy(work: rj.Workload, policy: Any, target: str) -> Row:
    report = rj.measure(work, policy, target, timeout=TIMEOUT)
    return {
        "device_bytes": report.device_bytes,
        "argument_bytes": report.argument_bytes,
        "temp_bytes": report.temp_bytes,
        "host_bytes": report.host_bytes,
        "residual_device_bytes": report.residual_device_bytes,
        "residual_host_bytes": report.residual_host_bytes,
    }


def _of_plan(work: rj.Workload, card: Card) -> Row:
    """The plan's own figures, and those of its step after the plan was saved, loaded and applied."""
    plan = rj.plan(work, card.budget, card.target, card.host_budget, timeout=TIMEOUT)
    with tempfile.TemporaryDirectory() as folder:
        plan.save(Path(folder) / "plan.json")
        loaded = Plan.load(Path(folder) / "plan.json", work)
    return _of_policy(work, loaded.policies, card.target) | {
        "planned_device_bytes": plan.device_bytes,
        "planned_host_bytes": plan.host_bytes,
        "predicted_bytes": plan.predicted_bytes,
        "estimated_seconds": plan.seconds,
        "base_seconds": plan.base_seconds,
        "named_seconds": {
            policy.name: policy.seconds for policy in plan.named if policy.seconds is not None and not policy.remark
        },
        "policies": plan.texts,
        "layers": [{"where": part.where, "policy": part.policy} for part in plan.parts],
        "is_maximal": plan.is_maximal,
        "tried": plan.tried,
        "notes": plan.notes,
    }
