"""What a search knows: the problem, the estimates, and the compiled steps. Generators propose candidates from it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist

from remat_jax.planning.candidate import Cuts, StepCandidate, Tried
from remat_jax.planning.fit_memory import Fit
from remat_jax.planning.problem import KEEP_ALL, Kind
from remat_jax.planning.solved import Solved
from remat_jax.planning.times import Times

WORTH_COMPILING = 3e-3
"""A candidate is worth a compilation if it may gain at least this share of the step's time."""

_NAMED_DOUBT, _MESH_DOUBT, _MIX_DOUBT = 0.05, 0.1, 0.01
"""How far a time at the family's pace may be off, as a share of the step: for a named policy, groups or a memory limit; for
these on several devices, where the traced estimate does not know which collectives overlap compute; and for a mix."""
_COPIES_DOUBT = 0.25
"""How much of an offload's copies may not be hidden although the estimate says so, or the reverse."""
_LEAST_CHANCE = 0.02
"""The chance of what is predicted not to fit, but may."""
_TEACHES, _FULL_CHANCE = "full", 0.5
"""While nothing fits, `full` has at least this chance, because the memory of groups of layers follows from it."""
_UNIT = NormalDist()


@dataclass(frozen=True)
class Known:
    """What is known so far of the steps of one workload.

    Attributes:
      fit: the budgets, the compiled steps, and the memory model fitted to them.
      times: the time of a step, compiled or estimated.
      solved: the solver's plans.
      named: the applicable named policies.
      recut: returns a candidate with its scans cut at the given layers.
      scanned: whether layers are scanned, so that layers that differ cut the scan.
      devices, has_times: of the target: the number of devices, and whether compiled steps have times.
      as_written: the model with its own checkpoints, if the policies replace these.
      kinds: the kinds of blocks, for groups of layers.
    """

    fit: Fit
    times: Times
    solved: Solved
    named: Sequence[StepCandidate]
    recut: Callable[[StepCandidate, Cuts], StepCandidate] = lambda candidate, cuts: candidate
    scanned: bool = False
    devices: int = 1
    has_times: bool = True
    as_written: StepCandidate | None = None
    kinds: Sequence[Kind] = ()

    @property
    def worth(self) -> float:
        """The least gain in seconds for which a candidate is compiled."""
        return WORTH_COMPILING * self.times.pace * self.times.traced_base

    @property
    def best(self) -> Tried | None:
        """The fastest compiled step that fits.

        On ties, a step without checkpoints is preferred, then one without offload, then one with less memory.
        """

        # At equal times, the step without any checkpoint is certainly no slower.
        def rank(tried: Tried) -> tuple[float, bool, bool, int]:
            candidate = tried.candidate
            return self.seconds(candidate), candidate.checkpoints, candidate.host_bytes > 0, tried.compiled.device_bytes

        return min(self.fit.fitting, key=rank, default=None)

    @property
    def in_hand(self) -> Tried | None:
        """The best step, or one that exceeds the budget only with other kernels (`Compiled.more`), by as little as possible."""
        checked = [step for step in self.fit.tried if step.compiled.more is not None]
        return self.best or min(checked, key=lambda step: step.compiled.most_bytes, default=None)

    def named_policy(self, name: str) -> StepCandidate | None:
        """The candidate of a named policy; None if the policy is not applicable."""
        return next((candidate for candidate in self.named if candidate.name == name), None)

    def seconds(self, candidate: StepCandidate) -> float:
        """The time of a whole step, compiled or estimated."""
        return self.times.of(candidate)[0]

    def chance(self, candidate: StepCandidate) -> float:
        """The chance that a candidate fits; 0 if it surely does not.

        While nothing fits, everything has a chance, and `full` a fair one. A named policy that is predicted not to fit has one
        unless its arguments and its saved bytes alone exceed the budget.
        """
        if candidate.name == _TEACHES and not self.fit.fitting:
            return max(_FULL_CHANCE, self._chance(candidate))
        return self._chance(candidate)

    def _chance(self, candidate: StepCandidate) -> float:
        if candidate.host_bytes > self.fit.host_left or self.fit.cannot_fit(candidate):
            return 0.0
        room = self.fit.within(candidate) - self.fit.expected(candidate)
        chance = _UNIT.cdf(room / self.fit.error(candidate))
        if self.fit.may_fit(candidate) or candidate.family == "named" or not self.fit.fitting:
            return max(_LEAST_CHANCE, chance)
        return 0.0

    def gain(self, candidate: StepCandidate, best: StepCandidate | None) -> float:
        """The expected seconds by which a candidate, if it fits, is faster than `best`; None counts as twice the step's time.

        It is above 0 for a candidate estimated to be slower, if the estimate may be off by that much.
        """
        if best is None:
            return 2 * self.times.pace * self.times.traced_base - self.seconds(candidate)
        gain, doubt = self.seconds(best) - self.seconds(candidate), self._doubt(candidate, best)
        if not doubt:
            return max(0.0, gain)
        return gain * _UNIT.cdf(gain / doubt) + doubt * _UNIT.pdf(gain / doubt)

    def _doubt(self, candidate: StepCandidate, best: StepCandidate) -> float:
        # Nothing is compiled against a step that keeps everything on the word of doubts.
        if not self.has_times or best.name in KEEP_ALL:
            return 0.0
        share = _MIX_DOUBT if candidate.family == "mix" else _MESH_DOUBT if self.devices > 1 else _NAMED_DOUBT
        doubt = share * self.times.pace * self.times.traced_base if candidate.family != best.family or candidate.name else 0.0
        link = self.fit.guess.link
        if link is not None and candidate.host_bytes != best.host_bytes:
            away = abs(candidate.host_bytes - best.host_bytes)
            doubt = math.hypot(doubt, _COPIES_DOUBT * (link.exposed_out(away, 0.0) + link.exposed_in(away, 0.0)))
        return math.hypot(doubt, self.times.pace * candidate.doubt)
