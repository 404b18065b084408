"""What the benchmark claims, judged row by row beside the other rows of the same workload, target and budget, and its table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.record import text_table
from benchmarks.true_shapes.rows import PLAN, Row
from remat_jax.report.tables import format_bytes

_EQUAL = 1e-6


def broken(row: Row, rows: Sequence[Row]) -> list[str]:
    """Which claims a row breaks, with its figures; `rows` are all of the record.

    A plan fits its budget, and no policy that fits is faster by the estimate. Where the planner finds nothing, no policy fits.
    What offloads has something in host memory, and `offload_inputs` needs no more of the device than `full`.
    """
    beside = {one["policy"]: one for one in rows if _place(one) == _place(row)}
    if row["policy"] == PLAN:
        return _broken_plan(row, [one for name, one in beside.items() if name != PLAN and fits(one)])
    if row["policy"] == "offload_inputs" and "device_bytes" in row:
        return _broken_offload(row, beside.get("full", {}))
    return []


def _place(row: Row) -> tuple[str, str, int]:
    return row["workload"], row["target"], row["budget"]


def _broken_plan(row: Row, fitting: Sequence[Row]) -> list[str]:
    if "error" in row:
        return [f"no plan was made: {row['error']}"]
    if "infeasible" in row:
        return [f"nothing was found to fit, and {one['policy']} does: {format_bytes(one['device_bytes'])}" for one in fitting]
    found = []
    if not fits(row):
        found.append(f"the plan needs {format_bytes(row['device_bytes'])}")
    for one in fitting:
        seconds = row["named_seconds"].get(one["policy"])
        if seconds is not None and seconds < row["estimated_seconds"] * (1 - _EQUAL):
            found.append(f"{one['policy']} fits and is faster: {seconds:.3f} s against {row['estimated_seconds']:.3f}")
    return found


def _broken_offload(row: Row, full: Row) -> list[str]:
    found = [] if row["host_bytes"] else ["nothing is in host memory"]
    if row["device_bytes"] > full.get("device_bytes", row["device_bytes"]):
        more = f"{format_bytes(row['device_bytes'])}, full {format_bytes(full['device_bytes'])}"
        found.append(f"it needs more of the device than full: {more}")
    return found


def fits(row: Row) -> bool:
    """Whether the compiled step is within the budget of its row."""
    return bool(row.get("device_bytes", row["budget"] + 1) <= row["budget"])


def failures(rows: Sequence[Row]) -> list[str]:
    """Every claim that does not hold."""
    return [f"{one['workload']} on {one['target']}, {one['policy']}: {text}" for one in rows for text in broken(one, rows)]


def table(rows: Sequence[Row]) -> str:
    """The rows in plain text, memory in gigabytes (10⁹); the time is an estimate."""
    columns = ("workload", "target", "budget", "policy", "device", "kept", "host", "fits", "step s", "holds")
    return text_table(columns, [_cells(row, rows) for row in rows])


def _cells(row: Row, rows: Sequence[Row]) -> tuple[str, ...]:
    name, holds = row["workload"], "NO" if broken(row, rows) else "yes"
    first = (name, row["target"], gigabytes(row["budget"]), row["policy"])
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
    """The estimate of a plan, or of a named policy as the plan for the same budget has it."""
    if row["policy"] == PLAN:
        return row.get("estimated_seconds")
    same = [one for one in rows if _place(one) == _place(row) and one["policy"] == PLAN]
    known: dict[str, Any] = same[0].get("named_seconds", {}) if same else {}
    return known.get(row["policy"])


def held(rows: Sequence[Row]) -> list[str]:
    """What takes the memory where nothing fits."""
    return [
        f"{one['workload']} on {one['target']} needs {format_bytes(one['infeasible'])} at least: "
        + ", ".join(f"{what} {format_bytes(size)}" for what, size in list(one["held_by"].items())[:5])
        for one in rows
        if "infeasible" in one
    ]


def gigabytes(size: int) -> str:
    """
    >>> gigabytes(80 * 10**9)
    '80.0'
    """
    return f"{size / 1e9:.1f}"
