"""Judges the claims about plans, row by row and over all rows, and formats the table."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.record import text_table
from remat_jax.planning.choose_fastest import TIME_ERROR
from remat_jax.report.tables import format_bytes

LARGEST_RATIO = 1 / (1 - TIME_ERROR)
"""The largest allowed ratio of a plan's time to the best other policy's. A smaller ratio is within the estimate's error."""

Row = dict[str, Any]


def broken(row: Row) -> list[str]:
    """The claims that one row breaks, with its figures."""
    if "infeasible" in row:
        return [f"no plan was found that fits; the least memory reported is {format_bytes(row['infeasible'])}"]
    failed, more = [], row["further"]
    if row["device_bytes"] > row["budget"]:
        failed.append(f"the plan needs {format_bytes(row['device_bytes'])}")
    if more is not None and more["device_bytes"] <= row["budget"] and not slower_as_compiled(row, more.get("seconds")):
        failed.append(
            f"{more['residual']} of {more['where']} could be saved as well: {format_bytes(more['device_bytes'])}, "
            f"{_ms(more.get('seconds'))} ms instead of {_ms(row.get('seconds'))}"
        )
    ratio = ratio_of(row)
    if ratio is not None and ratio > LARGEST_RATIO:
        failed.append(
            f"{row['best']} is faster: {_ms(row.get('best_seconds'))} ms against {_ms(row.get('seconds'))}, {ratio:.3f}"
        )
    return failed


def slower_as_compiled(row: Row, other: float | None) -> bool:
    """Whether a step of `other` compiled seconds is slower than the plan, or faster by no more than the estimate's error.

    >>> slower_as_compiled({"seconds": 1.0}, 0.97), slower_as_compiled({"seconds": 1.0}, 0.9), slower_as_compiled({}, 0.9)
    (True, False, False)
    """
    seconds = row.get("seconds")
    return seconds is not None and other is not None and other >= (1 - TIME_ERROR) * seconds


def ratio_of(row: Row) -> float | None:
    """The plan's time divided by that of the best other policy; None if no other policy fits.

    The times are those of the compiled schedules, or of the traced estimate if a schedule has no time, as on a CPU.

    >>> ratio_of({"seconds": 1.0, "best_seconds": 4.0}), ratio_of({"seconds": 1.0, "best_seconds": None})
    (0.25, None)
    >>> ratio_of({"seconds": None, "base_seconds": 2.0, "extra_seconds": 1.0, "best_extra_seconds": 4.0})
    0.5
    """
    mine, other = row.get("seconds"), row.get("best_seconds")
    if mine and other:
        return float(mine / other)
    base, extra, best_extra = (row.get(key) for key in ("base_seconds", "extra_seconds", "best_extra_seconds"))
    if base is None or extra is None or best_extra is None:
        return None
    return float((base + extra) / (base + best_extra))


def failures(rows: Sequence[Row]) -> list[str]:
    """All failed claims."""
    failed = [f"{row['workload']} in {format_bytes(row['budget'])}: {claim}" for row in rows for claim in broken(row)]
    return failed or ([] if rows else ["nothing was measured"])


def summary(rows: Sequence[Row]) -> str:
    """A summary of all rows in one sentence."""
    plans = [row for row in rows if "infeasible" not in row]
    ratios = [ratio for row in plans if (ratio := ratio_of(row)) is not None]
    text = f"{len(rows)} budgets, {len(plans)} plans"
    if ratios:
        faster = [ratio for ratio in ratios if ratio < 1 / LARGEST_RATIO]
        text += f"; {len(faster)} take at least {TIME_ERROR:.0%} less time than every other policy that fits"
        text += f", in the median {1 - statistics.median(faster):.0%} less" if faster else ""
        text += f"; the slowest takes {max(ratios):.3f} of the time of the best other policy"
    alone = sum(row["best"] is None for row in plans)
    return text + (f"; at {alone} no other policy fits" if alone else "")


def table(rows: Sequence[Row]) -> str:
    """The rows in plain text: memory in MiB, times of compiled schedules; "more" is the memory with one more saved residual."""
    columns = (
        "workload",
        "budget",
        "plan",
        "more",
        "on host",
        "step ms",
        "best other",
        "its ms",
        "ratio",
        "holds",
    )
    return text_table(columns, [_cells(row) for row in rows])


def _cells(row: Row) -> tuple[str, ...]:
    budget, other = _mib(row["budget"]), row["best"] or "none fits"
    its = _ms(row["best_seconds"]) if row.get("best_seconds") else ""
    if "infeasible" in row:
        return (row["workload"], budget, "infeasible", "", "", "", other, its, "", "NO")
    more, ratio = row["further"], ratio_of(row)
    return (
        row["workload"],
        budget,
        _mib(row["device_bytes"]),
        _mib(more["device_bytes"]) if more else "",
        _mib(row["host_bytes"]) if row["host_bytes"] else "",
        _ms(row["seconds"]) if row.get("seconds") else "",
        other,
        its,
        "" if ratio is None else f"{ratio:.3f}",
        "NO" if broken(row) else "yes",
    )


def _ms(seconds: float | None) -> str:
    return "unknown" if seconds is None else f"{1e3 * seconds:.2f}"


def _mib(size: int) -> str:
    return f"{size / 2**20:,.1f}"
