"""The plan of a report with the figures that were compiled for the report, so that one step has one figure on a page."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from remat_jax.overview.gathered import THE_PLAN, Gathered, PolicyFigures
from remat_jax.planning import Plan
from remat_jax.planning.plan_data import Point, over_budget, unbeaten


def plan_as_compiled(gathered: Gathered) -> Plan | None:
    """The plan, whose points have the bytes and times of the report's policies of the same name; None without a plan.

    The frontier is that of the new points, so no compiled policy lies below it. If the plan's times and the policies' times are
    not comparable (`Gathered.has_comparable_times`), only the bytes of the named policies are replaced.
    """
    plan, comparable = gathered.plan, gathered.has_comparable_times
    if plan is None:
        return None
    compiled = {policy.name: policy for policy in gathered.policies if policy.name != THE_PLAN}
    named = tuple(_as_compiled(point, compiled, comparable) for point in plan.named)
    if not comparable:
        return replace(plan, named=named)
    points = [*(_as_compiled(point, compiled, comparable) for point in plan.frontier), *named]
    fits = [point.seconds for point in named if point.seconds is not None and not point.remark and not over_budget(plan, point)]
    # A compiled policy that fits and is faster than the bound refutes the bound, which is an estimate.
    is_refuted = plan.lower_bound is not None and min(fits, default=math.inf) < plan.lower_bound
    return replace(
        plan,
        named=named,
        lower_bound=None if is_refuted else plan.lower_bound,
        frontier=unbeaten([point for point in points if not point.remark]),
        base_seconds=plan.base_seconds if gathered.base_seconds is None else gathered.base_seconds,
        assumed_rates=tuple(sorted(gathered.assumed_rates)),
    )


def _as_compiled(point: Point, compiled: Mapping[str, PolicyFigures], is_comparable: bool) -> Point:
    policy = compiled.get(point.name)
    if policy is None or point.remark:
        return point
    if is_comparable and policy.seconds is not None:
        point = replace(point, seconds=policy.seconds, timed=policy.timed)
    return replace(
        point,
        device_bytes=policy.memory.device_bytes,
        host_bytes=policy.memory.host_bytes,
        compiled=True,
        remark="" if policy.is_sound else "its compiled step must not be run",
    )
