"""The HTML page of a plan, and its picture: plain data for the report."""

from __future__ import annotations

from typing import Any

from remat_jax.planning.explain import next_gib, ranked, summary
from remat_jax.planning.plan_data import PlanData
from remat_jax.planning.point import Part, Point
from remat_jax.report.frontier import frontier_figure
from remat_jax.report.plan_page import plan_page
from remat_jax.report.tables import format_bytes, format_seconds


def page(plan: PlanData) -> str:
    """The page as text."""
    return plan_page(page_data(plan))


def page_data(plan: PlanData) -> dict[str, Any]:
    """What the page shows, as plain data."""
    points = with_plan(plan)
    named = [one for one in plan.named if _place(one) is not None and not one.remark]
    return {
        "title": f"{plan.workload} on {plan.target}, within {format_bytes(plan.budget)}",
        "summary": [summary(plan), next_gib(plan), *plan.notes],
        "budget": plan.budget,
        "host_budget": plan.host_budget,
        "base_seconds": plan.base_seconds,
        "chosen": next(index for index, one in enumerate(points) if one is points[-1] or _is_plan(plan, one)),
        "points": [_point(one) | _figures(plan, one) | {"parts": [_part(part) for part in one.parts]} for one in points],
        "named": [_point(one) | {"name": one.name} for one in named],
    }


def picture(plan: PlanData) -> Any:
    """Memory against time as a Matplotlib figure: the frontier, the named policies, the plan."""
    named = [(one.name, place) for one in plan.named if not one.remark and (place := _place(one)) is not None]
    line = [place for one in with_plan(plan) if (place := _place(one)) is not None]
    title = f"{plan.workload} on {plan.target}: one training step"
    return frontier_figure(line, named, (plan.device_bytes, plan.seconds, True), plan.budget, title)


def _place(point: Point) -> tuple[int, float, bool] | None:
    if point.device_bytes is None or point.seconds is None:
        return None
    return point.device_bytes, point.seconds, point.compiled


def with_plan(plan: PlanData) -> tuple[Point, ...]:
    """The frontier with the plan itself on it, the smallest first."""
    line = tuple(one for one in plan.frontier if _place(one) is not None)
    if any(_is_plan(plan, one) for one in line):
        return line
    own = Point("", plan.device_bytes, plan.host_bytes, plan.seconds, True, plan.parts)
    return tuple(sorted((*line, own), key=lambda one: (one.device_bytes or 0, one.seconds or 0.0)))


def _is_plan(plan: PlanData, point: Point) -> bool:
    return point.compiled and (point.device_bytes, point.seconds) == (plan.device_bytes, plan.seconds)


def _point(point: Point) -> dict[str, Any]:
    return {
        "device": point.device_bytes,
        "host": point.host_bytes,
        "seconds": point.seconds,
        "compiled": point.compiled,
        "says": f"{format_bytes(point.device_bytes)} ({'compiled' if point.compiled else 'predicted'}), "
        f"{format_seconds(point.seconds)} a step"
        + (f", {format_bytes(point.host_bytes)} in host memory" if point.host_bytes else ""),
    }


def _figures(plan: PlanData, point: Point) -> dict[str, Any]:
    size, seconds = point.device_bytes or 0, point.seconds or 0.0
    extra = seconds - plan.base_seconds
    left = plan.budget - size
    share = f" ({100 * extra / plan.base_seconds:.1f} %)" if plan.base_seconds else ""
    return {
        "figures": [
            ["device memory", format_bytes(point.device_bytes)],
            ["host memory", format_bytes(point.host_bytes)],
            ["estimated step", format_seconds(point.seconds)],
            ["over keeping everything", format_seconds(extra) + share],
            ["left of the budget" if left >= 0 else "over the budget", format_bytes(abs(left))],
        ]
    }


def _part(part: Part) -> dict[str, Any]:
    sizes = {"save": part.saved_bytes, "offload": part.offloaded_bytes, "recompute": part.recomputed_bytes}
    return {
        "where": part.where,
        "policy": part.policy,
        "costs": format_seconds(part.layers * (part.recompute_seconds + part.copy_seconds)),
        "bytes": sizes,
        "texts": {action: format_bytes(size) for action, size in sizes.items()},
        "rows": [[row.residual, row.action, format_bytes(row.bytes), format_seconds(row.seconds)] for row in ranked(part.rows)],
    }
