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
"""The start of a note from which `PlanData.is_maximal` is read."""
CUT_SHORT = "Not shown: the whole frontier"
"""The start of the note for a search whose `timeout` came before the frontier."""


@dataclass(frozen=True)
class PlanData:
    """The attributes of a `Plan`, documented there, and properties that follow from them alone."""

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
    compiler_options: Mapping[str, int] = field(default_factory=dict)
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
        """The fastest compiled named policy that fits, else the fastest predicted; None if none fits."""
        fits = [one for one in self.named if self._fits(one) and one.seconds is not None]
        return min(fits, key=lambda one: (one.timed < self.timed, one.seconds, one.device_bytes)) if fits else None

    def _fits(self, point: Point) -> bool:
        host = point.host_bytes <= self.host_budget if self.host_budget is not None else True
        return point.device_bytes is not None and point.device_bytes <= self.budget and not point.remark and host

    @property
    def is_off(self) -> bool:
        """Whether the plan checkpoints nothing."""
        return all(isinstance(one, Policy) and not one.checkpoint for one in self.policies.values())

    @property
    def is_maximal(self) -> bool:
        """Whether compiling showed that no residual more can be saved in a run of equal layers within the budget.

        Only residuals that save 0.3 % of the step's time count. One residual is saved in all layers of one run, and the runs
        stay the same (`docs/how/planner.md`).
        """
        return not any(note.startswith(NOT_MAXIMAL) for note in self.notes)
