"""What the benchmark claims of plans, judged row by row and over all rows, and its table."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.record import text_table
from remat_jax.planning.last_word import TELLS
from remat_jax.report.tables import format_bytes

MOST_RATIO = 0.7
"""Of a plan's extra time to that of the best other policy: the median where none of the others is as fast as the plan."""
_EQUAL = 1e-6

Row = dict[str, Any]


def broken(row: Row) -> list[str]:
    """Which claims one row breaks, with its figures."""
    if "infeasible" in row:
        return [f"nothing was found to fit; the least is said to be {format_bytes(row['infeasible'])}"]
    found, more = [], row["further"]
    if row["device_bytes"] > row["budget"]:
        found.append(f"the plan needs {format_bytes(row['device_bytes'])}")
    if more is not None and more["device_bytes"] <= row["budget"] and not slower_as_compiled(row, more.get("seconds")):
        found.append(
            f"{more['residual']} of {more['where']} could be saved as well: {format_bytes(more['device_bytes'])}, "
            f"extra {1e3 * more['extra_seconds']:.3f} ms instead of {1e3 * row['extra_seconds']:.3f}"
        )
    ratio = ratio_of(row)
    if ratio is not None and ratio > 1 + _EQUAL and not slower_as_compiled(row, row.get("best_seconds")):
        found.append(f"{row['best']} is faster: extra {_ms(row['best_extra_seconds'])} ms against {_ms(row['extra_seconds'])}")
    return found


def slower_as_compiled(row: Row, other: float | None) -> bool:
    """Whether the plan is as fast as another step by the compiled schedules, which are the last word, as far as they tell.

    >>> slower_as_compiled({"seconds": 1.0}, 0.97), slower_as_compiled({"seconds": 1.0}, 0.9), slower_as_compiled({}, 0.9)
    (True, False, False)
    """
    seconds = row.get("seconds")
    return seconds is not None and other is not None and other >= (1 - TELLS) * seconds


def ratio_of(row: Row) -> float | None:
    """The plan's extra time over that of the best other policy; None where no other fits or both are without extra time.

    >>> ratio_of({"extra_seconds": 1.0, "best_extra_seconds": 4.0}), ratio_of({"extra_seconds": 0.0, "best_extra_seconds": 0.0})
    (0.25, None)
    """
    mine, other = row.get("extra_seconds"), row["best_extra_seconds"]
    if mine is None or other is None or mine == other == 0:
        return None
    return float("inf") if other == 0 else mine / other


def counted(rows: Sequence[Row]) -> list[float]:
    """The ratios where none of the other policies does as well as the plan."""
    found = [ratio for row in rows if (ratio := ratio_of(row)) is not None]
    return [ratio for ratio in found if abs(ratio - 1) > _EQUAL]


def failures(rows: Sequence[Row]) -> list[str]:
    """Every claim that does not hold: of a row, and of the median."""
    found = [f"{row['workload']} in {format_bytes(row['budget'])}: {one}" for row in rows for one in broken(row)]
    ratios = counted(rows)
    if not rows:
        found.append("nothing was measured")
    if ratios and statistics.median(ratios) > MOST_RATIO:
        found.append(f"the median ratio is {statistics.median(ratios):.2f}, at most {MOST_RATIO} was claimed")
    return found


def summary(rows: Sequence[Row]) -> str:
    """One sentence on all rows."""
    ratios, plans = counted(rows), [row for row in rows if "infeasible" not in row]
    text = f"{len(rows)} budgets, {len(plans)} plans"
    if ratios:
        won = [ratio for ratio in ratios if ratio < 1]
        text += (
            f"; {len(won)} are faster than every other policy that fits, {len(ratios) - len(won)} slower than one; "
            f"the median of extra time over that of the best other policy is {statistics.median(ratios):.2f}"
        )
    alone = sum(row["best"] is None for row in plans)
    return text + (f"; at {alone} no other policy fits" if alone else "")


def table(rows: Sequence[Row]) -> str:
    """The rows in plain text, memory in MiB; extra time is over a step that keeps everything, "more" with one residual more."""
    columns = (
        "workload",
        "budget",
        "plan",
        "more",
        "on host",
        "step ms",
        "extra ms",
        "best other",
        "its extra",
        "ratio",
        "holds",
    )
    return text_table(columns, [_cells(row) for row in rows])


def _cells(row: Row) -> tuple[str, ...]:
    budget, other = _mib(row["budget"]), row["best"] or "none fits"
    its = _ms(row["best_extra_seconds"]) if row["best"] else ""
    if "infeasible" in row:
        return (row["workload"], budget, "infeasible", "", "", "", "", other, its, "", "NO")
    more, ratio = row["further"], ratio_of(row)
    return (
        row["workload"],
        budget,
        _mib(row["device_bytes"]),
        _mib(more["device_bytes"]) if more else "",
        _mib(row["host_bytes"]) if row["host_bytes"] else "",
        f"{1e3 * (row['base_seconds'] + row['extra_seconds']):.2f}",
        _ms(row["extra_seconds"]),
        other,
        its,
        "" if ratio is None else f"{ratio:.2f}",
        "NO" if broken(row) else "yes",
    )


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3f}"


def _mib(size: int) -> str:
    return f"{size / 2**20:,.1f}"
