"""`python -m benchmarks.true_shapes`: published models at their true sizes, compiled for cards of 80 and of 141 GB.

All parameters of π0 are trained; Qwen-Image, Qwen-Image-Edit and Wan 14B are frozen, with trained adapters. For each model the
table has the memory of the modes, of a named policy, and of the plan for the card. The exit status is 1 if a plan does not fit,
if a policy that fits is faster by the estimate, if no plan was found although a policy fits, or if no plan was asked for. No
GPU is needed. A plan takes some minutes and everything takes hours; `--resume` continues an interrupted run. Without `--all` it
measures π0 for 80 GB: `full`, `offload_inputs` and the plan.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.record import ROOT, provenance, write_json
from benchmarks.true_shapes import claims
from benchmarks.true_shapes.cases import CASES, compiling
from benchmarks.true_shapes.rows import PLAN, Card, Row, row
from remat_jax import compat
from remat_jax.errors import PlanningError, PolicyError, TargetError
from remat_jax.policy import as_block_policy
from remat_jax.report.tables import format_bytes

# Machines with eight cards of either kind have 2 TB of host memory.
TARGETS = ("h100=80GB+256GB", "h200=141GB+256GB")
POLICIES = ("full", "offload_inputs", PLAN, "dots_with_no_batch_dims", "off")
SHORT, SHORT_TARGETS, SHORT_POLICIES = ("pi0",), TARGETS[:1], POLICIES[:3]


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.true_shapes", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, default=ROOT / "build" / "benchmarks", help="folder for true_shapes.json")
    parser.add_argument("--all", action="store_true", help=f"all workloads for {' '.join(TARGETS)}: {' '.join(POLICIES)}")
    parser.add_argument("--only", choices=CASES, action="append", help="one of the workloads; may be given again")
    parser.add_argument("--targets", nargs="+", metavar="TARGET=BUDGET[+HOST]", help="such as h100=80GB+256GB")
    parser.add_argument("--policies", nargs="+", help=f"policies, or {PLAN}")
    parser.add_argument("--resume", action="store_true", help="keep the rows of true_shapes.json, if of the same commit")
    parser.add_argument("--show", type=Path, nargs="+", metavar="FILE", help="measure nothing: print the rows of these files")
    options = parser.parse_args(arguments)
    options.only = options.only or list(CASES if options.all else SHORT)
    options.targets = options.targets or (TARGETS if options.all else SHORT_TARGETS)
    options.policies = options.policies or (POLICIES if options.all else SHORT_POLICIES)
    try:
        options.cards = list(dict.fromkeys(map(Card.from_text, options.targets)))
        for name in set(options.policies) - {PLAN}:
            as_block_policy(name)
    except (PlanningError, PolicyError, TargetError) as error:
        parser.error(str(error))
    return options


class Record:
    """The measured rows, written to a file after every row."""

    def __init__(self, path: Path, *, resume: bool) -> None:
        self.path = path
        self.data: dict[str, Any] = {"provenance": provenance(), "rows": []}
        if resume and path.exists():
            old = json.loads(path.read_text(encoding="utf-8"))
            if all(old["provenance"][key] == self.data["provenance"][key] for key in ("commit", "versions")):
                self.data["rows"] = old["rows"]

    def has(self, workload: str, policy: str, card: Card) -> bool:
        """Whether this row was measured."""
        return any(_key(row) == (workload, *card, policy) for row in self.data["rows"])

    def add(self, measured: Row) -> None:
        """Add a row, and update the failed claims."""
        self.data["rows"].append(measured)
        self.data["failures"] = claims.failures(self.data["rows"])
        write_json(self.path, self.data)


def _key(row: Row) -> tuple[Any, ...]:
    return row["workload"], row["target"], row["budget"], row["host_budget"], row["policy"]


def _places(key: tuple[Any, ...], orders: Sequence[list[Any]]) -> list[int]:
    return [order.index(part) for order, part in zip(orders, (key[0], key[1:4], key[4]), strict=True)]


def run(name: str, card: Card, options: argparse.Namespace, record: Record) -> None:
    """Measure all rows of one workload for one target."""
    case = CASES[name]
    work = case.make()
    for policy in options.policies:
        if record.has(work.name, policy, card):
            continue
        with compiling(case.flags) as flags:
            measured = row(work, policy, card)
        record.add(measured | {"trained": case.trained, "flags": flags})
        summary = (
            format_bytes(measured["device_bytes"]) if "device_bytes" in measured else measured.get("error", "nothing fits")
        )
        print(
            f"{work.name}, {card.target}, {policy}: {summary} ({measured['wall_seconds']:.0f} s)", file=sys.stderr, flush=True
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the table and the failed claims; 1 if a claim fails."""
    options = parse(arguments)
    compat.keep_to_cpu_without_gpu()
    if options.show:
        return say([json.loads(path.read_text(encoding="utf-8")) for path in options.show])
    record = Record(options.output / "true_shapes.json", resume=options.resume)
    for card in options.cards:
        for name in options.only:
            run(name, card, options, record)
    return say([record.data])


def say(records: Sequence[dict[str, Any]]) -> int:
    """Print the rows of all records in one table, and the failed claims."""
    # If two records have the same row, the later one counts.
    by_key = {_key(row): row for data in records for row in data["rows"]}
    # By workload, card and policy, each in the order of its first appearance.
    orders = [list(dict.fromkeys(places)) for places in zip(*((key[0], key[1:4], key[4]) for key in by_key), strict=True)]
    rows = [by_key[key] for key in sorted(by_key, key=lambda key: _places(key, orders))]
    versions = sorted({data["provenance"]["versions"]["jax"] for data in records})
    print(f"One training step, gigabytes (10⁹), JAX {' and '.join(versions)}; times are estimates:")
    print(claims.table(rows))
    print("".join(f"{line}\n" for line in claims.held(rows)), end="")
    text, status = claims.verdict(rows)
    print(text)
    return status


if __name__ == "__main__":
    sys.exit(main())
