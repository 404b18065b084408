"""What a plan says of its layers and of the ways beside it: plain data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class LayerRow:
    """What happens to one residual in a run of equal layers.

    Attributes:
      residual: its name.
      action: `save`, `offload` or `recompute`.
      bytes: of one layer.
      seconds: what computing it again takes in one layer, its parents being there; None where that is impossible.
    """

    residual: str
    action: str
    bytes: int
    seconds: float | None


@dataclass(frozen=True)
class Part:
    """A run of layers that do the same.

    Attributes:
      block: the block, as reports call it.
      every: how far apart they are: 2 where two kinds of layers of one block take turns in a scan.
      first, layers: the position of the first of them among the calls of the block, in forward order, and how many there are.
      policy: the text of what each of them does.
      saved_bytes, offloaded_bytes, recomputed_bytes: of all these layers together.
      rows: the residuals of one layer.
      forward_seconds, backward_seconds: the compute of one layer that keeps everything.
      recompute_seconds, copy_seconds: what one layer takes more: computing again, and copies that its compute does not hide,
        the mean of the layers.
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
        """The block and its layers.

        >>> Part("Layer", 8, 4, "full", 0, 0, 0, (), 0.0, 0.0, 0.0, 0.0).where
        'Layer 8–11'
        """
        if self.layers == 1:
            return f"{self.block} {self.first}"
        turns = f", one in {self.every}" if self.every > 1 else ""
        return f"{self.block} {self.first}–{self.first + (self.layers - 1) * self.every}{turns}"


@dataclass(frozen=True)
class Point:
    """One way to run the step: what it needs, and what it takes.

    Attributes:
      name: of a named policy; empty for a plan of the planner's own.
      device_bytes: of the compiled step where `compiled`, else as predicted; None where the policy is not legal here.
      host_bytes: in host memory, the same way.
      seconds: of a whole step, estimated.
      compiled: whether the compiler was asked.
      parts: what the layers do.
      remark: why it is not considered; empty where it is.
      timed: whether `seconds` are of the compiled schedule; else they are the traced estimate.
    """

    name: str
    device_bytes: int | None
    host_bytes: int
    seconds: float | None
    compiled: bool
    parts: tuple[Part, ...] = ()
    remark: str = ""
    timed: bool = False


def next_bytes(budget: float) -> int:
    """How much more memory a plan asks about: a power of two, from a 32nd to a 16th of the budget, and one GiB at most.

    >>> next_bytes(40 * 2**30) == 2**30, next_bytes(4 * 2**30) == 2**28
    (True, True)
    """
    return min(2**30, 2 ** max(0, int(budget).bit_length() - 5))


def unbeaten(points: Sequence[Point]) -> tuple[Point, ...]:
    """Those that no other beats in both time and device memory, the smallest first.

    >>> [one.device_bytes for one in unbeaten([Point("", n, 0, s, False) for n, s in ((3, 1.0), (1, 2.0), (2, 2.5))])]
    [1, 3]
    """
    found: list[Point] = []
    able = [(one.device_bytes, one.seconds, one) for one in points if one.device_bytes is not None and one.seconds is not None]
    for _, seconds, one in sorted(able, key=lambda entry: entry[:2]):
        if not found or seconds < (found[-1].seconds or 0.0):
            found.append(one)
    return tuple(found)
