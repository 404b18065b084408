"""`python -m benchmarks.gpu --output DIR`: sixteen steps on this machine's GPU, estimated and measured, within nine minutes.

The device is calibrated first. Then the steps run: a deep MLP and the decoder, unrolled and scanned, under policies with and
without offload and under plans. PyTorch's decoder runs without checkpoints, with them, and with pinned offload. The table
compares time and the allocator's peak with the estimates. `DIR/gpu.json` is rewritten after every row, so an interrupted run
keeps its rows. `DIR/kernels` has each step's compiled module and kernels, for `python -m benchmarks.gpu.kernels`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu import child, judge
from benchmarks.gpu.job import Job, Size, make_weights, save_arrays
from benchmarks.gpu.modes import JAX_ON_GPU, ON_CPU, named
from benchmarks.record import ROOT, gpus, provenance, write_json

CALIBRATED = "calibrated.toml"
SECONDS = 530.0
RESERVE_SECONDS = 8.0
"""Seconds reserved to write the last row's file and to print the table."""


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, default=ROOT / "build" / "benchmarks", help="folder for gpu.json")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="the one deadline; what does not fit is left out")
    parser.add_argument("--steps", type=int, default=10, help="timed steps per row")
    parser.add_argument("--only", nargs="+", metavar="MODEL", help="of scanned, unrolled, mlp and torch")
    parser.add_argument("--predicted", type=Path, metavar="FILE", help="estimates that step_predict made before: run its steps")
    parser.add_argument("--dry-run", action="store_true", help="everything at a tiny size on the CPU")
    parser.add_argument("--show", type=Path, metavar="FILE", help="print the steps of a gpu.json as a table, and run nothing")
    parser.add_argument("--errors", action="store_true", help="with --show: print the estimates' errors instead")
    parser.add_argument("--commit", help="the commit of the sources, where there is no git history beside them")
    options = parser.parse_args(arguments)
    if not options.seconds > 0 or options.steps < 1:
        parser.error("--seconds and --steps must be positive")
    models = {"scanned", "unrolled", "mlp", "torch"}
    if unknown := set(options.only or models) - models:
        parser.error(f"--only {' '.join(sorted(unknown))}: choose from {', '.join(sorted(models))}")
    options.only = options.only or sorted(models)
    return options


class Run:
    """One run: its options, the folder through which its processes exchange files, its rows."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        from benchmarks.gpu.steps import LARGE, ORDER, PEERS, TINY

        self.options, self.folder = options, folder
        self.ends = time.monotonic() + options.seconds
        self.shapes = TINY if options.dry_run else LARGE
        self.steps = [step for step in ORDER if step[0] in options.only]
        self.peers = PEERS if "torch" in options.only else ()
        self.rows: list[dict[str, Any]] = []
        self.provenance = provenance(options.commit)
        self.on_device = ON_CPU if options.dry_run else JAX_ON_GPU | {"JAX_COMPILATION_CACHE_DIR": str(folder / "xla")}
        self.calibration = ""
        self.told: Path = options.predicted or folder / "predicted.jsonl"
        if options.predicted:
            self.steps = [
                (line["model"], line["policy"]) for line in child.read_lines(self.told) if line["model"] in options.only
            ]
        else:
            self.told.touch()

    @property
    def remaining(self) -> float:
        """The remaining seconds."""
        return self.ends - RESERVE_SECONDS - time.monotonic()

    def go(self) -> None:
        """Calibrate, start the predictor, run PyTorch meanwhile, then each step as soon as it is predicted.

        Steps that were predicted before need no calibration.
        """
        predictor = None
        if not self.options.predicted:
            self.calibrate()
            predictor = self.start_predictor()
        try:
            self.run_peers()
            self.run_steps(predictor)
        finally:
            if predictor is not None and predictor.poll() is None:
                child.stop(predictor)
            self.save()

    def calibrate(self) -> None:
        """Measure the device's rates with `remat-jax calibrate`."""
        seconds = "2" if self.options.dry_run else "20"
        command = [sys.executable, "-m", "remat_jax.cli", "calibrate", "--output", str(self.folder / CALIBRATED)]
        subprocess.run(
            [*command, "--seconds", seconds],
            cwd=ROOT,
            env=child.environment(self.on_device),
            check=True,
            stdout=subprocess.DEVNULL,
            timeout=max(1.0, self.remaining),
        )
        self.calibration = (self.folder / CALIBRATED).read_text(encoding="utf-8")

    def start_predictor(self) -> subprocess.Popen[bytes]:
        """Start the process that predicts the steps, at low priority while the device works."""
        request = {
            "steps": self.steps,
            "shapes": {model: dataclasses.asdict(shape) for model, shape in self.shapes.items()},
            "targets": {"nominal": self.nominal(), "calibrated": f"{self.folder / CALIBRATED}:measured"},
        }
        command = [sys.executable, "-m", "benchmarks.gpu.step_predict", json.dumps(request), str(self.told)]
        return subprocess.Popen(["nice", *command], cwd=ROOT, env=child.environment(ON_CPU), start_new_session=True)

    def nominal(self) -> str:
        """The target with nominal rates: the GPU that the driver names, or an H200 if it names none."""
        from remat_jax.hardware import target

        if self.options.dry_run:
            return "cpu"
        name = next((gpu["name"] for gpu in gpus()), None)
        return "h200" if name is None else target(name).name

    def run_peers(self) -> None:
        """Run PyTorch's decoder, with the shape of the unrolled one, in its modes."""
        if not self.peers:
            return
        shape = self.shapes["unrolled"]
        heads, dtype = max(2, shape.width // 128), "float32" if self.options.dry_run else "bfloat16"
        size = Size(shape.layers, shape.width, heads, shape.batch, shape.length, dtype)
        save_arrays(self.folder / "weights.npz", make_weights(size))
        for mode in self.peers:
            device = "cpu" if self.options.dry_run else "cuda"
            job = Job(size, "eager", mode, str(self.folder), device=device, warm_up=self.warm_up, steps=self.timed)
            self.measure({"model": "torch", "policy": mode}, "benchmarks.gpu.torch_run", job, ON_CPU)

    def run_steps(self, predictor: subprocess.Popen[bytes] | None) -> None:
        """Run each step once it is predicted. If the predictor ended early, only plans are left out."""
        from benchmarks.gpu.steps import StepJob

        waiting = list(self.steps)
        while waiting and self.remaining > 0:
            ended = predictor is None or predictor.poll() is not None
            predicted = {(line["model"], line["policy"]): line for line in child.read_lines(self.told)}
            ready = next((step for step in waiting if step in predicted), None)
            if ready is None:
                if ended:
                    break
                time.sleep(0.2)
                continue
            waiting.remove(ready)
            line = predicted[ready]
            if "refused" in line:
                self.keep(line)
                continue
            shape, options = self.shapes[ready[0]], line.get("compiler_options", {})
            kernels = os.fspath(self.options.output.absolute() / "kernels" / f"{'-'.join(ready)}.json.gz")
            job = StepJob(ready[0], shape, line["policies"], options, self.warm_up, self.timed, kernels)
            self.measure(line, "benchmarks.gpu.step_run", job, self.on_device)
        for model, policy in waiting:
            self.keep({"model": model, "policy": policy, "error": "not reached in time"})

    @property
    def warm_up(self) -> int:
        return 1 if self.options.dry_run else 3

    @property
    def timed(self) -> int:
        return 2 if self.options.dry_run else int(self.options.steps)

    def measure(self, line: dict[str, Any], module: str, job: Any, environment: dict[str, str]) -> None:
        """Run one row in its own process, and store its figures with the predicted figures."""
        if self.remaining <= 0:
            self.keep(line | {"error": "not reached in time"})
            return
        print(f"{line['model']}, {line['policy']} … ({self.remaining:.0f} s left)", file=sys.stderr, flush=True)
        answer = child.run_child(module, job, self.remaining, child.environment(environment))
        if answer.get("seconds"):
            answer["step_seconds"] = statistics.median(answer["seconds"])
        self.keep(line | answer)

    def keep(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        self.save()

    def save(self) -> dict[str, Any]:
        """Write all rows so far."""
        result = {
            "provenance": self.provenance,
            "jax_environment": named(self.on_device),
            "calibration": self.calibration,
            "shapes": {model: dataclasses.asdict(shape) for model, shape in self.shapes.items()},
            "judged": judge.judged(self.rows),
            "rows": self.rows,
        }
        write_json(self.options.output / "gpu.json", result)
        return result


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; 0 if every row ran and no plan lost or exceeded its budget, 1 otherwise, 2 for bad usage."""
    options = parse(arguments)
    if options.show:
        rows = json.loads(options.show.read_text(encoding="utf-8"))["rows"]
        print(judge.errors_markdown(judge.judged(rows)) if options.errors else judge.markdown(rows))
        return 0
    if not options.dry_run and not gpus():
        print("nvidia-smi finds no NVIDIA GPU here: run with --dry-run to try everything on the CPU", file=sys.stderr)
        return 2
    os.environ.update(ON_CPU)  # this process only supervises
    with tempfile.TemporaryDirectory(prefix="remat_jax_gpu_") as folder:
        run = Run(options, Path(folder))
        run.go()
        judged = run.save()["judged"]
    print(f"\n{os.fspath(options.output / 'gpu.json')}\n{judge.table(run.rows)}")
    for name in ("rank_correlation", "ratio_error", "seconds_error"):
        shown = ", ".join(f"{key} {value:.3f}" for key, value in judged[name].items())
        print(f"{name.replace('_', ' ')}: {shown or 'not known'}")
    lost = [*judged["slower"], *(f"{one}: peak over its budget" for one in judged["over_budget"])]
    failed = [
        f"{row['model']}, {row['policy']}: {problem}" for row in run.rows if (problem := row.get("error") or row.get("refused"))
    ]
    print("\n".join([*lost, *failed]))
    return 1 if failed or not run.rows or (lost and not options.dry_run) else 0


if __name__ == "__main__":
    sys.exit(main())
