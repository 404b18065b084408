"""Device memory over a compiled schedule: when each buffer is alive, and the peak without some buffers.

Removing a buffer at the peak seldom frees all its bytes, because another peak is nearly as high. So the effect of a change that
was not compiled is computed from the whole schedule.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import NamedTuple

from remat_jax.memory.hlo.live import BufferPlace, LiveBuffer, Schedule

_LARGE = 0.0002
"""The least share of the peak for which a buffer is tracked by itself; in a large unrolled model, arrays are small."""
RESULT = "result"
"""The phase of a result that does not reuse an argument's buffer."""


class Span(NamedTuple):
    """The segments of the schedule, from `first` to `last`, in which a buffer is alive."""

    first: int
    last: int
    buffer: int


@dataclass(frozen=True)
class Timeline:
    """The schedule divided into segments; the large buffers that are alive change only between segments.

    Attributes:
      small: the largest sum of the small buffers in each segment, in bytes.
      buffers: the large buffers. The new value of a donated argument counts as the argument.
      spans: where the buffers are alive. If several buffers share a place at one time, only one of them has a span.

    >>> logits, kept = LiveBuffer("mul", "", "backward", 80, "f32[20]"), LiveBuffer("x", "", "forward", 60, "f32[15]")
    >>> timeline = Timeline((5, 5, 5), (logits, kept), (Span(1, 1, 0), Span(0, 2, 1)))
    >>> timeline.peak(), timeline.peak(lambda buffer: 0.25 if buffer is logits else 1)
    (145, 85)
    """

    small: tuple[int, ...]
    buffers: tuple[LiveBuffer, ...]
    spans: tuple[Span, ...]

    def peak(self, share: Callable[[LiveBuffer], float] = lambda buffer: 1.0) -> int:
        """The peak in bytes, counting the fraction `share(buffer)` of each large buffer."""
        changes = [0.0] * (len(self.small) + 1)
        for span in self.spans:
            size = share(self.buffers[span.buffer]) * self.buffers[span.buffer].nbytes
            changes[span.first] += size
            changes[span.last + 1] -= size
        return max((round(small + large) for small, large in zip(self.small, accumulate(changes), strict=False)), default=0)

    @classmethod
    def of(cls, schedule: Schedule) -> Timeline:
        """The timeline of a compiled step."""
        least = int(_LARGE * max(schedule.totals().values(), default=0)) + 1
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
        arguments = {schedule.places[value]: buffer for value, buffer in described.items() if buffer.phase == "argument"}
        buffers: dict[LiveBuffer, int] = {}
        in_place: dict[BufferPlace, list[Span]] = {}
        for value, (start, end) in large.items():
            place = schedule.places[value]
            buffer = buffers.setdefault(arguments.get(place, described[value]), len(buffers))
            first, last = bisect_right(edges, start) - 1, bisect_right(edges, end) - 1
            in_place.setdefault(place, []).append(Span(first, last, buffer))
        spans = tuple(span for sharing in in_place.values() for span in _apart(sharing))
        return cls(tuple(small), tuple(buffers), spans)


def _apart(spans: list[Span]) -> Iterator[Span]:
    """The spans of one place without overlaps: of several at one time, only the one that began last counts.

    >>> list(_apart([Span(0, 9, 1), Span(3, 5, 2)]))
    [Span(first=0, last=2, buffer=1), Span(first=3, last=5, buffer=2), Span(first=6, last=9, buffer=1)]
    """
    edges = sorted({edge for span in spans for edge in (span.first, span.last + 1)})
    for start, end in pairwise(edges):
        alive = [span for span in spans if span.first <= start <= span.last]
        if alive:
            yield Span(start, end - 1, max(alive).buffer)
