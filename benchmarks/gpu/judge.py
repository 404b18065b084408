"""Compares estimates with measurements on a GPU (rank correlation, ratios, memory), and formats the rows as a table."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.record import text_table

Row = dict[str, Any]
SLOWER = 1.02
"""The largest allowed ratio of a plan's time to that of a named policy within the same budget."""


def judged(rows: Sequence[Row]) -> dict[str, Any]:
    """Compare the estimates of all rows that ran with their measurements, and list plans that lost.

    `rank_correlation` is Spearman's, of estimated and measured seconds. `ratio_error` is the median error of a step's estimated
    ratio to the same model's step without checkpoints. `seconds_error` and `memory_error` are medians of |estimated / measured
    − 1|.

    >>> times = [("off", 1.0, 2.0), ("full", 2.0, 3.0), ("dots", 3.0, 5.0)]
    >>> rows = [{"model": "mlp", "policy": a, "estimated_seconds": {"nominal": b}, "step_seconds": c} for a, b, c in times]
    >>> found = judged(rows)
    >>> found["rank_correlation"], {key: round(value, 3) for key, value in found["ratio_error"].items()}
    ({'nominal': 1.0}, {'nominal': 0.267})
    """
    ran = [row for row in rows if "step_seconds" in row and "estimated_seconds" in row]
    keys = list(ran[0]["estimated_seconds"]) if ran else []
    memory = [
        abs(row["device_bytes"] / row["measured_peak_bytes"] - 1) for row in ran if row.get("measured_peak_bytes") is not None
    ]
    return {
        "rank_correlation": {key: _rank_correlation(ran, key) for key in keys if len(ran) > 2},
        "ratio_error": {key: error for key in keys if (error := _ratio_error(ran, key)) is not None},
        "seconds_error": {
            key: statistics.median(abs(row["estimated_seconds"][key] / row["step_seconds"] - 1) for row in ran) for key in keys
        },
        "memory_error": statistics.median(memory) if memory else None,
        "slower": _slower(ran),
        "over_budget": [
            f"{row['model']}, {row['policy']}"
            for row in ran
            if row.get("measured_peak_bytes") is not None and row["measured_peak_bytes"] > row.get("budget", math.inf)
        ],
    }


def _rank_correlation(ran: Sequence[Row], key: str) -> float:
    from scipy.stats import spearmanr

    value = float(spearmanr([row["estimated_seconds"][key] for row in ran], [row["step_seconds"] for row in ran]).statistic)
    return value if math.isfinite(value) else 0.0


def _ratio_error(ran: Sequence[Row], key: str) -> float | None:
    plain = {row["model"]: row for row in ran if row["policy"] == "off"}
    found = []
    for row in ran:
        base = plain.get(row["model"])
        if base is not None and row is not base:
            estimated = row["estimated_seconds"][key] / base["estimated_seconds"][key]
            found.append(abs(estimated / (row["step_seconds"] / base["step_seconds"]) - 1))
    return statistics.median(found) if found else None


def _slower(ran: Sequence[Row]) -> list[str]:
    """The plans that are slower, as measured, than a named policy within the same budget."""
    lost = []
    for plan in (row for row in ran if "budget" in row):
        able = [row for row in ran if row["model"] == plan["model"] and row is not plan]
        able = [row for row in able if row["device_bytes"] <= plan["budget"]]
        best = min(able, key=lambda row: row["step_seconds"], default=None)
        if best is not None and plan["step_seconds"] > SLOWER * best["step_seconds"]:
            lost.append(f"{plan['model']}, {plan['policy']}: {best['policy']} is faster")
    return lost


COLUMNS = ("model, policy", "budget GB", "compiled GB", "peak GB", "nominal ms", "calibrated ms", "measured ms", "× off")


def cells(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """The rows as text, in 10⁹ bytes and milliseconds; a cell without a figure is empty."""
    plain = {row["model"]: row["step_seconds"] for row in rows if row["policy"] == "off" and "step_seconds" in row}
    lines = []
    for row in rows:
        estimated, measured = row.get("estimated_seconds", {}), row.get("step_seconds")
        memory = [_number(row.get(key), 1e-9) for key in ("budget", "device_bytes", "measured_peak_bytes")]
        times = [_number(value, 1e3) for value in (estimated.get("nominal"), estimated.get("calibrated"), measured)]
        ratio = measured / plain[row["model"]] if measured is not None and row["model"] in plain else None
        lines.append((f"{row['model']}, {row['policy']}", *memory, *times, _number(ratio, 1)))
    return lines


def table(rows: Sequence[Row]) -> str:
    """The rows in plain text."""
    return text_table(COLUMNS, cells(rows))


def markdown(rows: Sequence[Row]) -> str:
    """The rows as the table of the note."""
    lines = [COLUMNS, ("---",) * len(COLUMNS), *cells(rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


ERRORS = {
    "rank_correlation": "rank correlation of estimated and measured seconds",
    "ratio_error": "median error of the ratio to no checkpoint",
    "seconds_error": "median error of the seconds",
}


def errors_markdown(found: dict[str, Any]) -> str:
    """The errors of `judged` as the table of the note."""
    keys = list(found["seconds_error"])
    lines = [("", *(f"{key} rates" for key in keys)), ("---",) * (1 + len(keys))]
    for name, text in ERRORS.items():
        texts = (f"{found[name][key]:.2f}" if name == "rank_correlation" else f"{found[name][key]:.1%}" for key in keys)
        lines.append((text, *texts))
    lines.append(("median error of the memory", f"{found['memory_error']:.1%}", *[""] * (len(keys) - 1)))
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _number(value: float | None, scale: float) -> str:
    return "" if value is None else f"{value * scale:.2f}"
