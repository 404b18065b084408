"""Plain data for the HTML page of a plan and its picture."""

from __future__ import annotations

from typing import Any

from remat_jax.planning.explain import next_gib, ranked, said_time, signed, summary
from remat_jax.planning.plan_data import PlanData
from remat_jax.planning.point import Part, Point
from remat_jax.report.frontier import frontier_figure
from remat_jax.report.plan_page import plan_page
from remat_jax.report.svg import Picture
from remat_jax.report.tables import format_bytes


def page(plan: PlanData) -> str:
    """The page as text."""
    return plan_page(page_data(plan))


def page_data(plan: PlanData) -> dict[str, Any]:
    """The page's content as plain data."""
    points = with_plan(plan)
    named = [one for one in plan.named if _place(one) is not None and not one.remark]
    return {
        "title": f"{plan.workload} on {plan.target}, within {format_bytes(plan.budget)}",
        "summary": [summary(plan), next_gib(plan), *plan.notes],
        "budget": plan.budget,
        "host_budget": plan.host_budget,
        "base_seconds": plan.base_seconds,
        "chosen": next(index for index, one in enumerate(points) if one is points[-1] or _is_plan(plan, one)),
        "points": [_point(plan, one) | _figures(plan, one) | _parts(plan, one) for one in points],
        "named": [_point(plan, one) | {"name": one.name} for one in named],
    }


def picture(plan: PlanData) -> Picture:
    """Memory against time: the frontier, the named policies, the plan."""
    named = [(one.name, place) for one in plan.named if not one.remark and (place := _place(one)) is not None]
    line = [place for one in with_plan(plan) if (place := _place(one)) is not None]
    title = f"{plan.workload} on {plan.target}: one training step"
    return frontier_figure(line, named, (plan.device_bytes, plan.seconds, True), plan.budget, title)


def _place(point: Point) -> tuple[int, float, bool] | None:
    if point.device_bytes is None or point.seconds is None:
        return None
    return point.device_bytes, point.seconds, point.compiled


def with_plan(plan: PlanData) -> tuple[Point, ...]:
    """The frontier including the plan, the smallest first."""
    line = tuple(one for one in plan.frontier if _place(one) is not None)
    if any(_is_plan(plan, one) for one in line):
        return line
    own = Point("", plan.device_bytes, plan.host_bytes, plan.seconds, True, plan.parts, timed=plan.timed)
    return tuple(sorted((*line, own), key=lambda one: (one.device_bytes or 0, one.seconds or 0.0)))


def _is_plan(plan: PlanData, point: Point) -> bool:
    return point.compiled and (point.device_bytes, point.seconds) == (plan.device_bytes, plan.seconds)


def _point(plan: PlanData, point: Point) -> dict[str, Any]:
    return {
        "device": point.device_bytes,
        "host": point.host_bytes,
        "seconds": point.seconds,
        "compiled": point.compiled,
        "says": f"{format_bytes(point.device_bytes)} ({'compiled' if point.compiled else 'predicted'}), "
        f"{said_time(plan, point.seconds)} a step ({_known(point)})"
        + (f", {format_bytes(point.host_bytes)} in host memory" if point.host_bytes else ""),
    }


def _known(point: Point) -> str:
    """The origin of a point's time, as text."""
    return "compiled schedule" if point.timed else "traced program"


def _figures(plan: PlanData, point: Point) -> dict[str, Any]:
    left = plan.budget - (point.device_bytes or 0)
    extra = (point.seconds or 0.0) - plan.base_seconds
    share = f" ({100 * extra / plan.base_seconds:.2g} %)" if plan.base_seconds else ""
    return {
        "figures": [
            ["device memory", format_bytes(point.device_bytes)],
            ["host memory", format_bytes(point.host_bytes)],
            ["estimated step", f"{said_time(plan, point.seconds)}, {_known(point)}"],
            ["over keeping everything", signed(plan, extra) + share],
            ["left of the budget" if left >= 0 else "over the budget", format_bytes(abs(left))],
        ]
    }


def _parts(plan: PlanData, point: Point) -> dict[str, Any]:
    return {"parts": [_part(plan, part) for part in point.parts]}


def _part(plan: PlanData, part: Part) -> dict[str, Any]:
    sizes = {"save": part.saved_bytes, "offload": part.offloaded_bytes, "recompute": part.recomputed_bytes}
    return {
        "where": part.where,
        "policy": part.policy,
        "costs": said_time(plan, part.layers * (part.recompute_seconds + part.copy_seconds)),
        "bytes": sizes,
        "texts": {action: format_bytes(size) for action, size in sizes.items()},
        "rows": [
            [row.residual, row.action, format_bytes(row.bytes), said_time(plan, row.seconds)] for row in ranked(part.rows)
        ],
    }
