"""`python -m benchmarks.gpu.plans --output DIR`: plans and named policies on this machine's GPU, estimated and measured.

The device is calibrated first; plans are made for what was found. `DIR/plans.json` is written anew after every row.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu import child
from benchmarks.gpu.__main__ import JAX_ON_GPU, ON_CPU
from benchmarks.record import ROOT, gpus, provenance, text_table, write_json

SHARES = (0.1, 0.3, 0.6, 0.9)
MODELS = ("scanned", "unrolled", "mlp")
CALIBRATED = "calibrated.toml"


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.plans", description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=ROOT / "build" / "benchmarks", help="folder for plans.json")
    parser.add_argument("--only", choices=MODELS, action="append", help="one of the models; may be given again")
    parser.add_argument("--shares", type=float, nargs="+", default=SHARES, help="budgets, of what lies between full and off")
    parser.add_argument("--seconds", type=float, default=540.0, help="budget of time; what does not fit is left out")
    parser.add_argument("--steps", type=int, default=10, help="timed steps per row")
    parser.add_argument("--dry-run", action="store_true", help="everything at a tiny size on the CPU")
    parser.add_argument("--commit", help="the commit of the sources, where there is no git history beside them")
    options = parser.parse_args(arguments)
    if options.seconds <= 0 or options.steps < 1 or not all(0 < share <= 1 for share in options.shares):
        parser.error("--seconds and --steps must be positive, --shares above 0 and at most 1")
    return options


class Run:
    """One run: its options, its folder of exchanged files, its rows."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.options, self.folder = options, folder
        self.ends = time.monotonic() + options.seconds
        self.rows: list[dict[str, Any]] = []
        self.provenance = provenance(options.commit)
        self.on_device = ON_CPU if options.dry_run else JAX_ON_GPU | {"JAX_COMPILATION_CACHE_DIR": str(folder / "xla")}
        self.calibration = ""
        self.crashed = False

    @property
    def remaining(self) -> float:
        """Seconds that are left."""
        return self.ends - time.monotonic()

    def go(self) -> None:
        """Calibrate, then make the plans of each model and run them as they come."""
        self.calibrate()
        for model in self.options.only or MODELS:
            if self.remaining > 0:
                self.model(model)
        self.save()

    def calibrate(self) -> None:
        """Measure the device's rates, as a user does."""
        seconds = "2" if self.options.dry_run else "20"
        command = [sys.executable, "-m", "remat_jax.cli", "calibrate", "--output", str(self.folder / CALIBRATED)]
        environment = child.environment(self.on_device)
        subprocess.run([*command, "--seconds", seconds], cwd=ROOT, env=environment, check=True, stdout=subprocess.DEVNULL)
        self.calibration = (self.folder / CALIBRATED).read_text(encoding="utf-8")

    def model(self, model: str) -> None:
        """Every policy of one model, the planner working beside the device."""
        from benchmarks.gpu.plan_jobs import LARGE, TINY

        shape = (TINY if self.options.dry_run else LARGE)[model]
        told = self.folder / f"{model}.jsonl"
        told.touch()
        targets = {"nominal": self.nominal(), "calibrated": f"{self.folder / CALIBRATED}:measured"}
        request = {"model": model, "shape": dataclasses.asdict(shape), "targets": targets, "shares": self.options.shares}
        command = [sys.executable, "-m", "benchmarks.gpu.plan_make", json.dumps(request), str(told)]
        planner = subprocess.Popen(["nice", *command], cwd=ROOT, env=child.environment(ON_CPU), start_new_session=True)
        done = 0
        try:
            while self.remaining > 0:
                ended = planner.poll() is not None
                lines = child.read_lines(told)
                for line in lines[done:]:
                    self.measure(line, shape)
                if ended and done == len(lines):
                    break
                done = len(lines)
                time.sleep(0.2)
        finally:
            if planner.poll() is None:
                child.stop(planner)
        if planner.returncode:
            self.crashed = True
            print(f"{model}: the planner ended with exit status {planner.returncode}", file=sys.stderr)

    def nominal(self) -> str:
        """The target by its nominal rates: what the driver calls the GPU, and an H200 where it is silent."""
        from remat_jax.hardware import target

        if self.options.dry_run:
            return "cpu"
        name = next((gpu["name"] for gpu in gpus()), None)
        return "h200" if name is None else target(name).name

    def measure(self, line: dict[str, Any], shape: Any) -> None:
        """Run one policy, and keep what came out beside what was said before."""
        from benchmarks.gpu.plan_jobs import PlanJob

        if "refused" not in line and self.remaining > 0:
            print(f"{line['model']}, {line['policy']} … ({self.remaining:.0f} s left)", file=sys.stderr, flush=True)
            steps = 2 if self.options.dry_run else self.options.steps
            job = PlanJob(line["model"], shape, line["policies"], 1 if self.options.dry_run else 3, steps)
            line |= child.run_child("benchmarks.gpu.plan_run", job, self.remaining, child.environment(self.on_device))
        self.rows.append(line)
        self.save()

    def save(self) -> dict[str, Any]:
        """Write everything known so far."""
        result = {
            "provenance": self.provenance,
            "jax_environment": self.on_device,
            "calibration": self.calibration,
            "models": {model: judged([row for row in self.rows if row["model"] == model]) for model in MODELS},
            "rows": self.rows,
        }
        write_json(self.options.output / "plans.json", result)
        return result


def judged(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """How well the estimates rank what was measured, before and after the calibration, and whether a plan lost.

    >>> times = [(1.0, 2.0), (2.0, 3.0), (3.0, 5.0)]
    >>> rows = [{"kind": "named", "policy": str(a), "estimated_seconds": {"nominal": a}, "step_seconds": b} for a, b in times]
    >>> judged(rows)["rank_correlation"]
    {'nominal': 1.0}
    """
    ran = [row for row in rows if "step_seconds" in row]
    return {"rank_correlation": _correlations(ran), "slower": _slower(ran), "over_budget": _over_budget(ran)}


def _correlations(ran: Sequence[dict[str, Any]]) -> dict[str, float]:
    from scipy.stats import spearmanr

    if len(ran) < 3:
        return {}
    measured = [row["step_seconds"] for row in ran]
    found = {}
    for key in ran[0]["estimated_seconds"]:
        value = float(spearmanr([row["estimated_seconds"][key] for row in ran], measured).statistic)
        found[key] = value if math.isfinite(value) else 0.0
    return found


def _slower(ran: Sequence[dict[str, Any]]) -> list[str]:
    """The plans that a named policy within the same budget beats by more than 2 %, as measured."""
    lost = []
    for plan in (row for row in ran if row["kind"] == "plan"):
        able = [row for row in ran if row["kind"] == "named" and row["device_bytes"] <= plan["budget"]]
        best = min(able, key=lambda row: row["step_seconds"], default=None)
        if best is not None and plan["step_seconds"] > 1.02 * best["step_seconds"]:
            lost.append(f"{plan['policy']}: {best['policy']} is faster")
    return lost


def _over_budget(ran: Sequence[dict[str, Any]]) -> list[str]:
    """The plans whose measured peak is over their budget."""
    plans = [row for row in ran if row["kind"] == "plan" and row.get("measured_peak_bytes") is not None]
    return [row["policy"] for row in plans if row["measured_peak_bytes"] > row["budget"]]


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows in plain text."""
    columns = ("model, policy", "budget GB", "predicted GB", "peak GB", "nominal ms", "calibrated ms", "measured ms")
    lines = []
    for row in rows:
        estimated = row.get("estimated_seconds", {})
        cells = [_number(row.get(key), 1e-9) for key in ("budget", "device_bytes", "measured_peak_bytes")]
        cells += [
            _number(value, 1e3) for value in (estimated.get("nominal"), estimated.get("calibrated"), row.get("step_seconds"))
        ]
        lines.append((f"{row['model']}, {row['policy']}", *cells))
    return text_table(columns, lines)


def _number(value: float | None, scale: float) -> str:
    return "" if value is None else f"{value * scale:.2f}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; 0 when no plan lost or needed more than its budget and every row ran, 1 otherwise, 2 for bad usage."""
    options = parse(arguments)
    if not options.dry_run and not gpus():
        print("nvidia-smi finds no NVIDIA GPU here: run with --dry-run to try everything on the CPU", file=sys.stderr)
        return 2
    os.environ.update(ON_CPU)  # this process only looks on
    with tempfile.TemporaryDirectory(prefix="remat_jax_plans_") as folder:
        run = Run(options, Path(folder))
        run.go()
        result = run.save()
    print(f"\n{os.fspath(options.output / 'plans.json')}\n{table(run.rows)}")
    for model, found in result["models"].items():
        if found["rank_correlation"]:
            told = ", ".join(f"{key} {value:.3f}" for key, value in found["rank_correlation"].items())
            print(f"{model}: rank correlation of estimated and measured time: {told}")
        for problem in (*found["slower"], *(f"{one}: peak over its budget" for one in found["over_budget"])):
            print(f"{model}: {problem}")
    for row in run.rows:
        if problem := row.get("error") or row.get("refused"):
            print(f"{row['model']}, {row['policy']}: {problem}")
    unrun = [row for row in run.rows if "error" in row or (row["kind"] == "plan" and "step_seconds" not in row)]
    failed = bool(run.crashed or unrun or not run.rows)
    lost = any(found["slower"] or found["over_budget"] for found in result["models"].values())
    return 1 if failed or (lost and not options.dry_run) else 0


if __name__ == "__main__":
    sys.exit(main())
