"""`python -m benchmarks`: compares `rj.remat` with Flax's and JAX's checkpoints, and plans with PyTorch's budgets, on a CPU."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.record import ROOT, provenance, write_json


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "--output", type=Path, default=ROOT / "build" / "benchmarks", help="folder for cpu.json and plan_torch.json"
    )
    parser.add_argument(
        "--only", default="", metavar="TEXT", help="only settings with this in their name, such as scan; no plans"
    )
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure every setting and print the tables; return 1 if remat_jax costs more than peers or PyTorch, 2 if none matches."""
    options = parse(arguments)
    os.environ["JAX_PLATFORMS"] = "cpu"
    from benchmarks import cpu, peers  # after the platform is chosen

    settings = [setting for setting in peers.SETTINGS if options.only in str(setting)]
    if not settings:
        print(f"--only {options.only}: no setting has this in its name: {', '.join(map(str, peers.SETTINGS))}", file=sys.stderr)
        return 2
    groups, problems = [], []
    for setting in settings:
        group = cpu.measure(setting, list(peers.contenders(setting)), lambda line: print(line, file=sys.stderr, flush=True))
        groups.append(group)
        problems += [problem for row in group for problem in cpu.problems(row, group[0])]
        rows = [dataclasses.asdict(row) | {"ratios": cpu.ratios(row, group[0])} for group in groups for row in group]
        write_json(options.output / "cpu.json", {"provenance": provenance(), "problems": problems, "rows": rows})
    print(cpu.table(groups))
    print("\n".join(problems) or "The same FLOPs and no more memory than by hand.")
    return max(1 if problems else 0, 0 if options.only else _plans(options.output))


def _plans(output: Path) -> int:
    if importlib.util.find_spec("torch") is None:
        print("PyTorch is not installed: plans are not compared with its own", file=sys.stderr)
        return 0
    from benchmarks import plan_torch

    return plan_torch.main(["--output", str(output)])


if __name__ == "__main__":
    sys.exit(main())
