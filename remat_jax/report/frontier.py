"""Draws memory against time: a line for the frontier, points for named policies, a ring for the plan, and the budget."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from remat_jax.report.chart import Panel, Series, chart
from remat_jax.report.svg import BLUE, GREY, INK, VERMILLION, WIDTH, Key, Picture
from remat_jax.report.tables import byte_unit, scaled_bytes, time_unit

FRONTIER, THE_PLAN = "frontier", "the plan"
"""Names of the series that the page's script reads: the slider's points, and the ring around the selected point."""
_FAR = 1.25


class FrontierPoint(NamedTuple):
    """A training step: its device memory, its estimated time, and whether it was compiled; only a named policy has a `name`."""

    device_bytes: int
    seconds: float
    compiled: bool
    tooltip: str
    name: str = ""


def frontier_figure(
    frontier: Sequence[FrontierPoint],
    named: Sequence[FrontierPoint],
    chosen: FrontierPoint,
    budget: int,
    title: str = "",
    width: float = WIDTH,
) -> Picture:
    """The frontier (the least memory first), the named policies, the `chosen` plan in a ring, and the budget as a dashed line.

    Points that were not compiled are hollow. Raises `ValueError` for an empty frontier.

    >>> chosen, full = FrontierPoint(2**30, 1.0, True, "1 GiB"), FrontierPoint(2**30, 1.2, True, "", "full")
    >>> picture = frontier_figure([chosen], [full], chosen, budget=2**31)
    >>> [text in picture.svg() for text in (">device memory, GiB<", ">budget<", ">full<", "<title>1 GiB</title>")]
    [True, True, True, True]
    """
    if not frontier:
        raise ValueError("frontier is empty: expected at least one point")
    points = [*frontier, chosen, *named]
    unit = byte_unit(max(budget, *(point.device_bytes for point in points)))
    word, second = time_unit(max(point.seconds for point in points))
    # A far slower point would squeeze the other points together: draw it at the upper edge, with its time as text.
    slowest = _FAR * max(point.seconds for point in (*frontier, chosen))

    def at(point: FrontierPoint) -> tuple[float, float]:
        return scaled_bytes(point.device_bytes, unit), min(point.seconds, slowest) / second

    def label(point: FrontierPoint) -> str:
        return point.name if point.seconds <= slowest else f"{point.name} ↑ {point.seconds / second:.3g} {word}"

    def series(name: str, colour: str, points: Sequence[FrontierPoint], **look: Any) -> Series:
        return Series(
            name,
            colour,
            points=[at(point) for point in points],
            hollow=[not point.compiled for point in points],
            tooltips=[point.tooltip for point in points],
            **look,
        )

    drawn = [
        series(FRONTIER, BLUE, frontier, line=[at(point) for point in frontier]),
        series("a named policy", INK, named, names=[label(point) for point in named]),
        Series(THE_PLAN, VERMILLION, rings=[at(chosen)]),
    ]
    hollow = Key("hollow: predicted, not compiled", GREY, shape="circle", hollow=True)
    limit = ("budget", scaled_bytes(budget, unit))
    panel = Panel(title, f"device memory, {unit}", f"estimated step, {word}", drawn, limit=limit, keys=[hollow])
    return chart([panel], height=540, width=width)
