"""One row as plain data: a policy or the plan of one model, compiled for a number of hosts."""

from __future__ import annotations

import time
from typing import Any

import remat_jax as rj
from benchmarks.clusters.cases import CASES, on_gpus, with_state_on_hosts
from benchmarks.true_shapes.cases import compiling
from remat_jax.errors import CompileError, InfeasibleBudget
from remat_jax.memory import MemoryReport
from remat_jax.memory.step_time.collectives import executed
from remat_jax.planning import Plan

PLAN, STATE = "plan", "full, state on hosts"
TIMEOUT = 3600.0
_ERROR_LENGTH = 300
"""The number of characters of a compiler's error that a row keeps."""

Row = dict[str, Any]


def row(case: str, hosts: int, policy: str, gpu: str, budget: int) -> Row:
    """Measure `policy`: a policy, `PLAN`, or `STATE` (`full` and the optimizer's state on hosts). A failure is a row too."""
    begin, work = time.perf_counter(), CASES[case].make(hosts)
    target = on_gpus(gpu, hosts)
    with compiling("") as flags:
        fields: Row = {
            "case": case,
            "workload": work.name,
            "target": target,
            "policy": policy,
            "budget": budget,
            "flags": flags,
        }
        try:
            if policy == PLAN:
                figures = _of_plan(rj.plan(work, budget, target, timeout=TIMEOUT), work, target)
            elif policy == STATE:
                figures = _of_report(rj.measure(with_state_on_hosts(work), "full", target, timeout=TIMEOUT))
            else:
                figures = _of_report(rj.measure(work, policy, target, timeout=TIMEOUT))
        except InfeasibleBudget as error:
            figures = {"infeasible": error.least_bytes, "held_by": error.held_by}
        except CompileError as error:
            figures = {"error": " ".join(str(error).split())[:_ERROR_LENGTH]}
    return fields | figures | {"wall_seconds": time.perf_counter() - begin}


def _of_report(report: MemoryReport) -> Row:
    return {
        "device_bytes": report.device_bytes,
        "argument_bytes": report.argument_bytes,
        "temp_bytes": report.temp_bytes,
        "seconds": report.seconds,
        "collective_seconds": report.exchanges and [report.exchanges.covered_seconds, report.exchanges.seconds],
        "exchanged_bytes": report.exchanged_bytes,
        "host_bytes": report.host_bytes,
        "host_bytes_per_host": report.host_bytes_per_host,
        "collectives": {kind: list(traffic) for kind, traffic in executed(report.collectives or ()).items()},
        "warnings": list(report.warnings),
    }


def _of_plan(plan: Plan, work: rj.Workload, target: str) -> Row:
    """The plan's step, measured again to learn what its devices send each other; the compilation comes from the cache."""
    return _of_report(rj.measure(work, dict(plan.policies), target, timeout=TIMEOUT)) | {
        "policies": plan.texts,
        "notes": list(plan.notes),
    }
