"""Chooses the fastest compiled step that fits, by the times of compiled schedules; estimates the times of other steps."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from remat_jax.apply.blocks import AS_WRITTEN
from remat_jax.cost.count import flops
from remat_jax.errors import UnsupportedError
from remat_jax.planning.candidate import FAILED, Compiled, StepCandidate, Tried
from remat_jax.planning.fit_memory import Fit
from remat_jax.planning.plan_data import Point
from remat_jax.planning.problem import KEEP_ALL
from remat_jax.workload import Workload

TIME_ERROR = 0.04
"""Compiled times count as equal if the shorter is at most this share below the longer. This share is the bound on the error of
a modelled ratio of two steps' times (`benchmarks/published/cases.py`); at most a sixth of the published steps may exceed a
bound."""


@dataclass(frozen=True)
class Times:
    """The time of a whole step: its compiled time (`Compiled.seconds`), or the traced estimate scaled by `pace`.

    If any compiled step has no compiled time, as on a CPU, every time is the traced estimate. The traced estimate is
    `traced_base` plus the time to keep, recompute and copy residuals. `keeping_everything` is the time to keep all residuals.
    """

    fit: Fit
    traced_base: float
    keeping_everything: float

    @property
    def compiled(self) -> bool:
        """Whether every compiled step has a compiled time."""
        compiled = [step.compiled for step in self.fit.tried if step.compiled.device_bytes < FAILED]
        return bool(compiled) and all(step.seconds for step in compiled)

    @property
    def pace(self) -> float:
        """The median ratio of compiled to traced time over the compiled steps; 1 if traced times are used."""
        if not self.compiled:
            return 1.0
        pairs = [(step.compiled.seconds, self.traced(step.candidate)) for step in self.fit.tried if step.compiled.seconds]
        return statistics.median([seconds / traced for seconds, traced in pairs if traced > 0] or [1.0])

    def traced(self, candidate: StepCandidate) -> float:
        """The traced estimate of a step's seconds."""
        return self.traced_base + candidate.seconds

    def of(self, candidate: StepCandidate) -> tuple[float, bool]:
        """The seconds of a step, and whether they come from its compiled schedule."""
        tried = self.fit.known(candidate)
        if tried is not None and self.compiled and tried.compiled.seconds:
            return tried.compiled.seconds, True
        return self.pace * self.traced(candidate), False

    def of_compiled(self, tried: Tried) -> tuple[float, bool]:
        """Like `of`, but from the schedule of `tried` itself; `of` may find a step compiled with another memory limit."""
        if self.compiled and tried.compiled.seconds:
            return tried.compiled.seconds, True
        return self.of(tried.candidate)

    @property
    def base(self) -> float:
        """The seconds of a step that keeps everything."""
        everything = [step.compiled.seconds for step in self.fit.tried if step.candidate.name in KEEP_ALL]
        times = list(filter(None, everything)) if self.compiled else []
        return min(times, default=self.pace * (self.traced_base + self.keeping_everything))


def choose_fastest(searched: Tried, fitting: Sequence[Tried]) -> tuple[Tried, list[str]]:
    """The step for the plan, and notes; `searched` is the search's best step, by the traced estimate.

    Of the compiled steps within `TIME_ERROR` of the fastest, the simplest is chosen: a named policy before a mix of policies or
    groups of layers, then a step without offload before one with offload. If a step in `fitting` has no compiled time,
    `searched` is chosen.
    """
    if any(not step.compiled.seconds for step in fitting):
        return searched, []
    fastest = min(fitting, key=lambda step: (_seconds(step), step is not searched))
    near = [step for step in fitting if _seconds(fastest) >= (1 - TIME_ERROR) * _seconds(step)]
    chosen = min(near, key=lambda step: (*_complexity(step.candidate), _seconds(step), step is not searched))
    notes = []
    if _seconds(fastest) < _seconds(chosen):
        notes.append(
            f"As compiled, {_name(fastest)} is {_percent(fastest, chosen)} % faster. The estimate cannot tell apart times "
            f"within {100 * TIME_ERROR:.0f} %, so the plan is the simpler step, {_name(chosen)}"
        )
    if _seconds(chosen) < _seconds(searched) and _name(chosen) != _name(searched):
        notes.append(
            f"As compiled, {_name(chosen)} is {_percent(chosen, searched)} % faster than {_name(searched)}, which the traced "
            "estimate ranks first"
        )
    return chosen, notes


def _seconds(tried: Tried) -> float:
    return tried.compiled.seconds or 0.0


def _percent(fast: Tried, slow: Tried) -> str:
    return f"{100 * (1 - _seconds(fast) / _seconds(slow)):.1f}"


def _name(tried: Tried) -> str:
    return tried.candidate.name or ("a mix of policies that offloads" if tried.candidate.host_bytes else "a mix of policies")


def _complexity(candidate: StepCandidate) -> tuple[bool, bool]:
    return not candidate.name or bool(candidate.inside), candidate.host_bytes > 0


def as_written(
    workload: Workload, times: Times, full: StepCandidate | None, compile_: Callable[..., list[Compiled]], best: Tried | None
) -> Point:
    """The memory and time of the model as written, with its own checkpoints around the blocks.

    Without a compiled time, the time is interpolated between a step that keeps everything and a step under `full`, in
    proportion to the recomputed FLOPs.
    """
    answer = compile_([StepCandidate(AS_WRITTEN, (), 0.0)], best)
    compiled = answer[0] if answer and answer[0].device_bytes != FAILED else None
    seconds = compiled.seconds if compiled is not None and times.compiled else None
    timed = seconds is not None
    if not timed and full is not None:
        written, of_full = (counted_flops(workload, policy) for policy in ("off", dict.fromkeys(workload.blocks, "full")))
        if written is not None and of_full:
            share = written / of_full
            seconds = times.pace * (times.traced_base + (1 - share) * times.keeping_everything + share * full.seconds)
    device, host = (compiled.device_bytes, compiled.host_bytes) if compiled else (None, 0)
    return Point(AS_WRITTEN, device, host, seconds, compiled is not None, timed=timed)


def counted_flops(workload: Workload, policy: Any) -> int | None:
    """The FLOPs that the step recomputes under `policy`; None if a loop of unknown trip count prevents the count."""
    # Under `off`, the model's own checkpoints around its blocks recompute too, so compare with `everything`.
    nothing = dict.fromkeys(workload.blocks, "everything") if workload.replaced_checkpoints else "off"
    counts = []
    for step_policy in (policy, nothing):
        step = workload.step(step_policy)
        try:
            counts.append(flops(step.function, *step.arguments))
        except UnsupportedError:
            return None
    return max(0, counts[0] - counts[1])
