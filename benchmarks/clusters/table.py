"""The rows as a table, and the claims about them."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.clusters.rows import PLAN, STATE, Row
from benchmarks.record import text_table
from remat_jax.hardware import target
from remat_jax.planning.choose_fastest import TIME_ERROR
from remat_jax.report.tables import format_bytes

COLUMNS = (
    "workload",
    "policy",
    "device",
    "fits",
    "exchanged",
    "a host",
    "all-gather",
    "GB",
    "reduce-scatter",
    "GB",
    "all-reduce",
    "GB",
    "other GB",
)
_KINDS = ("all-gather", "reduce-scatter", "all-reduce")
"""The kinds of collectives that have their own columns."""


def table(rows: Sequence[Row]) -> str:
    """A device's memory, the part that collectives read or write, the host memory, and the bytes that a device exchanges."""
    return text_table(COLUMNS, [_cells(row) for row in rows])


def ordered(rows: Sequence[Row], cases: Sequence[str], policies: Sequence[str]) -> list[Row]:
    """The rows by case, number of hosts and policy. If a row was measured several times, only the last is returned."""
    last = {(row["case"], row["target"], row["policy"], row["budget"]): row for row in rows}

    def rank(row: Row) -> tuple[int, int, int]:
        place = policies.index(row["policy"]) if row["policy"] in policies else len(policies)
        return cases.index(row["case"]), target(row["target"]).hosts, place

    return sorted(last.values(), key=rank)


def _cells(row: Row) -> tuple[str, ...]:
    first = (row["workload"], row["policy"])
    if "infeasible" in row:
        return (*first, f"{_gigabytes(row['infeasible'])} at least", "no", *[""] * (len(COLUMNS) - 4))
    if "error" in row:
        return (*first, "", "does not compile", *[""] * (len(COLUMNS) - 4))
    sent = row["collectives"]
    shown = [text for kind in _KINDS for text in _sent(sent.get(kind))]
    rest = sum(nbytes for kind, (_, nbytes) in sent.items() if kind not in _KINDS)
    host = _gigabytes(row["host_bytes_per_host"]) if row["host_bytes_per_host"] else ""
    return (
        *first,
        _gigabytes(row["device_bytes"]),
        "yes" if fits(row) else "no",
        f"{_gigabytes(row['exchanged_bytes'])} ({row['exchanged_bytes'] / row['device_bytes']:.0%})",
        host,
        *shown,
        _gigabytes(rest) if rest else "",
    )


def _sent(traffic: Sequence[int] | None) -> tuple[str, str]:
    return ("", "") if traffic is None else (str(traffic[0]), _gigabytes(traffic[1]))


def fits(row: Row) -> bool:
    """Whether the compiled step is within the budget of its row."""
    return bool(row.get("device_bytes", row["budget"] + 1) <= row["budget"])


def gathered_again(rows: Sequence[Row]) -> list[str]:
    """A line for each kind of collective that runs more or less often under `full` than under `off`."""
    lines = []
    for row in rows:
        plain = next((other for other in rows if other["policy"] == "off" and other["workload"] == row["workload"]), None)
        if row["policy"] != "full" or plain is None or "collectives" not in row or "collectives" not in plain:
            continue
        for kind, (count, nbytes) in row["collectives"].items():
            before = plain["collectives"].get(kind, (0, 0))
            if count != before[0]:
                more = f"{count - before[0]:+d} arrays, {(nbytes - before[1]) / 1e9:+.3f} GB"
                lines.append(f"{row['workload']}: {kind} under full against off: {more}")
    return lines


def summary(row: Row) -> str:
    """A row in a line: its memory, its estimated time, how much of its collectives' time compute overlaps."""
    parts = [f"{row.get('device_bytes', 0) / 1e9:.1f} GB"]
    if row.get("seconds"):
        parts.append(f"step {row['seconds']:.2f} s")
    if row.get("collective_seconds"):
        overlapped, whole = row["collective_seconds"]
        parts.append(f"collectives {whole:.2f} s, {overlapped:.2f} overlapped")
    return f"{', '.join(parts)} (measured in {row['wall_seconds']:.0f} s)"


def compiled_seconds(rows: Sequence[Row]) -> list[str]:
    """A line for each plan: its compiled seconds, then those of the other steps that fit its budget, fastest first."""
    lines = []
    for row in rows:
        if row["policy"] == PLAN and row.get("seconds"):
            steps = [f"{step['policy']} {step['seconds']:.2f}" for step in (row, *_fitting(row, rows))]
            lines.append(f"{row['workload']}, estimated seconds as compiled: {', '.join(steps)}")
    return lines


def _fitting(plan: Row, rows: Sequence[Row]) -> list[Row]:
    """The other compiled steps of the plan's workload that fit its budget, fastest first."""
    others = [
        row
        for row in rows
        if row["workload"] == plan["workload"]
        and row["policy"] != PLAN
        and row.get("seconds")
        and row["device_bytes"] <= plan["budget"]
    ]
    return sorted(others, key=lambda row: row["seconds"])


def failures(rows: Sequence[Row]) -> list[str]:
    """The failed claims about plans, state on the hosts, and `full`, which gathers at most 1 % more bytes than `off`."""
    failed = []
    for row in rows:
        name = f"{row['workload']}, {row['policy']}"
        if "error" in row:
            failed.append(f"{name}: no figure: {row['error']}")
            continue
        if row["policy"] == PLAN and "device_bytes" in row:
            failed += [f"{name}: {claim}" for claim in _of_plan(row, rows)]
        if row["policy"] == STATE and not row.get("host_bytes"):
            failed.append(f"{name}: nothing is in host memory")
        plain = next((other for other in rows if other["policy"] == "off" and other["workload"] == row["workload"]), {})
        gathered = [each.get("collectives", {}).get("all-gather") for each in (row, plain)]
        if row["policy"] == "full" and all(gathered) and gathered[0][1] > 1.01 * gathered[1][1]:
            failed.append(f"{name}: {gathered[0][1] / 1e9:.1f} GB are gathered, and {gathered[1][1] / 1e9:.1f} under off")
    return failed


def _of_plan(plan: Row, rows: Sequence[Row]) -> list[str]:
    """The failed claims about a plan: it fits, the hosts have enough memory, its devices send no more than under `full`, and no
    other step of the table that fits is faster, as compiled, by more than the estimate's error.
    """
    failed = [] if fits(plan) else [f"the plan needs {format_bytes(plan['device_bytes'])}"]
    for other in _fitting(plan, rows)[:1] if plan.get("seconds") else ():
        if other["seconds"] < plan["seconds"] * (1 - TIME_ERROR):
            failed.append(f"{plan['seconds']:.2f} s as compiled, and {other['policy']} {other['seconds']:.2f} s")
    full = next((row for row in rows if row["policy"] == "full" and row["workload"] == plan["workload"]), None)
    for kind, (_, nbytes) in plan["collectives"].items() if full and "collectives" in full else ():
        most = full["collectives"].get(kind, (0, 0))[1]
        if nbytes > 1.01 * most:
            failed.append(f"{kind} of {nbytes / 1e9:.1f} GB, and {most / 1e9:.1f} under full")
    return failed + plan["warnings"]


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:.1f}"
