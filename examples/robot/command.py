"""The command line of `examples/pi0.py`: train every form, then a table or JSON."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict

from remat_jax.compat import keep_to_cpu_without_gpu
from remat_jax.parity import TOLERANCES
from remat_jax.report.tables import format_bytes, format_error, render, table

from ..models.pi0_config import Pi0Config
from . import training
from .data import batches

HELD_OUT = 64
COLUMNS = ("framework", "form", "loss before", "loss after", "off plain by", "device", "host", "matmuls", "layer runs")
LEGEND = (
    "Loss before and after: of 64 observations that are not trained on. Off plain by: the largest relative difference of a\n"
    "step's loss from plain PyTorch's, in float64. Device, host: kept between the passes. Layer runs: executions of a joint\n"
    "layer and of a layer of the tower in one step."
)


def main(arguments: list[str] | None = None) -> int:
    """Print the table, or with `--json` one JSON object; the exit status is 0, 1 if a form fails, 2 for bad usage."""
    parser = argparse.ArgumentParser(prog="pi0.py", description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=40, help="steps of training (default 40)")
    parser.add_argument("--batch", type=int, default=16, help="observations of a step (default 16)")
    parser.add_argument("--adaptive", action="store_true", help="π0.5 instead of π0")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    options = parser.parse_args(arguments)
    for name in ("steps", "batch"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} {getattr(options, name)}: expected at least 1")
    keep_to_cpu_without_gpu()
    config = Pi0Config(adaptive=options.adaptive)
    data, held_out = batches(config, 0, options.batch, options.steps), batches(config, 1, HELD_OUT, 1)[0]
    rows = training.run_all(config, data, held_out, lambda line: print(line, file=sys.stderr, flush=True))
    failed = problems(rows)
    if options.json:
        print(json.dumps({"steps": options.steps, "rows": [asdict(row) for row in rows], "failed": failed}))
        return 1 if failed else 0
    name = "π0.5" if options.adaptive else "π0"
    print(render(_table(f"{name}, {options.steps} steps of {options.batch} observations", rows)), LEGEND, sep="\n\n")
    print("\nWhat the doctor says:", *(f"• {line}" for line in training.diagnose(config, data[0])), sep="\n")
    print("", *(f"NOT AS EXPECTED: {one}" for one in failed), "NOT PASSED" if failed else "PASSED", sep="\n")
    return 1 if failed else 0


def problems(rows: list[training.Row]) -> list[str]:
    """The failures of the forms: a form that differs from plain PyTorch, or has not learnt."""
    limit = TOLERANCES["float64_step"].value
    wrong = [f"{row.framework} {row.form} is {row.difference:.1e} off" for row in rows if not row.difference <= limit]
    wrong += [
        f"{row.framework} {row.form}: the loss goes from {row.held_out[0]:.3f} to {row.held_out[1]:.3f} only"
        for row in rows
        if not row.has_learnt
    ]
    return wrong


def _table(title: str, rows: list[training.Row]) -> object:
    written = [
        (
            row.framework,
            row.form,
            f"{row.held_out[0]:.4f}",
            f"{row.held_out[1]:.4f}",
            row.difference,
            row.device_bytes,
            row.host_bytes,
            row.matmuls,
            "" if row.layer_runs is None else " and ".join(map(str, row.layer_runs)),
        )
        for row in rows
    ]
    formats = {"device": format_bytes, "host": format_bytes, "off plain by": format_error}
    return table(title, COLUMNS, written, formats=formats)
