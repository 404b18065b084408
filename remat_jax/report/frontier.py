"""Memory against time: the frontier as a line, named policies as points, the plan ringed, the budget as a dashed line."""

from __future__ import annotations

from collections.abc import Sequence

from remat_jax.report.chart import Panel, Series, chart
from remat_jax.report.svg import BLUE, GREY, INK, VERMILLION, Key, Picture
from remat_jax.report.tables import byte_unit, scaled_bytes

Place = tuple[int, float, bool]
"""Device bytes, seconds, whether compiled."""

_FAR = 1.25
_TIMES = (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6), ("ns", 1e-9))


def frontier_figure(
    frontier: Sequence[Place], named: Sequence[tuple[str, Place]], chosen: Place, budget: int, title: str
) -> Picture:
    """Device memory against the estimated time of a step.

    Args:
      frontier: the points to join, the smallest first. Points that were not compiled are hollow.
      named: names and places of other policies.
      chosen: the plan, ringed.
      budget: drawn as a dashed line; points to its right do not fit.
      title: the title above the picture.

    Raises:
      ValueError: the frontier is empty.

    >>> picture = frontier_figure([(2**30, 1.0, True)], [("full", (2**30, 1.2, True))], (2**30, 1.0, True), 2**31, "t")
    >>> [text in picture.svg() for text in (">device memory, GiB<", ">budget<", ">full<")]
    [True, True, True]
    """
    if not frontier:
        raise ValueError("frontier is empty: expected at least one point")
    places = [*frontier, chosen, *(place for _, place in named)]
    unit = byte_unit(max(budget, *(size for size, _, _ in places)))
    word, second = next((time_unit for time_unit in _TIMES if max(time for _, time, _ in places) >= time_unit[1]), _TIMES[-1])

    # A point that is far slower would squeeze the rest together: draw it at the upper edge, with its time.
    slowest = _FAR * max(time for _, time, _ in (*frontier, chosen))

    def at(place: Place) -> tuple[float, float]:
        return scaled_bytes(place[0], unit), min(place[1], slowest) / second

    line = [at(place) for place in frontier]
    series = [
        Series("frontier", BLUE, line, line, hollow=[not place[2] for place in frontier]),
        Series(
            "a named policy",
            INK,
            points=[at(place) for _, place in named],
            hollow=[not place[2] for _, place in named],
            names=[name if place[1] <= slowest else f"{name} ↑ {place[1] / second:.3g} {word}" for name, place in named],
        ),
        Series("the plan", VERMILLION, rings=[at(chosen)]),
    ]
    hollow = Key("hollow: predicted, not compiled", GREY, "circle", hollow=True)
    limit = ("budget", scaled_bytes(budget, unit))
    return chart(
        [Panel(title, f"device memory, {unit}", f"estimated step, {word}", series, limit=limit, keys=[hollow])], height=540
    )
