"""`python -m benchmarks.plan_again FILE …`: plans again for the budgets of recorded results, and compares.

    python -m benchmarks.plan_again benchmarks/results/2026-11-24-plans-mlp-h200-jax0.10.2.json --output build/again.json
    python -m benchmarks.plan_again --show FILE               measure nothing: print the rows of FILE

FILE is a result of `python -m benchmarks.plan`. Times are of the compiled schedules. An existing --output keeps its rows.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import remat_jax as rj
from benchmarks.figures import markdown
from benchmarks.plan.workloads import CASES
from benchmarks.record import ROOT, provenance, write_json
from remat_jax.report import format_bytes

TARGET, TIMEOUT = "h200", 1200.0


def planned(before: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """A row for each recorded budget of a result."""
    workloads = {made.workload.name: made.workload for made in (case(before["layers"]) for case in CASES.values())}
    for row in before["rows"]:
        begin = time.monotonic()
        made = rj.plan(workloads[row["workload"]], row["budget"], TARGET, timeout=TIMEOUT)
        yield {
            "workload": row["workload"],
            "budget": row["budget"],
            "before": {"seconds": row["seconds"], "compiled": len(row["tried"])},
            "seconds": made.seconds,
            "host_bytes": made.host_bytes,
            "compiled": len(made.tried),
            "wall_seconds": time.monotonic() - begin,
        }


def show(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print the rows as a table, and their sums."""
    table = []
    for row in rows:
        before, ratio = row["before"], row["seconds"] / row["before"]["seconds"]
        steps = f"{before['seconds'] * 1e3:.2f} ms", f"{row['seconds'] * 1e3:.2f} ms", f"{ratio:.3f}"
        table.append((row["workload"], format_bytes(row["budget"]), *steps, str(before["compiled"]), str(row["compiled"])))
    sums = [sum(row["before"][key] for row in rows) for key in ("seconds", "compiled")]
    now = [sum(row[key] for row in rows) for key in ("seconds", "compiled")]
    table.append(
        ("sum", "", f"{sums[0] * 1e3:.2f} ms", f"{now[0] * 1e3:.2f} ms", f"{now[0] / sums[0]:.3f}", str(sums[1]), str(now[1]))
    )
    print(markdown(["workload", "budget", "before", "today", "ratio", "compiled before", "today"], table))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="*", metavar="FILE")
    parser.add_argument("--output", type=Path, default=ROOT / "build" / "benchmarks" / "plan_again.json")
    parser.add_argument("--show", type=Path, metavar="FILE")
    options = parser.parse_args()
    if options.show:
        show(json.loads(options.show.read_text(encoding="utf-8"))["rows"])
        return
    rows = json.loads(options.output.read_text(encoding="utf-8"))["rows"] if options.output.exists() else []
    for path in options.results:
        for row in planned(json.loads(path.read_text(encoding="utf-8"))):
            rows.append(row)
            print(f"{row['workload']}: {row['wall_seconds']:.0f} s", file=sys.stderr)
            write_json(options.output, {"provenance": provenance(), "target": TARGET, "rows": rows})
    show(rows)


if __name__ == "__main__":
    main()
