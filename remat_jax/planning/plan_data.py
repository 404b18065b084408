"""A plan as plain data: its policies and their cost, its layers (`Part`), and the alternatives to it (`Point`)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from remat_jax.core.marks import Block
from remat_jax.planning.changes import CHANGES
from remat_jax.planning.findings import PlanFinding
from remat_jax.planning.model import Model, block_name
from remat_jax.policy import Policy


@dataclass(frozen=True)
class LayerRow:
    """The action (`save`, `offload` or `recompute`) for one residual in a run of equal layers.

    Attributes:
      bytes: its bytes in one layer.
      seconds: the time to recompute it from its parents in one layer; None if it cannot be recomputed.
    """

    residual: str
    action: str
    bytes: int
    seconds: float | None


@dataclass(frozen=True)
class Part:
    """A run of layers with equal actions.

    Attributes:
      block: the block's name in reports.
      every: the distance between consecutive layers of the run: 2 if two kinds of layers of one block alternate in a scan.
      first: the position of the first layer of the run among all calls of the block, in forward order.
      layers: the number of layers in the run.
      policy: the policy of each layer, as text.
      saved_bytes, offloaded_bytes, recomputed_bytes: the total over all layers of the run.
      rows: the residuals of one layer.
      forward_seconds, backward_seconds: the compute time of one layer that keeps everything.
      recompute_seconds, copy_seconds: the time of one layer, averaged over the run, for recomputation and for copies that
        compute does not hide.
    """

    block: str
    first: int
    layers: int
    policy: str
    saved_bytes: int
    offloaded_bytes: int
    recomputed_bytes: int
    rows: tuple[LayerRow, ...]
    forward_seconds: float
    backward_seconds: float
    recompute_seconds: float
    copy_seconds: float
    every: int = 1

    @property
    def where(self) -> str:
        """The block's name and its layer numbers.

        >>> Part("Layer", 8, 4, "full", 0, 0, 0, (), 0.0, 0.0, 0.0, 0.0).where
        'Layer 8–11'
        """
        if self.layers == 1:
            return f"{self.block} {self.first}"
        turns = f", one in {self.every}" if self.every > 1 else ""
        return f"{self.block} {self.first}–{self.first + (self.layers - 1) * self.every}{turns}"


@dataclass(frozen=True)
class Point:
    """The memory and time of one way to run the step.

    Attributes:
      name: the named policy; empty for a plan of the solver.
      device_bytes: compiled if `compiled`, else predicted; None if the policy is not applicable or its compilation failed.
      host_bytes: bytes in host memory; compiled if `compiled`, else predicted.
      seconds: the estimated time of a whole step; None if unknown.
      compiled: whether the step was compiled.
      parts: the runs of equal layers, with their actions.
      remark: why the step cannot be used; empty if it can.
      timed: whether `seconds` come from the compiled schedule; otherwise they are the traced estimate.
    """

    name: str
    device_bytes: int | None
    host_bytes: int
    seconds: float | None
    compiled: bool
    parts: tuple[Part, ...] = ()
    remark: str = ""
    timed: bool = False


@dataclass(frozen=True)
class Beyond:
    """A change beyond the blocks (`planning.changes`), as a plan of its own within the same budgets.

    Attributes:
      change: its name, such as `head_in_chunks`.
      device_bytes, seconds: of the plan with this change; None if the workload cannot have it, or if nothing would fit.
      compiled: whether these were compiled; otherwise they are estimated, and the plan does not have the change.
      remark: why the workload cannot have the change; empty if it can.
      times: how often the change is made; each change to micro-batches doubles their number.
    """

    change: str
    device_bytes: int | None = None
    seconds: float | None = None
    compiled: bool = False
    remark: str = ""
    times: int = 1

    @property
    def text(self) -> str:
        """The change, and the number of micro-batches."""
        rounds = CHANGES[self.change].rounds
        return self.change if rounds == 1 else f"{self.change} ({rounds**self.times})"


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
    findings: tuple[PlanFinding, ...]
    model: Model = field(repr=False)
    jax_version: str = ""
    compiler_options: Mapping[str, int | str] = field(default_factory=dict)
    lower_bound: float | None = None
    timed: bool = False
    assumed_rates: tuple[str, ...] = ()
    next_bytes: int = 2**30
    is_maximal: bool | None = None
    cut_short: bool | None = None
    offload_needed: bool | None = None
    left_out: tuple[str, ...] = ()
    changes: tuple[str, ...] = ()
    beyond: tuple[Beyond, ...] = ()

    @property
    def notes(self) -> tuple[str, ...]:
        """The texts of the findings."""
        return tuple(finding.text for finding in self.findings)

    @property
    def per_device(self) -> str:
        """ " per device" on a mesh, for the titles of figures; else empty."""
        return " per device" if self.model.mesh else ""

    @property
    def micro_batches(self) -> int:
        """The number of micro-batches of the plan's step; each change to micro-batches doubles it."""
        return math.prod(CHANGES[change].rounds for change in self.changes)

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


def over_budget(plan: PlanData, point: Point) -> str:
    """The budget that a point exceeds, `device` or `host`; empty if it exceeds none."""
    if (point.device_bytes or 0) > plan.budget:
        return "device"
    return "host" if plan.host_budget is not None and point.host_bytes > plan.host_budget else ""


def plan_point(plan: PlanData, name: str = "") -> Point:
    """The plan as a `Point`."""
    return Point(name, plan.device_bytes, plan.host_bytes, plan.seconds, True, plan.parts, timed=plan.timed)


def next_bytes(budget: float) -> int:
    """The additional bytes for which a plan reports the gain: a power of two from 1/32 to 1/16 of the budget, at most 1 GiB.

    >>> next_bytes(40 * 2**30) == 2**30, next_bytes(4 * 2**30) == 2**28
    (True, True)
    """
    return min(2**30, 2 ** max(0, int(budget).bit_length() - 5))


def unbeaten(points: Sequence[Point]) -> tuple[Point, ...]:
    """The points that are Pareto-optimal in time and device memory, the smallest memory first.

    >>> [one.device_bytes for one in unbeaten([Point("", n, 0, s, False) for n, s in ((3, 1.0), (1, 2.0), (2, 2.5))])]
    [1, 3]
    """
    frontier: list[Point] = []
    placed = [point for point in points if point.device_bytes is not None and point.seconds is not None]
    for point in sorted(placed, key=lambda point: (point.device_bytes or 0, point.seconds or 0.0)):
        if not frontier or (point.seconds or 0.0) < (frontier[-1].seconds or 0.0):
            frontier.append(point)
    return tuple(frontier)
