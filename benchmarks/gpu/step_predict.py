"""Estimates of the steps: `python -m benchmarks.gpu.step_predict REQUEST FILE`, during the run but without its GPU.

`python -m benchmarks.gpu.step_predict h200` prints the estimates of the steps for a target, at their full sizes. With
`--output FILE` it also writes the lines that `python -m benchmarks.gpu --predicted FILE` runs, so that no time on the GPU is
needed to plan. With `--steps gpu.json` it estimates the steps of a run again, such as under other XLA_FLAGS.

Each step is appended to FILE as a line of JSON: its policies, its memory, and its estimated seconds at the target's nominal
and calibrated rates. Plans are made here; a plan's line has the compiler options that it needs.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import remat_jax as rj
from benchmarks.figures import markdown
from benchmarks.gpu.steps import LARGE, ORDER, PLANS, Shape, workload
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
    for model, policy in sorted(steps, key=lambda step: step[1] in PLANS):
        try:
            told = _plan(work(model), PLANS[policy], targets) if policy in PLANS else _named(work(model), policy, targets)
        except RematError as error:
            told = {"refused": str(error)[:300]}
        tell({"model": model, "policy": policy, **told})


def _named(whole: rj.Workload, policy: str, targets: dict[str, str]) -> Line:
    (block,) = (getattr(one, "__name__", one) for one in whole.blocks)
    policies = {} if policy == "off" else {block: policy}
    return {"policies": policies} | _told(whole, policy, targets)


def _plan(whole: rj.Workload, share: float, targets: dict[str, str]) -> Line:
    target = target_named(targets["calibrated"])
    least, most = (rj.measure(whole, name, target).device_bytes for name in ("full", "off"))
    budget = least + round(share * (most - least))
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
    """Write the steps of a request to its file, or print those of a target."""
    if sys.argv[1].startswith("{"):
        request = json.loads(sys.argv[1])
        shapes = {model: Shape(**shape) for model, shape in request["shapes"].items()}
        predict([tuple(step) for step in request["steps"]], shapes, request["targets"], _writer(Path(sys.argv[2])))
        return
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.step_predict", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("target")
    parser.add_argument("--output", type=Path, metavar="FILE")
    parser.add_argument("--steps", type=Path, metavar="FILE", help="a gpu.json")
    options = parser.parse_args()
    targets = {"nominal": options.target, "calibrated": options.target}
    write = _writer(options.output) if options.output else None
    lines: list[Line] = []

    def tell(line: Line) -> None:
        lines.append(line)
        if write is not None:
            write(line)

    if options.steps:
        predict_again(json.loads(options.steps.read_text(encoding="utf-8")), targets, tell)
    else:
        predict(ORDER, LARGE, targets, tell)
    columns = ["model, policy", "device GB", "host GB", "estimated ms", *["peak GB"][: bool(options.steps)]]
    print(markdown(columns, [_cells(line) for line in lines]))


def predict_again(run: dict[str, Any], targets: dict[str, str], tell: Callable[[Line], None]) -> None:
    """Report the steps of a run that were measured, with their measured peak."""
    work = cache(lambda model: workload(model, Shape(**run["shapes"][model])))
    for row in run["rows"]:
        if row.get("measured_peak_bytes") and "policies" in row:
            whole = work(row["model"])
            blocks = {getattr(block, "__name__", block): block for block in whole.blocks}
            policy = {blocks[name]: text for name, text in row["policies"].items()} or "off"
            limit = row["budget"] if row.get("compiler_options") else None
            kept = {key: row[key] for key in ("model", "policy", "measured_peak_bytes")}
            tell(kept | _told(whole, policy, targets, limit))


def _writer(path: Path) -> Callable[[Line], None]:
    def write(line: Line) -> None:
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    return write


def _cells(line: Line) -> tuple[str, ...]:
    name = f"{line['model']}, {line['policy']}"
    if "refused" in line:
        return name, line["refused"], "", ""
    figures = line["device_bytes"] / 1e9, line["host_bytes"] / 1e9, line["estimated_seconds"]["nominal"] * 1e3
    peak = [line["measured_peak_bytes"] / 1e9] if "measured_peak_bytes" in line else []
    return name, *(f"{figure:.2f}" for figure in (*figures, *peak))


if __name__ == "__main__":
    main()
