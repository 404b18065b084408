"""`python -m benchmarks.public_reports [part]`: run the programs of the public reports and print the table; 1 at a fault."""

from __future__ import annotations

import sys
import time

from benchmarks.figures import markdown
from benchmarks.public_reports import flax_reports, jax_reports, torch_reports, training_reports  # noqa: F401
from benchmarks.public_reports.report import FAULT, REPORTS, Outcome, Report


def main(part: str = "") -> int:
    """Print the table of the reports whose name contains `part`."""
    rows, faults = [], 0
    for report in REPORTS:
        if part in report.issue:
            start = time.monotonic()
            outcome = outcome_of(report)
            faults += outcome.verdict == FAULT
            print(f"{report.issue}: {outcome.verdict}, {time.monotonic() - start:.1f} s", file=sys.stderr, flush=True)
            name, number = report.issue.split("#")
            link = f"[{report.issue}](https://github.com/{name}/issues/{number})"
            rows.append((link, report.complaint, *map(cell, (outcome.plain, outcome.ours)), outcome.verdict))
    print(markdown(["report", "complaint", "without remat_jax", "with remat_jax", "verdict"], rows))
    return int(faults > 0)


def outcome_of(report: Report) -> Outcome:
    """The outcome of a report's program; an error of the program itself is a fault."""
    try:
        return report.run()
    except Exception as error:
        return Outcome("", f"{type(error).__name__}: {' '.join(str(error).split())[:200]}", FAULT)


def cell(text: str) -> str:
    """`text` as one cell of a Markdown table."""
    return " ".join(text.replace("|", "\\|").split())


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:2]))
