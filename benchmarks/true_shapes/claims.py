"""Judges the claims of the benchmark, among rows of the same workload, target and budget, and formats the table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.record import text_table
from benchmarks.true_shapes.rows import PLAN, Row
from remat_jax.report.tables import format_bytes

_TIME_TOLERANCE = 1e-6
"""Two estimated times are equal if their relative difference is smaller."""


def broken(row: Row, rows: Sequence[Row]) -> list[str]:
    """The claims that a row breaks, with its figures; `rows` are all rows of the record.

    A plan that was saved, loaded and measured needs the memory that it reported and fits both budgets, and no policy that fits
    is faster by the estimate. If the planner finds no plan, no policy fits. `offload_inputs` has bytes in host memory, and
    needs no more device memory than `full`.
    """
    beside = {other["policy"]: other for other in rows if _place(other) == _place(row)}
    if row["policy"] == PLAN:
        return _broken_plan(row, [other for name, other in beside.items() if name != PLAN and fits(other)])
    if row["policy"] == "offload_inputs" and "device_bytes" in row:
        return _broken_offload(row, beside.get("full", {}))
    return []


def _place(row: Row) -> tuple[str, str, int, int | None]:
    return row["workload"], row["target"], row["budget"], row["host_budget"]


def _broken_plan(row: Row, fitting: Sequence[Row]) -> list[str]:
    if "error" in row:
        return [f"no plan was made: {row['error']}"]
    if "infeasible" in row:
        return [
            f"nothing was found to fit, and {other['policy']} does: {format_bytes(other['device_bytes'])}" for other in fitting
        ]
    failed = []
    for where in ("device", "host"):
        if row[f"{where}_bytes"] != row[f"planned_{where}_bytes"]:
            needed, reported = (format_bytes(row[f"{kind}{where}_bytes"]) for kind in ("", "planned_"))
            failed.append(f"applied, the plan needs {needed} of {where} memory, and reported {reported}")
    if not fits(row):
        failed.append(f"the plan needs {format_bytes(row['device_bytes'])}, and {format_bytes(row['host_bytes'])} of the host")
    for other in fitting:
        seconds = row["named_seconds"].get(other["policy"])
        if seconds is not None and seconds < row["estimated_seconds"] * (1 - _TIME_TOLERANCE):
            failed.append(f"{other['policy']} fits and is faster: {seconds:.3f} s against {row['estimated_seconds']:.3f}")
    return failed


def _broken_offload(row: Row, full: Row) -> list[str]:
    failed = [] if row["host_bytes"] else ["nothing is in host memory"]
    if row["device_bytes"] > full.get("device_bytes", row["device_bytes"]):
        more = f"{format_bytes(row['device_bytes'])}, full {format_bytes(full['device_bytes'])}"
        failed.append(f"it needs more device memory than full: {more}")
    return failed


def fits(row: Row) -> bool:
    """Whether the compiled step is within both budgets of its row."""
    if "device_bytes" not in row:
        return False
    host = row["host_budget"] is None or row["host_bytes"] <= row["host_budget"]
    return bool(row["device_bytes"] <= row["budget"] and host)


def failures(rows: Sequence[Row]) -> list[str]:
    """All failed claims."""
    return [f"{row['workload']} on {row['target']}, {row['policy']}: {text}" for row in rows for text in broken(row, rows)]


def table(rows: Sequence[Row]) -> str:
    """The rows in plain text, memory in gigabytes (10⁹); the time is an estimate."""
    columns = ("workload", "target", "budget", "host budget", "policy", "device", "kept", "host", "fits", "step s", "holds")
    return text_table(columns, [_cells(row, rows) for row in rows])


def _cells(row: Row, rows: Sequence[Row]) -> tuple[str, ...]:
    name, holds = row["workload"], "NO" if broken(row, rows) else "yes"
    host = "" if row["host_budget"] is None else gigabytes(row["host_budget"])
    first = (name, row["target"], gigabytes(row["budget"]), host, row["policy"])
    if "error" in row:
        return (*first, "", "", "", "does not compile", "", holds if row["policy"] == PLAN else "")
    if "infeasible" in row:
        return (*first, f"{gigabytes(row['infeasible'])} at least", "", "", "no", "", holds)
    kept, seconds = row.get("residual_device_bytes"), _seconds(row, rows)
    return (
        *first,
        gigabytes(row["device_bytes"]),
        "" if kept is None else gigabytes(kept),
        gigabytes(row["host_bytes"]) if row["host_bytes"] else "",
        "yes" if fits(row) else "no",
        "" if seconds is None else f"{seconds:.2f}",
        holds,
    )


def _seconds(row: Row, rows: Sequence[Row]) -> float | None:
    """The estimated seconds of a row: a plan's own, or a named policy's according to the plan for the same budget."""
    if row["policy"] == PLAN:
        return row.get("estimated_seconds")
    same = [other for other in rows if _place(other) == _place(row) and other["policy"] == PLAN]
    seconds: dict[str, Any] = same[0].get("named_seconds", {}) if same else {}
    return seconds.get(row["policy"])


def verdict(rows: Sequence[Row]) -> tuple[str, int]:
    """The claims that hold or fail, in words, and the exit status: 1 if a claim fails or no plan was asked for."""
    failed = failures(rows)
    if failed:
        return "\n".join(["Does not hold:", *failed]), 1
    judged = sum(row["policy"] == PLAN for row in rows)
    if not judged:
        return "No plan is among the rows: nothing is shown.", 1
    return f"All claims hold, of {judged} plan{'s' * (judged > 1)} among {len(rows)} rows.", 0


def held(rows: Sequence[Row]) -> list[str]:
    """A line for each row without a plan that fits: the least memory, and its largest parts."""
    return [
        f"{row['workload']} on {row['target']} needs {format_bytes(row['infeasible'])} at least: "
        + ", ".join(f"{part} {format_bytes(size)}" for part, size in list(row["held_by"].items())[:5])
        for row in rows
        if "infeasible" in row
    ]


def gigabytes(size: int) -> str:
    """
    >>> gigabytes(80 * 10**9)
    '80.0'
    """
    return f"{size / 1e9:.1f}"
