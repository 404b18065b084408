"""A plan as plain data: policies for a workload that fit a budget, their cost, and the alternatives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from remat_jax.core.marks import Block
from remat_jax.planning.model import Model, block_name
from remat_jax.planning.point import Part, Point
from remat_jax.policy import Policy

NOT_MAXIMAL = "Not shown: that no further residual can be saved in a run of layers"
"""The beginning of the note that makes `PlanData.is_maximal` false."""
CUT_SHORT = "Not shown: the whole frontier"
"""The beginning of the note that is added if `timeout` ended the search before the frontier was computed."""


@dataclass(frozen=True)
class PlanData:
    """The attributes of a `Plan`, documented there, and properties derived from them."""

    policies: Mapping[Block, Any]
    device_bytes: int
    predicted_bytes: int
    host_bytes: int
    recompute_flops: int
    seconds: float
    base_seconds: float
    frontier: tuple[Point, ...]
    named: tuple[Point, ...]
    parts: tuple[Part, ...]
    workload: str
    target: str
    budget: int
    host_budget: int | None
    next_gib_seconds: float | None
    tried: tuple[tuple[str, int], ...]
    notes: tuple[str, ...]
    model: Model = field(repr=False)
    jax_version: str = ""
    compiler_options: Mapping[str, int | str] = field(default_factory=dict)
    lower_bound: float | None = None
    timed: bool = False
    assumed_rates: tuple[str, ...] = ()
    next_bytes: int = 2**30

    @property
    def texts(self) -> dict[str, str]:
        """The policies as text, by block name."""
        return {block_name(block): str(policy) for block, policy in self.policies.items()}

    @property
    def best_named(self) -> Point | None:
        """The fastest named policy that fits, or None. If the plan is `timed`, policies that are timed too are preferred."""
        timed = (point for point in self.named if point.seconds is not None and not point.remark)
        fits = [point for point in timed if point.device_bytes is not None and not over_budget(self, point)]
        return min(fits, key=lambda point: (point.timed < self.timed, point.seconds, point.device_bytes), default=None)

    @property
    def is_off(self) -> bool:
        """Whether the plan checkpoints nothing."""
        return all(isinstance(policy, Policy) and not policy.checkpoint for policy in self.policies.values())

    @property
    def is_maximal(self) -> bool:
        """Whether compiling showed that no further residual fits.

        If so, every variant with the same runs that saves one more residual, in all layers of one run, exceeds the budget or
        is less than 0.3 % faster (`docs/how/planner.md`).
        """
        return not any(note.startswith(NOT_MAXIMAL) for note in self.notes)


def over_budget(plan: PlanData, point: Point) -> str:
    """The budget that a point exceeds, `device` or `host`; empty if it exceeds none."""
    if (point.device_bytes or 0) > plan.budget:
        return "device"
    return "host" if plan.host_budget is not None and point.host_bytes > plan.host_budget else ""


def plan_point(plan: PlanData, name: str = "") -> Point:
    """The plan as a `Point`."""
    return Point(name, plan.device_bytes, plan.host_bytes, plan.seconds, True, plan.parts, timed=plan.timed)
