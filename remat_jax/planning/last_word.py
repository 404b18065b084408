"""Chooses among the compiled steps that fit by the time of their compiled schedules; estimates the time of other steps."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from remat_jax.planning.candidate import FAILED, StepCandidate, Tried
from remat_jax.planning.fit import Fit
from remat_jax.planning.problem import KEEP_ALL

TELLS = 0.04
"""The least relative difference at which two compiled times are distinguished.

It is the error of modelled time ratios against published ratios of steps with the same computation
(`docs/notes/published_steps.md`).
"""


@dataclass(frozen=True)
class Times:
    """The time of a whole step: its compiled time, or the traced estimate scaled by `pace`.

    If the schedule of a compiled step could not be timed, as on a CPU, every time is the traced estimate.

    Attributes:
      traced_base: the traced estimate of a step without what its residuals cost.
      keeping_everything: what the residuals of a step cost that keeps all of them.
    """

    fit: Fit
    traced_base: float
    keeping_everything: float

    @property
    def compiled(self) -> bool:
        """Whether the time of every compiled step is known."""
        seen = [one for one in self.fit.tried if one.compiled.device_bytes < FAILED]
        return bool(seen) and all(one.compiled.seconds for one in seen)

    @property
    def pace(self) -> float:
        """Compiled time divided by traced time, the median of the compiled steps; 1 if traced times are shown."""
        if not self.compiled:
            return 1.0
        pairs = [(one.compiled.seconds, self.traced(one.candidate)) for one in self.fit.tried if one.compiled.seconds]
        found = [seconds / traced for seconds, traced in pairs if traced > 0]
        return statistics.median(found) if found else 1.0

    def traced(self, candidate: StepCandidate) -> float:
        """The seconds of a step by the traced program."""
        return self.traced_base + candidate.seconds

    def of(self, candidate: StepCandidate) -> tuple[float, bool]:
        """The seconds of a step, and whether they come from its compiled schedule."""
        known = self.fit.known(candidate)
        if known is not None and self.compiled and known.compiled.seconds:
            return known.compiled.seconds, True
        return self.pace * self.traced(candidate), False

    def of_compiled(self, tried: Tried) -> tuple[float, bool]:
        """As `of`, for a compiled step whose candidate may also have been compiled without a memory limit."""
        if self.compiled and tried.compiled.seconds:
            return tried.compiled.seconds, True
        return self.of(tried.candidate)

    @property
    def base(self) -> float:
        """The seconds of a step that keeps everything."""
        kept = [one for one in self.fit.tried if one.candidate.name in KEEP_ALL and one.compiled.seconds]
        found = [one.compiled.seconds for one in kept if one.compiled.seconds]
        return min(found) if found and self.compiled else self.pace * (self.traced_base + self.keeping_everything)


def last_word(searched: Tried, able: Sequence[Tried]) -> tuple[Tried, list[str]]:
    """The plan among the compiled steps that fit, and notes; `searched` is the search's choice, by the traced estimate.

    The plan is the fastest step as compiled. Among steps within `TELLS` of the fastest, the simplest is chosen: a named policy
    before a mix, no offload before offload. If a step has no compiled time, `searched` is the plan.
    """
    if any(not one.compiled.seconds for one in able):
        return searched, []
    fastest = min(able, key=lambda one: (_seconds(one), one is not searched))
    near = [one for one in able if _seconds(fastest) >= (1 - TELLS) * _seconds(one)]
    chosen = min(near, key=lambda one: (*_complexity(one.candidate), _seconds(one), one is not searched))
    return chosen, [*_notes(searched, fastest, chosen)]


def _notes(searched: Tried, fastest: Tried, chosen: Tried) -> Iterable[str]:
    if _seconds(fastest) < _seconds(chosen):
        yield (
            f"As compiled, {_name(fastest)} is {_percent(fastest, chosen)} % faster. The estimate cannot tell apart times "
            f"within {100 * TELLS:.0f} %, so the plan is the simpler step, {_name(chosen)}"
        )
    if _seconds(chosen) < _seconds(searched) and _name(chosen) != _name(searched):
        yield (
            f"As compiled, {_name(chosen)} is {_percent(chosen, searched)} % faster than {_name(searched)}, which the traced "
            "estimate ranks first"
        )


def _seconds(tried: Tried) -> float:
    return tried.compiled.seconds or 0.0


def _percent(fast: Tried, slow: Tried) -> str:
    return f"{100 * (1 - _seconds(fast) / _seconds(slow)):.1f}"


def _name(tried: Tried) -> str:
    return tried.candidate.name or ("a mix of policies that offloads" if tried.candidate.host_bytes else "a mix of policies")


def _complexity(candidate: StepCandidate) -> tuple[bool, bool]:
    return not candidate.name or bool(candidate.inside), candidate.host_bytes > 0
