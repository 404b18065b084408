"""Candidates for a step: the choices of their blocks, their estimated cost, and their compiled memory."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from remat_jax.planning.choices import Choices, Cuts
from remat_jax.planning.fitting import Loads


@dataclass(frozen=True)
class StepCandidate:
    """One way to run the step.

    Attributes:
      name: the named policy, or the text of groups of layers; empty for a plan of the solver.
      loads: the effect of every single block on memory.
      seconds: what the residuals cost, estimated: keeping, recomputing and copying them.
      choices: the choice of every single block for each of its residuals; None for a named policy.
      like: the choices that are equivalent to a named policy; None if there are none.
      inside: for groups of layers, the policy of each layer inside a group; else empty.
      grouped: the number of layers in groups, which are the first layers.
      expected_bytes: the predicted device bytes, if they are not predicted from the loads.
      cuts: where a scan is cut between blocks with equal choices. By the estimate a cut changes memory but not time.
    """

    name: str
    loads: Loads
    seconds: float
    choices: Choices | None = None
    cuts: Cuts = ()
    like: Choices | None = None
    inside: str = ""
    grouped: int = 0
    expected_bytes: int | None = None

    @property
    def policy_name(self) -> str:
        """The named policy of every block, inside of groups if there are any; empty for a plan of the solver."""
        return self.inside or self.name

    @property
    def done(self) -> Choices | None:
        """The choices of every single block; None if no choices describe the candidate."""
        return self.like if self.choices is None else self.choices

    @property
    def host_bytes(self) -> int:
        """Estimated bytes in host memory."""
        return sum(load.away for load in self.loads)

    def is_same(self, other: StepCandidate) -> bool:
        """Whether the estimates cannot distinguish the two programs."""
        alike = (self.name == "off") == (other.name == "off") and (self.loads, self.cuts, self.inside) == (
            other.loads,
            other.cuts,
            other.inside,
        )
        return alike and math.isclose(self.seconds, other.seconds, rel_tol=1e-9, abs_tol=1e-15)


FAILED = 2**62
"""The device bytes of a candidate that could not be compiled."""


@dataclass(frozen=True)
class Compiled:
    """The compiled memory of a candidate. `sound` is False if the compiled program must not be run."""

    device_bytes: int
    host_bytes: int
    sound: bool = True
    sizes: Any = field(default=None, compare=False)

    @property
    def seconds(self) -> float | None:
        """The modelled time of the compiled step; None if unknown."""
        return None if self.sizes is None else self.sizes.seconds


@dataclass(frozen=True)
class Tried:
    """A compiled candidate and its predicted memory."""

    candidate: StepCandidate
    compiled: Compiled
    predicted_bytes: int


Own = Callable[[Choices], StepCandidate]
Recut = Callable[[StepCandidate, Cuts], StepCandidate]
"""The same candidate with its scans cut at the given places and nowhere else between equal blocks."""
