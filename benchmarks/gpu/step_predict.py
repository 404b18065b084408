"""Estimates of the steps: `python -m benchmarks.gpu.step_predict REQUEST FILE`, during the run but without its GPU.

`python -m benchmarks.gpu.step_predict h200` prints the estimates of the steps for a target, at their full sizes.

Each step is appended to FILE as a line of JSON: its policies, its memory, and its estimated seconds at the target's nominal
and calibrated rates. Plans are made here; a plan's line has the compiler options that it needs.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import remat_jax as rj
from benchmarks.figures import markdown
from benchmarks.gpu.steps import LARGE, ORDER, PLAN, SHARE, Shape, workload
from remat_jax.errors import RematError
from remat_jax.hardware import target as target_named
from remat_jax.memory import MemoryReport
from remat_jax.planning.problem import describe, extra_seconds

Line = dict[str, Any]


def predict(
    steps: Sequence[tuple[str, str]], shapes: dict[str, Shape], targets: dict[str, str], tell: Callable[[Line], None]
) -> None:
    """Report every step, plans last.

    Args:
      targets: by the names `nominal` and `calibrated`, the targets to estimate seconds for; plans are made for `calibrated`.
    """
    work = cache(lambda model: workload(model, shapes[model]))
    for model, policy in sorted(steps, key=lambda step: step[1] == PLAN):
        try:
            told = _plan(work(model), targets) if policy == PLAN else _named(work(model), policy, targets)
        except RematError as error:
            told = {"refused": str(error)[:300]}
        tell({"model": model, "policy": policy, **told})


def _named(whole: rj.Workload, policy: str, targets: dict[str, str]) -> Line:
    (block,) = (getattr(one, "__name__", one) for one in whole.blocks)
    policies = {} if policy == "off" else {block: policy}
    return {"policies": policies} | _told(whole, policy, targets)


def _plan(whole: rj.Workload, targets: dict[str, str]) -> Line:
    target = target_named(targets["calibrated"])
    least, most = (rj.measure(whole, name, target).device_bytes for name in ("full", "off"))
    budget = least + round(SHARE * (most - least))
    plan = rj.plan(whole, budget, target, timeout=240)
    options = dict(plan.compiler_options)
    policy = "off" if plan.is_off else dict(plan.policies)
    line = _told(whole, policy, targets, budget if options else None)
    return {"policies": {} if plan.is_off else plan.texts, "compiler_options": options, "budget": budget} | line


def _told(whole: rj.Workload, policy: Any, targets: dict[str, str], limit: int | None = None) -> Line:
    reports = {key: rj.measure(whole, policy, target_named(name), memory_limit=limit) for key, name in targets.items()}
    one = reports["calibrated"]
    seconds = {key: _seconds(report, whole, policy, targets[key]) for key, report in reports.items()}
    return {"device_bytes": one.device_bytes, "host_bytes": one.host_bytes, "estimated_seconds": seconds}


def _seconds(report: MemoryReport, whole: rj.Workload, policy: Any, target: str) -> float:
    """The seconds of the compiled step; on a CPU, for which compiled steps have no time model, of the traced step."""
    if report.seconds is not None:
        return report.seconds
    described = describe(whole, target)
    return described.base_seconds + extra_seconds(described, policy)


def main() -> None:
    """Report the steps of the request to a file, or print those of a target."""
    if len(sys.argv) == 2:
        lines: list[Line] = []
        predict(ORDER, LARGE, {"nominal": sys.argv[1], "calibrated": sys.argv[1]}, lines.append)
        columns = ["model, policy", "device GB", "host GB", "estimated ms"]
        print(markdown(columns, [_cells(line) for line in lines]))
        return
    request, path = json.loads(sys.argv[1]), Path(sys.argv[2])

    def tell(line: Line) -> None:
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    shapes = {model: Shape(**shape) for model, shape in request["shapes"].items()}
    predict([tuple(step) for step in request["steps"]], shapes, request["targets"], tell)


def _cells(line: Line) -> tuple[str, ...]:
    name = f"{line['model']}, {line['policy']}"
    if "refused" in line:
        return name, line["refused"], "", ""
    figures = line["device_bytes"] / 1e9, line["host_bytes"] / 1e9, line["estimated_seconds"]["nominal"] * 1e3
    return name, *(f"{figure:.2f}" for figure in figures)


if __name__ == "__main__":
    main()
