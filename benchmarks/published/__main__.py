"""Compile published training steps for their GPUs, and hold the estimated time against the published one.

    python -m benchmarks.published                    all of them; exits with 1 where one misses by more than its bound
    python -m benchmarks.published 'GPT-2'            those whose name has this in it
    python -m benchmarks.published --note             write the table into docs/notes/published_steps.md, too

No GPU is needed and nothing is run. Rates are those of `remat_jax/hardware/targets.toml`; none was fitted to these steps.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

import remat_jax as rj
from benchmarks.published.cases import ABSOLUTE, CASES, Case
from benchmarks.published.model import workload
from benchmarks.record import ROOT
from remat_jax.report.tables import format_seconds, table

NOTE = ROOT / "docs" / "notes" / "published_steps.md"
MOST_MISSED = 4
"""So many of the steps may miss their bound: the note says of each why."""


@dataclass(frozen=True)
class Row:
    """A case, the estimate of its step, and what of that is compute and waiting for exchanges."""

    case: Case
    seconds: float
    compute: float

    @property
    def off(self) -> float:
        """By which share of the published time the estimate is longer."""
        return self.seconds / self.case.seconds - 1

    @property
    def holds(self) -> bool:
        return abs(self.off) <= ABSOLUTE


def row(case: Case) -> Row:
    """Compile the step and model its time."""
    work = workload(
        *(case.shape, case.batch, case.length),
        mesh=dict(case.mesh) or None,
        name=case.name,
        bfloat16=case.bfloat16,
        chunks=case.chunks,
    )
    report = rj.measure(work, case.policy, case.target, timeout=1200)
    assert report.seconds is not None and report.compute_seconds is not None
    return Row(case, report.seconds, report.compute_seconds)


def ratios(rows: list[Row]) -> list[tuple[Case, float, float]]:
    """The published and the estimated ratio of a case to the same step without recomputation."""
    by_name = {one.case.name: one for one in rows}
    return [
        (one.case, one.case.seconds / other.case.seconds, one.seconds / other.seconds)
        for one in rows
        if (other := by_name.get(one.case.beside)) is not None
    ]


def missed(rows: list[Row]) -> list[str]:
    """What is off by more than its bound, in words; empty where all that must hold does."""
    found = [f"{one.case.name}: {100 * one.off:+.0f} %" for one in rows if not one.holds]
    found = found if len(found) > MOST_MISSED else []
    return found + [
        f"{case.name}: {seen:.3f} times the step without recomputation, published {told:.3f}"
        for case, told, seen in ratios(rows)
        if abs(seen - told) > case.ratio_bound
    ]


def cells(one: Row) -> tuple[str, ...]:
    waits = one.seconds - one.compute
    times = format_seconds(one.case.seconds), format_seconds(one.seconds), f"{100 * one.off:+.0f} %"
    return one.case.name, one.case.policy, *times, format_seconds(waits)


COLUMNS = ("step", "policy", "published", "estimated", "off", "waits for exchanges")


def note(rows: list[Row], text: str) -> str:
    """The note with its tables made anew, between its two marks."""
    before, _, rest = text.partition("<!-- table -->\n")
    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + " --- |" * len(COLUMNS)]
    lines += ["| " + " | ".join(cells(one)) + " |" for one in rows]
    lines += ["", "| ratio to the step without recomputation | published | estimated |", "| --- | --- | --- |"]
    lines += [f"| {case.name} | {told:.3f} | {seen:.3f} |" for case, told, seen in ratios(rows)]
    lines += ["", "Sources:", ""]
    lines += [
        f"- {one.case.name}: {one.case.told}; {one.case.source}" + (f"; {one.case.differs}" if one.case.differs else "")
        for one in rows
    ]
    return f"{before}<!-- table -->\n" + "\n".join(lines) + "\n<!-- end -->\n" + rest.partition("<!-- end -->\n")[2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="?", default="", help="of the names")
    parser.add_argument("--note", action="store_true")
    options = parser.parse_args()
    chosen = [case for case in CASES if options.part in case.name]
    if not chosen:
        parser.error(f"part={options.part!r}: no step has this in its name; they are {[case.name for case in CASES]}")
    console, rows = Console(width=150), []
    for case in chosen:
        rows.append(row(case))
        console.print(*cells(rows[-1]), sep="  ")
    console.print(table("Published steps, and their estimate", COLUMNS, [cells(one) for one in rows]))
    for case, told, seen in ratios(rows):
        console.print(f"{case.name}: {seen:.3f} times the step without recomputation, published {told:.3f}")
    if options.note:
        NOTE.write_text(note(rows, Path(NOTE).read_text(encoding="utf-8")), encoding="utf-8")
    if problems := missed(rows):
        sys.exit("\n".join(problems))


if __name__ == "__main__":
    main()
