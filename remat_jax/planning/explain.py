"""A plan in words: what each layer does with each residual, why, and what more memory would buy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from remat_jax.planning.plan_data import PlanData
from remat_jax.planning.point import Part, Point, Row
from remat_jax.report.tables import format_bytes, format_seconds, table

GIB = 2**30
_SHORT = 3
_SMALL = 0.01
"""Residuals below this share of the largest are told together."""


def plan_table(plan: PlanData) -> Any:
    """What the layers do, a line for each run of equal ones, as a table."""
    columns = ("block and layers", "saved", "offloaded", "recomputed", "recompute", "copies not hidden", "what")
    rows = [
        (
            part.where,
            *(format_bytes(size) for size in (part.saved_bytes, part.offloaded_bytes, part.recomputed_bytes)),
            format_seconds(part.layers * part.recompute_seconds),
            format_seconds(part.layers * part.copy_seconds),
            _what(part),
        )
        for part in plan.parts
    ]
    asked = f"{format_bytes(plan.budget)}" + (
        f", host {format_bytes(plan.host_budget)}" if plan.host_budget is not None else ""
    )
    title = f"Plan for {plan.workload} on {plan.target} within {asked}: {format_bytes(plan.device_bytes)} compiled"
    return table(title, columns, rows, caption=summary(plan))


def named_table(plan: PlanData) -> Any:
    """What the named policies would take beside the plan, as a table."""
    rows = [_named_row("this plan", plan.device_bytes, True, plan.host_bytes, plan.seconds, plan, "fits")]
    for one in sorted(plan.named, key=_by_time):
        rows.append(
            _named_row(one.name, one.device_bytes, one.compiled, one.host_bytes, one.seconds, plan, _verdict(plan, one))
        )
    columns = ("policy", "device", "", "host", "step", "over keeping everything", "")
    return table("Beside the named policies", columns, rows)


def summary(plan: PlanData) -> str:
    """The figures of the whole plan in a sentence or two.

    The estimated time, what recomputing adds, and the best named policy that fits.
    """
    extra = plan.seconds - plan.base_seconds
    said = (
        f"Estimated {format_seconds(plan.seconds)} a step, {format_seconds(extra)} over keeping everything "
        f"({100 * extra / plan.base_seconds if plan.base_seconds else 0.0:.1f} %); "
        f"{plan.recompute_flops / 1e12:.3g} TFLOP are computed again. "
        f"{format_bytes(plan.device_bytes)} on the device as compiled ({format_bytes(plan.predicted_bytes)} were predicted)"
        f"{f', {format_bytes(plan.host_bytes)} in host memory' if plan.host_bytes else ''}; {_compiled(plan)}."
        f"{_limit(plan)}{_bound(plan)}"
    )
    best = plan.best_named
    if best is None or best.seconds is None:
        return f"{said} No named policy fits."
    return f"{said} The best named policy that fits, {best.name}, takes {format_seconds(best.seconds)}."


def _limit(plan: PlanData) -> str:
    """How the step is to be compiled, as a sentence with a space before it; empty where there is nothing to say."""
    if not plan.compiler_options:
        return ""
    return f" Compiled with a memory limit: jax.jit(step, compiler_options={dict(plan.compiler_options)!r})."


def _bound(plan: PlanData) -> str:
    """How much faster another plan could be, as a sentence with a space before it; empty where that is not known."""
    if plan.lower_bound is None or not plan.seconds:
        return ""
    below = 100 * (1 - plan.lower_bound / plan.seconds)
    least = format_seconds(plan.lower_bound)
    return f" By the same estimate no plan within the budget takes less than {least}: {below:.1f} % less."


def explanation(plan: PlanData) -> str:
    """Why each residual is where it is, and what the next GiB would buy, as text of several lines."""
    lines = [summary(plan), "Bytes and times are of one layer.", ""]
    if plan.is_off:
        lines.append("Nothing is checkpointed: the whole step fits as it is.")
    before: Part | None = None
    for part in plan.parts if not plan.is_off else ():
        # Beside another that does the same it is told apart because the scan is cut there.
        cut = before is not None and (before.block, before.policy) == (part.block, part.policy)
        lines.append(f"{part.where}, in a scan of its own:" if cut else f"{part.where}:")
        lines += _lines(part)
        before = part
    lines += ["", next_gib(plan), *plan.notes]
    return "\n".join(lines)


def next_gib(plan: PlanData) -> str:
    """What one GiB more would buy, as a sentence."""
    if plan.next_gib_seconds is None and plan.seconds > plan.base_seconds:
        return "What the next GiB would buy was not computed before the timeout."
    if plan.next_gib_seconds is None:
        return "More memory would buy nothing: by the estimate no step is faster."
    if not plan.next_gib_seconds:
        return "The next GiB would buy nothing: what comes next needs more than that."
    share = 100 * plan.next_gib_seconds / plan.seconds if plan.seconds else 0.0
    return f"The next GiB would buy {format_seconds(plan.next_gib_seconds)} a step ({share:.1f} %), by the estimate."


def ranked(rows: Sequence[Row]) -> list[Row]:
    """Rows as people want to read them: what is kept, then what is not, the largest first."""
    order = ("save", "offload", "recompute")
    return sorted(rows, key=lambda row: (order.index(row.action), -row.bytes, row.residual))


def _compiled(plan: PlanData) -> str:
    return f"{len(plan.tried)} steps were compiled" if len(plan.tried) > 1 else "one step was compiled"


def _lines(part: Part) -> list[str]:
    """A line for each residual that matters, and one for all others of the same action."""
    least = _SMALL * max((row.bytes for row in part.rows), default=0)
    lines, small = [], dict[str, list[Row]]()
    for row in ranked(part.rows):
        if row.bytes < least:
            small.setdefault(row.action, []).append(row)
        else:
            lines.append(f"  {row.action:<9} {row.residual}, {format_bytes(row.bytes)}: {_why(row, part)}")
    for action, rows in small.items():
        lines.append(f"  {action:<9} {len(rows)} small ones, {format_bytes(sum(row.bytes for row in rows))} together")
    return lines


def _what(part: Part) -> str:
    """The names that a run of layers keeps, as many as can be read at a glance."""
    said = []
    for action in ("save", "offload"):
        names = [row.residual for row in ranked(part.rows) if row.action == action]
        if names:
            more = f" and {len(names) - _SHORT} more" if len(names) > _SHORT else ""
            said.append(f"{action}: {', '.join(names[:_SHORT])}{more}")
    return "; ".join(said) or part.policy


def _why(row: Row, part: Part) -> str:
    price = "it cannot be computed again" if row.seconds is None else f"computing it again takes {_price(row)}"
    if row.action == "offload":
        compute = f"the layer's compute ({format_seconds(part.forward_seconds)} forward)"
        if not part.copy_seconds:
            return f"{price}; {compute} hides what is copied"
        return f"{price}; {compute} does not hide {format_seconds(part.copy_seconds)} of what is copied"
    return price


def _price(row: Row) -> str:
    if not row.seconds:
        return "no time of its own"
    per_gib = f", {format_seconds(row.seconds * GIB / row.bytes)} for each GiB" if row.bytes else ""
    return f"{format_seconds(row.seconds)}{per_gib}"


def _verdict(plan: PlanData, point: Point) -> str:
    if point.remark:
        return point.remark
    if point.device_bytes is None:
        return "not compiled"
    if point.device_bytes > plan.budget:
        return "too large"
    if plan.host_budget is not None and point.host_bytes > plan.host_budget:
        return "too much on the host"
    return "fits"


def _by_time(point: Point) -> tuple[float, float]:
    """The fastest first, of equal ones the smallest; what is not known comes last."""
    seconds, size = point.seconds, point.device_bytes
    return math.inf if seconds is None else seconds, math.inf if size is None else size


def _named_row(
    name: str, device: int | None, compiled: bool, host: int, seconds: float | None, plan: PlanData, verdict: str
) -> tuple[Any, ...]:
    extra = None if seconds is None else seconds - plan.base_seconds
    how = "" if device is None else "compiled" if compiled else "predicted"
    return name, format_bytes(device), how, format_bytes(host), format_seconds(seconds), format_seconds(extra), verdict
