"""`python -m benchmarks.plan_again FILE …`: plans again for the budgets of recorded results, and compares.

    python -m benchmarks.plan_again benchmarks/results/2026-11-24-plans-mlp-h200-jax0.10.2.json --output build/again.json
    python -m benchmarks.plan_again --show FILE               measure nothing: print the rows of FILE

FILE is a result of `python -m benchmarks.plan`. Times are of the compiled schedules. An existing --output keeps its rows. Where
today's plan is slower, the earlier plan's step is compiled again, also without Triton: today a plan has to fit with cuBLAS too.
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
from remat_jax.hardware import target
from remat_jax.memory.compile.compiler import compile_programs
from remat_jax.memory.compile.exporting import export_step
from remat_jax.memory.compile.options import WITHOUT_TRITON
from remat_jax.planning.choose_fastest import AS_FAST
from remat_jax.report import format_bytes

TARGET, TIMEOUT = "h200", 1200.0


def planned(before: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """A row for each recorded budget of a result."""
    workloads = {made.workload.name: made.workload for made in (case(before["layers"]) for case in CASES.values())}
    for row in before["rows"]:
        begin = time.monotonic()
        workload = workloads[row["workload"]]
        made = rj.plan(workload, row["budget"], TARGET, timeout=TIMEOUT)
        slower = made.seconds > (1 + AS_FAST) * row["seconds"]
        yield {
            "workload": row["workload"],
            "budget": row["budget"],
            "before": {"seconds": row["seconds"], "compiled": len(row["tried"])}
            | ({"without_triton": bytes_without_triton(workload, row["policies"])} if slower else {}),
            "policies": dict(made.texts),
            "seconds": made.seconds,
            "host_bytes": made.host_bytes,
            "compiled": len(made.tried),
            "wall_seconds": time.monotonic() - begin,
        }


def bytes_without_triton(workload: rj.Workload, texts: Mapping[str, str]) -> int:
    """The device bytes of a step under the policies of a recorded plan, compiled without Triton."""
    parse = {True: rj.LayerPolicies.parse, False: rj.Policy.parse}
    policies = {block: parse["×" in texts[block.__name__]](texts[block.__name__]) for block in workload.blocks}
    chip = target(TARGET)
    program = export_step("before", workload.step(policies), chip)
    return compile_programs([program], chip, timeout=TIMEOUT, compiler_options=WITHOUT_TRITON)["before"].device


def show(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print the rows as a table, and their sums."""

    def times(before: float, now: float) -> tuple[str, ...]:
        return f"{before * 1e3:.2f} ms", f"{now * 1e3:.2f} ms", f"{now / before:.3f}"

    table = []
    for row in rows:
        before = row["before"]
        needs = format_bytes(before["without_triton"]) if "without_triton" in before else ""
        counts = str(before["compiled"]), str(row["compiled"])
        table.append((row["workload"], format_bytes(row["budget"]), *times(before["seconds"], row["seconds"]), needs, *counts))
    fitting = [row for row in rows if row["before"].get("without_triton", 0) <= row["budget"]]
    for name, some in (("sum", rows), ("sum, if the earlier plan fits with cuBLAS", fitting)):
        before = [sum(row["before"][key] for row in some) for key in ("seconds", "compiled")]
        now = [sum(row[key] for row in some) for key in ("seconds", "compiled")]
        table.append((name, "", *times(before[0], now[0]), "", str(before[1]), str(now[1])))
    headings = ["workload", "budget", "before", "today", "ratio", "before, with cuBLAS", "compiled before", "today"]
    print(markdown(headings, table))


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
