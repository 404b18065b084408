"""`python -m benchmarks.gpu.modes --output DIR`: every mode and policy on this machine's GPU, with the gradients compared.

The result, `DIR/modes.json`, is rewritten after every row, so a killed run keeps its rows.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu import child
from benchmarks.gpu.job import SMALL, Job, Size, make_weights, save_arrays
from benchmarks.gpu.rows import ORDER, Case, Row, relate, table
from benchmarks.record import ROOT, gpus, provenance, write_json

MODULES = {"jax": "benchmarks.gpu.jax_run", "torch": "benchmarks.gpu.torch_run"}
# `peak_bytes_in_use` counts used memory, with or without preallocation. Without preallocation a second process can use the
# GPU. JAX's limit, three quarters of the memory by default, is the share that XLA takes as available on a described GPU
# (`remat_jax/memory/compile/options.py`): XLA rematerialises to stay below it. Scanned offload is right on GPUs
# from JAX 0.11.1 on, and wrong in 0.10.2 and 0.11.0 (openxla/xla#46231): the column of gradient errors shows it.
JAX_ON_GPU = {
    "JAX_PLATFORMS": "cuda",
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.80",
    "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB": "96",
    "TF_CPP_MIN_LOG_LEVEL": "1",
}
ON_CPU = {"JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "1"}
RESERVE_SECONDS = 8.0  # for the last row's file and table


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line; size options override the full or the small size."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.modes", description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=ROOT / "build" / "benchmarks", help="folder for modes.json")
    parser.add_argument("--seconds", type=float, default=540.0, help="budget of time; rows that do not fit are skipped")
    parser.add_argument("--steps", type=int, default=None, help="timed steps per row (default 10)")
    parser.add_argument("--only", type=cases, default=ORDER, metavar="CASE,…", help="cases such as jax/scan/offload")
    parser.add_argument("--no-predict", action="store_true", help="leave out what rj.measure says beforehand")
    parser.add_argument("--dry-run", action="store_true", help="everything at a tiny size on the CPU")
    parser.add_argument("--show", type=Path, metavar="FILE", help="print the rows of a modes.json, and run nothing")
    parser.add_argument("--commit", help="the commit of the sources, where there is no git history beside them")
    for field in dataclasses.fields(Size):
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=type(field.default), help=f"{field.default}")
    options = parser.parse_args(arguments)
    if options.seconds <= 0 or (options.steps is not None and options.steps < 1):
        parser.error("--seconds and --steps must be positive")
    if options.dtype not in (None, "bfloat16", "float32", "float64"):
        parser.error(f"--dtype {options.dtype}: expected bfloat16, float32 or float64")
    base = SMALL if options.dry_run else Size()
    given = {field.name: getattr(options, field.name) for field in dataclasses.fields(Size)}
    options.size = dataclasses.replace(base, **{name: value for name, value in given.items() if value is not None})
    return options


def cases(text: str) -> tuple[Case, ...]:
    """The cases of a comma-separated list, in the order of the run."""
    try:
        wanted = {Case.parse(each) for each in text.split(",")}
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return tuple(case for case in ORDER if case in wanted)


class Run:
    """One run of the benchmark: its options, the folder through which its processes exchange files, its rows."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.options, self.folder = options, folder
        self.ends = time.monotonic() + options.seconds
        self.rows = [Row(case.framework, case.form, case.mode) for case in options.only]
        self.provenance = provenance(options.commit)
        self.device = "cpu" if options.dry_run else "cuda"
        self.predictor: subprocess.Popen[bytes] | None = None
        self.predictions = folder / "predictions.jsonl"
        self.predictions.touch()

    @property
    def remaining(self) -> float:
        """The remaining seconds."""
        return self.ends - RESERVE_SECONDS - time.monotonic()

    def job(self, case: Case) -> Job:
        """The job of one row; compared with its reference if that has run."""
        there = case.reference is not None and (self.folder / gradients_file(case.reference)).exists()
        return Job(
            self.options.size,
            case.form,
            case.mode,
            str(self.folder),
            reference=gradients_file(case.reference) if there else None,
            keep_gradients=gradients_file(case) if case.is_reference else None,
            device=self.device,
            warm_up=1 if self.options.dry_run else 3,
            steps=self.options.steps or (2 if self.options.dry_run else 10),
        )

    def environment(self, framework: str) -> dict[str, str]:
        """The environment variables that a child gets besides this process's."""
        if framework == "torch" or self.device == "cpu":
            return ON_CPU  # the PyTorch child imports JAX only for the weight map
        # Autotuning results are shared between the rows: less time, and the same kernels in every mode.
        return {**JAX_ON_GPU, "JAX_COMPILATION_CACHE_DIR": str(self.folder / "xla")}

    def start_predictor(self) -> None:
        """Start the process that predicts the rows, in their order, at low priority while they run."""
        wanted = [f"{row.form}/{row.mode}" for row in self.rows if row.framework == "jax"]
        if self.options.no_predict or not wanted:
            return
        command = [sys.executable, "-m", "benchmarks.gpu.predict", self.job(ORDER[0]).to_json(), str(self.predictions)]
        self.predictor = subprocess.Popen(
            ["nice", *command, *wanted],
            cwd=ROOT,
            env=child.environment(ON_CPU),
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )

    def measure(self, row: Row) -> None:
        """Run one row, or skip it if no time is left."""
        if self.remaining <= 0:
            return
        started, job = time.monotonic(), self.job(row.case)
        print(f"{row.case} … ({self.remaining:.0f} s left)", file=sys.stderr, flush=True)
        row.gradient_reference = str(row.case.reference) if job.reference else None
        answer = child.run_child(MODULES[row.framework], job, self.remaining, self.environment(row.framework))
        row.take(answer, self.options.size.tokens)
        row.wall_seconds = time.monotonic() - started

    def save(self) -> dict[str, Any]:
        """Write all rows so far."""
        predicted = {f"jax/{answer.pop('case')}": answer for answer in child.read_lines(self.predictions)}
        for row in self.rows:
            row.foretell(predicted.get(str(row.case), {}))
        relate(self.rows)
        result = {
            "provenance": self.provenance,
            "size": dataclasses.asdict(self.options.size),
            "device": self.device,
            "jax_environment": named(self.environment("jax")),
            "rows": [dataclasses.asdict(row) for row in self.rows],
        }
        write_json(self.options.output / "modes.json", result)
        return result

    def go(self) -> None:
        """Run every row, then wait for the predictions while there is time."""
        try:
            self.start_predictor()
            save_arrays(self.folder / "weights.npz", make_weights(self.options.size))
            for row in self.rows:
                self.measure(row)
                self.save()
            if self.predictor is not None and self.remaining > 0:
                self.predictor.wait(self.remaining)
        except subprocess.TimeoutExpired:
            print("some predictions are missing: no time was left", file=sys.stderr)
        finally:
            if self.predictor is not None and self.predictor.poll() is None:
                child.stop(self.predictor)
            self.save()


def named(environment: dict[str, str]) -> dict[str, str]:
    """The environment of JAX's processes, of a path the last part."""
    return {name: Path(value).name if value.startswith("/") else value for name, value in environment.items()}


def gradients_file(case: Case) -> str:
    """The file with the gradients of a reference case."""
    return f"gradients-{str(case).replace('/', '-')}.npz"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; 0 if every row that ran holds, 1 otherwise, 2 for bad usage."""
    options = parse(arguments)
    if options.show:
        stored = json.loads(options.show.read_text(encoding="utf-8"))["rows"]
        print(table([row for row in (Row(**fields) for fields in stored) if row.status == "done"]))
        return 0
    if not options.dry_run and not gpus():
        print("nvidia-smi finds no NVIDIA GPU here: run with --dry-run to try everything on the CPU", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="remat_jax_bench_") as folder:
        run = Run(options, Path(folder))
        run.go()
    print(f"\n{dataclasses.asdict(options.size)}, {os.fspath(options.output / 'modes.json')}")
    print(table(run.rows))
    return 0 if all(row.holds for row in run.rows) else 1


if __name__ == "__main__":
    sys.exit(main())
