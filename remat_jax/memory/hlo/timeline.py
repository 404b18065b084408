"""Device memory over a compiled schedule: which buffers are alive when, and what the peak would be without some of them.

A buffer that is taken away at the peak seldom gives all its bytes back, because another peak is not much lower. So what is said
of a change that was not compiled (a head in chunks, an attention kernel) is read from the whole schedule.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import NamedTuple

from remat_jax.memory.hlo.live import LiveBuffer, Place, Schedule

_LARGE = 0.0002
"""From which share of the peak on a buffer is followed by itself; smaller buffers count together. Of a large unrolled model one
array of a layer is less than a thousandth, and the arrays of all layers are most of the memory.
"""


RESULT = "result"
"""The phase of what a step gives back in no argument's place."""


class Span(NamedTuple):
    """A buffer that is alive in segments of the schedule, from the first to the last."""

    first: int
    last: int
    buffer: int


@dataclass(frozen=True)
class Timeline:
    """The schedule in segments, in each of which the same large buffers are alive.

    Attributes:
      small: the most that small buffers take together in each segment, in bytes.
      buffers: the large buffers. The new value of a donated argument is that argument. Whatever else is there at the end of the
        step has the phase `result`.
      spans: where they are alive. Of buffers that lie in one place at one time, one has a span.

    >>> logits, kept = LiveBuffer("mul", "", "backward", 80, "f32[20]"), LiveBuffer("x", "", "forward", 60, "f32[15]")
    >>> timeline = Timeline((5, 5, 5), (logits, kept), (Span(1, 1, 0), Span(0, 2, 1)))
    >>> timeline.peak(), timeline.peak(lambda buffer: 0.25 if buffer is logits else 1)
    (145, 85)
    """

    small: tuple[int, ...]
    buffers: tuple[LiveBuffer, ...]
    spans: tuple[Span, ...]

    def peak(self, share: Callable[[LiveBuffer], float] = lambda buffer: 1.0) -> int:
        """The most that is alive at one time, where `share` says which part of each large buffer is there."""
        changes = [0.0] * (len(self.small) + 1)
        for span in self.spans:
            size = share(self.buffers[span.buffer]) * self.buffers[span.buffer].nbytes
            changes[span.first] += size
            changes[span.last + 1] -= size
        return max((round(small + large) for small, large in zip(self.small, accumulate(changes), strict=False)), default=0)

    @classmethod
    def of(cls, schedule: Schedule) -> Timeline:
        """The timeline of a compiled step."""
        totals = schedule.totals()
        least = int(_LARGE * max(totals.values(), default=0)) + 1
        large = {value: span for value, span in schedule.ranges.items() if schedule.places[value].nbytes >= least}
        edges = sorted({0} | {edge for start, end in large.values() for edge in (start, end + 1)})
        small = [0] * len(edges)
        for moment, nbytes in schedule.totals(most=least - 1).items():
            segment = bisect_right(edges, moment) - 1
            small[segment] = max(small[segment], nbytes)
        end_of_step = max((end for _, end in schedule.ranges.values()), default=0)
        described = {value: schedule.buffer(value) for value in large}
        for value, (_, end) in large.items():
            if end == end_of_step and described[value].phase != "argument":
                described[value] = replace(described[value], phase=RESULT)
        # A donated argument's place takes its new value: that counts as the argument.
        arguments = {schedule.places[value]: one for value, one in described.items() if one.phase == "argument"}
        buffers: dict[LiveBuffer, int] = {}
        in_place: dict[Place, list[Span]] = {}
        for value, (start, end) in large.items():
            place = schedule.places[value]
            buffer = buffers.setdefault(arguments.get(place, described[value]), len(buffers))
            first, last = bisect_right(edges, start) - 1, bisect_right(edges, end) - 1
            in_place.setdefault(place, []).append(Span(first, last, buffer))
        spans = tuple(one for together in in_place.values() for one in _apart(together))
        return cls(tuple(small), tuple(buffers), spans)


def _apart(spans: list[Span]) -> Iterator[Span]:
    """Spans of one place, where of several at one time the one that began last stands.

    >>> list(_apart([Span(0, 9, 1), Span(3, 5, 2)]))
    [Span(first=0, last=2, buffer=1), Span(first=3, last=5, buffer=2), Span(first=6, last=9, buffer=1)]
    """
    edges = sorted({edge for one in spans for edge in (one.first, one.last + 1)})
    for start, end in pairwise(edges):
        alive = [one for one in spans if one.first <= start <= one.last]
        if alive:
            yield Span(start, end - 1, max(alive).buffer)
