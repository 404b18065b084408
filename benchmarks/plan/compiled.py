"""Compares the traced estimate, by which the search chooses, with the time of the compiled step."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

Row = dict[str, Any]
Rivals = Mapping[str, Sequence[Row]]
LEAST_GAIN = 0.01
"""The share by which another policy's compiled step must be faster for the policy to be chosen instead."""


def rank_correlations(rows: Sequence[Row], rivals: Rivals) -> dict[str, float]:
    """By workload, Spearman's rank correlation of traced and compiled seconds; left out if fewer than three steps have both."""
    from scipy.stats import spearmanr

    correlations = {}
    for workload in rivals:
        both = [
            (step["extra_seconds"], step["seconds"])
            for step in _candidates(rows, rivals, workload)
            if step.get("extra_seconds") is not None and step.get("seconds") is not None
        ]
        if len(both) > 2:
            value = float(spearmanr(*zip(*both, strict=True)).statistic)
            correlations[workload] = value if math.isfinite(value) else 0.0
    return correlations


def changed(rows: Sequence[Row], rivals: Rivals) -> tuple[list[str], int]:
    """A line for each budget at which another plan or policy that fits is faster as compiled, and the number of budgets whose
    plan has a compiled time.
    """
    lines, timed = [], 0
    for row in rows:
        if row.get("seconds") is None:
            continue
        timed += 1
        able = [
            step
            for step in _candidates(rows, rivals, row["workload"])
            if step.get("seconds") is not None and step["device_bytes"] <= row["budget"]
        ]
        best = min(able, key=lambda step: step["seconds"], default=row)
        if best["seconds"] < (1 - LEAST_GAIN) * row["seconds"]:
            name = best["names"][0] if "names" in best else f"the plan for {best['budget'] / 2**20:,.1f} MiB"
            times = f"{1e3 * best['seconds']:.2f} ms, the plan {1e3 * row['seconds']:.2f}"
            lines.append(f"{row['workload']} in {row['budget'] / 2**20:,.1f} MiB: {name} takes {times}")
    return lines, timed


def _candidates(rows: Sequence[Row], rivals: Rivals, workload: str) -> list[Row]:
    plans = [row for row in rows if row["workload"] == workload and "device_bytes" in row]
    return [*plans, *(rival for rival in rivals.get(workload, ()) if not rival["remark"])]


def summary(rows: Sequence[Row], rivals: Rivals) -> str:
    """How well the two times agree, in words.

    >>> rival = {"names": ["dots"], "remark": "", "device_bytes": 1, "extra_seconds": 2.0, "seconds": 3.0}
    >>> row = {"workload": "w", "budget": 2**20, "device_bytes": 1, "extra_seconds": 1.0, "seconds": 4.0}
    >>> print(summary([row], {"w": [rival, rival | {"extra_seconds": 3.0, "seconds": 5.0}]}))
    Traced against compiled time, rank correlation: w 0.50; the median is 0.50.
    By the compiled time the choice would be another at 1 of 1 budgets:
    w in 1.0 MiB: dots takes 3000.00 ms, the plan 4000.00
    """
    by_workload, (others, timed) = rank_correlations(rows, rivals), changed(rows, rivals)
    if not by_workload or not timed:
        return "Compiled times are not in these files; rows that are measured from now on have them."
    correlations = ", ".join(f"{name} {value:.2f}" for name, value in by_workload.items())
    median = statistics.median(by_workload.values())
    lines = [f"Traced against compiled time, rank correlation: {correlations}; the median is {median:.2f}."]
    lines.append(f"By the compiled time the choice would be another at {len(others)} of {timed} budgets:")
    return "\n".join([*lines, *others])
