"""`python -m benchmarks.plan`: do plans keep their promise, and are they better than the policies that people use?

For each workload and budget it checks three claims. The compiled plan is within the budget. No further residual that makes the
step faster could be saved as well. By the compiled schedules, no named policy and no policy of MaxText's that fits is faster by
more than the estimate's error. The exit status is 1 if a claim fails.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.plan import claims, compiled
from benchmarks.plan.rivals import Rival, rivals
from benchmarks.plan.rows import budgets, row
from benchmarks.plan.workloads import CASES
from benchmarks.record import ROOT, provenance, write_json
from remat_jax import compat
from remat_jax.planning.problem import describe
from remat_jax.report.tables import format_bytes

SHORT, SHORT_SHARES = ("mlp", "scanned"), (0.0, 0.5, 1.0)
SHARES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plan", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, default=ROOT / "build" / "benchmarks", help="folder for plan.json")
    parser.add_argument("--all", action="store_true", help=f"all six workloads and budgets, not {' and '.join(SHORT)} at three")
    parser.add_argument("--only", choices=CASES, action="append", help="one of the workloads; may be given again")
    parser.add_argument(
        "--shares", type=float, nargs="+", help="budgets, as shares of the way from the step of least memory to `off`"
    )
    parser.add_argument("--layers", type=int, default=6, help="of each tower")
    parser.add_argument("--target", default="h200")
    parser.add_argument("--resume", action="store_true", help="keep the rows of plan.json, if of the same commit and sizes")
    parser.add_argument("--show", type=Path, nargs="+", metavar="FILE", help="measure nothing: print the rows of these files")
    options = parser.parse_args(arguments)
    options.only = options.only or list(CASES if options.all else SHORT)
    options.shares = options.shares or list(SHARES if options.all else SHORT_SHARES)
    if options.layers < 2 or not all(0 <= share <= 1 for share in options.shares):
        parser.error("--layers must be 2 or more, --shares from 0 to 1")
    return options


class Record:
    """The measured rows, written to a file after every row."""

    def __init__(self, path: Path, options: argparse.Namespace) -> None:
        self.path = path
        self.data: dict[str, Any] = {
            "provenance": provenance(),
            "target": options.target,
            "layers": options.layers,
            "workloads": {},
            "rows": [],
        }
        if options.resume and path.exists():
            self._continue(json.loads(path.read_text(encoding="utf-8")))

    def _continue(self, old: dict[str, Any]) -> None:
        def made_with(data: dict[str, Any]) -> tuple[Any, ...]:
            kept = data["provenance"]
            return kept["commit"], kept["versions"], kept["environment"], data["target"], data["layers"]

        commit = self.data["provenance"]["commit"]
        # The changes of a modified tree are unknown.
        if commit and not commit.endswith("+") and made_with(old) == made_with(self.data):
            self.data |= {"workloads": old["workloads"], "rows": old["rows"]}

    @property
    def rows(self) -> list[dict[str, Any]]:
        """All rows so far."""
        rows: list[dict[str, Any]] = self.data["rows"]
        return rows

    def has(self, workload: str, budget: int) -> bool:
        """Whether this row was measured."""
        return any(row["workload"] == workload and row["budget"] == budget for row in self.rows)

    def add(self, measured: dict[str, Any]) -> None:
        """Add a row."""
        self.rows.append(measured)
        self.write()

    def write(self) -> None:
        """Write the file, with the claims that fail so far."""
        self.data["failures"] = claims.failures(self.rows)
        write_json(self.path, self.data)


def run(name: str, options: argparse.Namespace, record: Record) -> None:
    """Measure all rows of one workload."""
    case = CASES[name](options.layers)
    begin, workload = time.perf_counter(), case.workload.name
    described = describe(case.workload, options.target)
    others = known_rivals(record, workload) or rivals(case, described, options.target)
    asked = budgets(case, options.target, options.shares)
    record.data["workloads"][workload] = {"budgets": asked, "rivals": [rival.to_dict() for rival in others]}
    record.write()
    tell(f"{workload}: {len(others)} policies, {format_bytes(asked[0])} to {format_bytes(asked[-1])}", begin)
    for budget in asked:
        if record.has(workload, budget):
            continue
        begin = time.perf_counter()
        measured = row(case, described, budget, options.target, others)
        record.add(measured)
        tell(f"{workload} in {format_bytes(budget)}: {'; '.join(claims.broken(measured)) or 'holds'}", begin)


def known_rivals(record: Record, workload: str) -> list[Rival]:
    """The workload's rivals in the record; empty if none was measured."""
    kept = record.data["workloads"].get(workload, {"rivals": []})["rivals"]
    return [Rival(**fields | {"names": tuple(fields["names"])}) for fields in kept]


def tell(text: str, begin: float) -> None:
    print(f"{text} ({time.perf_counter() - begin:.0f} s)", file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the table and the failed claims; 1 if a claim fails."""
    options = parse(arguments)
    compat.keep_to_cpu_without_gpu()
    if options.show:
        return say([json.loads(path.read_text(encoding="utf-8")) for path in options.show])
    record = Record(options.output / "plan.json", options)
    for name in options.only:
        run(name, options, record)
    return say([record.data])


def say(records: Sequence[dict[str, Any]]) -> int:
    """Print the rows of all records in one table, and the failed claims."""
    # If two records have the same budget, the later row counts.
    rows = [*{(row["workload"], row["budget"]): row for data in records for row in data["rows"]}.values()]
    made = {f"{data['target']}, {data['layers']} layers, JAX {data['provenance']['versions']['jax']}" for data in records}
    print(f"Plans for {' and '.join(sorted(made))}; times are of the compiled schedules:")
    print(claims.table(rows))
    print(claims.summary(rows))
    print(
        compiled.summary(rows, {name: workload["rivals"] for data in records for name, workload in data["workloads"].items()})
    )
    failures = claims.failures(rows)
    print("\n".join(["Does not hold:", *failures]) if failures else "All claims hold.")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
