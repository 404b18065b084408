"""The command behind `examples/qwen_image.py` and `examples/wan.py`."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from typing import Any

from remat_jax.compat import keep_to_cpu_without_gpu
from remat_jax.parity import TOLERANCES
from remat_jax.report.tables import format_bytes, render, table

COLUMNS = ("framework", "mode", "first loss", "last loss", "off plain by", "device", "host", "remark")


def main(model: str, arguments: list[str] | None = None) -> int:
    """Train `model` and print the table, or one JSON object; exit status 0, 1 if losses differ, 2 for bad usage."""
    parser = argparse.ArgumentParser(
        prog=f"{model}.py",
        description="Train on parts of two photographs, in PyTorch and in JAX, in every mode, and compare the losses.",
    )
    parser.add_argument("--steps", type=int, default=30, help="steps of training (default 30)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    options = parser.parse_args(arguments)
    if options.steps < 1:
        parser.error(f"--steps {options.steps}: expected at least 1")
    keep_to_cpu_without_gpu()
    training, side = (importlib.import_module(f".{name}", __package__) for name in ("training", model))
    pair = side.pair()
    progress = lambda line: print(line, file=sys.stderr, flush=True)  # noqa: E731
    rows = training.run_all(pair, side.batches(options.steps), progress)
    if options.json:
        print(json.dumps({"model": pair.name, "steps": options.steps, "rows": rows}))
    else:
        title = f"A small {pair.name}, {options.steps} steps on photographs"
        formats = {"device": format_bytes, "host": format_bytes}
        print(render(table(title, COLUMNS, [_written(row) for row in rows], formats=formats)))
    return 0 if all(row["difference"] <= TOLERANCES["loss"].value for row in rows) else 1


def _written(row: dict[str, Any]) -> tuple[Any, ...]:
    losses = [f"{row['losses'][index]:.5f}" for index in (0, -1)]
    return (row["framework"], row["mode"], *losses, f"{row['difference']:.1e}", row["device"], row["host"], row["remark"])
