"""The time of a step: its compiled time, or its traced time at the pace of the compiled steps."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from remat_jax.planning.candidate import StepCandidate, Tried
from remat_jax.planning.fit_memory import Fit


@dataclass(frozen=True)
class Times:
    """The time of a whole step: its compiled time (`Compiled.seconds`), or the traced estimate times a pace.

    If a step that the compiler finished has no compiled time, as on a CPU, every time is the traced estimate. This estimate is
    `traced_base` plus the time to keep, recompute and copy residuals.
    """

    fit: Fit
    traced_base: float

    @property
    def compiled(self) -> bool:
        """Whether every step that the compiler finished has a compiled time."""
        return bool(self._compiled) and all(step.compiled.seconds for step in self._compiled)

    @property
    def _compiled(self) -> list[Tried]:
        """The compiled steps without those that the compiler refused or did not finish, which have no time."""
        return [step for step in self.fit.compiled if not step.compiled.refused and not step.compiled.unfinished]

    @property
    def pace(self) -> float:
        """The median ratio of compiled to traced time over the compiled steps; 1 if traced times are used."""
        return self._median(self._compiled)

    def pace_of(self, candidate: StepCandidate) -> float:
        """The pace of the step that is near (`StepCandidate.near`), else of the compiled steps that are most like it.

        Alike are steps of one family that both offload or both do not, then those of one family, then those that both offload
        or both do not: how much of the copies compute hides says nothing about a step without copies.
        """
        near = [step for step in self._compiled if step.candidate == candidate.near]
        copies = [step for step in self._compiled if bool(step.candidate.host_bytes) == bool(candidate.host_bytes)]
        family = [step for step in self._compiled if step.candidate.family == candidate.family]
        both = [step for step in family if step in copies]
        return self._median(near or both or family or copies or self._compiled)

    def _median(self, steps: list[Tried]) -> float:
        if not self.compiled:
            return 1.0
        ratios = [(step.compiled.seconds or 0.0) / self.traced(step.candidate) for step in steps]
        return statistics.median(ratios or [1.0])

    def traced(self, candidate: StepCandidate) -> float:
        """The traced estimate of a step's seconds."""
        return self.traced_base + candidate.seconds

    def of(self, candidate: StepCandidate) -> tuple[float, bool]:
        """The seconds of a step, and whether they come from its compiled schedule."""
        tried = self.fit.known(candidate)
        if tried is not None and self.compiled and tried.compiled.seconds:
            return tried.compiled.seconds, True
        return self.pace_of(candidate) * self.traced(candidate), False
