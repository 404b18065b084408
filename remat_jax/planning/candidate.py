"""Ways to run a step: what their blocks do, what that costs by the estimate, and what the compiler said of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from remat_jax.planning.choices import Choices, Cuts
from remat_jax.planning.fitting import Loads


@dataclass(frozen=True)
class StepCandidate:
    """A way to run the step.

    Attributes:
      name: of a named policy, or the text of groups of layers; empty for the planner's own.
      loads: what every single block does to memory.
      seconds: over a step that keeps everything, estimated.
      choices: what every single block does with its residuals; None for a named policy.
      like: of a named policy, choices that do the same; None where there are none.
      inside: of groups of layers, the policy that each layer of a group is under; else empty.
      grouped: how many layers are in groups, the first ones.
      expected_bytes: on the device, where that is predicted in another way than by the loads.
      cuts: where a scan is cut between blocks that do the same. It costs no time by the estimate, and other memory.
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
    def of_a_layer(self) -> str:
        """The named policy that each layer is under; empty for the planner's own."""
        return self.inside or self.name

    @property
    def done(self) -> Choices | None:
        """What every single block does with its residuals, as far as choices can say it."""
        return self.like if self.choices is None else self.choices

    @property
    def host_bytes(self) -> int:
        """In host memory, estimated."""
        return sum(load.away for load in self.loads)

    def is_same(self, other: StepCandidate) -> bool:
        """Whether the two are one and the same program, as far as can be told."""
        alike = (self.name == "off") == (other.name == "off") and (self.loads, self.cuts, self.inside) == (
            other.loads,
            other.cuts,
            other.inside,
        )
        return alike and math.isclose(self.seconds, other.seconds, rel_tol=1e-9, abs_tol=1e-15)


FAILED = 2**62
"""The device bytes of what could not be compiled."""


@dataclass(frozen=True)
class Compiled:
    """What the compiler said of a candidate. `sound` is false where it must not be run."""

    device_bytes: int
    host_bytes: int
    sound: bool = True
    sizes: Any = field(default=None, compare=False)

    @property
    def seconds(self) -> float | None:
        """The modelled time of the compiled step; None where it is not known."""
        return None if self.sizes is None else self.sizes.seconds


@dataclass(frozen=True)
class Tried:
    """A candidate that was compiled, and what had been expected of it."""

    candidate: StepCandidate
    compiled: Compiled
    predicted_bytes: int


Own = Callable[[Choices], StepCandidate]
Recut = Callable[[StepCandidate, Cuts], StepCandidate]
"""The same candidate with its scans cut at these places, as far as there is a scan, and nowhere else between equal blocks."""
