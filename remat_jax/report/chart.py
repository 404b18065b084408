"""Charts of points and lines over two axes, with names beside the points; the frontier of memory and time.

The frontier is a line, named policies are points, the plan is a ring, and the budget is a dashed line.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from remat_jax.report.document import escaped
from remat_jax.report.svg import (
    BLUE,
    GREY,
    INK,
    VERMILLION,
    WIDTH,
    AxisScale,
    Key,
    Picture,
    Place,
    legend_height,
    text_width,
)
from remat_jax.report.tables import byte_unit, scaled_bytes, time_unit

Box = tuple[float, float, float, float]
"""Least x, least y, largest x, largest y in pixels; y grows downwards."""

_DISTANCES = (9, 12, 16, 22, 30, 40, 52, 66, 82, 100, 122, 148, 178)
_DIRECTIONS = 24
_NEAR_RINGS = 6
"""The rings in which a label crosses the line of the budget rather than go further away."""
_CROSSES = 1e-6
"""Less than any overlap."""
_CLEARANCE, _RADIUS, _STEP = 2.0, 6.0, 6.0
_LETTERS = 12
_RING = 11
FRONTIER, THE_PLAN = "frontier", "the plan"
"""Names of the series that the page's script reads: the slider's points, and the ring around the plan."""
UNUSABLE = "a named policy that cannot be the plan"
_FAR, _NEAR = 1.25, 1.12
"""The upper edge above the slowest point of the line, and the frame above the upper edge (`_spread` of the times)."""


@dataclass(frozen=True)
class Series:
    """One quantity: the (x, y) of the corners of its `line`, of its marked `points`, and of the `rings` around points.

    `hollow`, `names` and `tooltips` are empty, or have an entry for each marked point; by default a tooltip is the point's name
    and values. A series with an empty `label` has no legend entry. `dashed` and `faint` apply to the line.
    """

    label: str
    colour: str
    line: Sequence[Place] = ()
    points: Sequence[Place] = ()
    hollow: Sequence[bool] = ()
    names: Sequence[str] = ()
    tooltips: Sequence[str] = ()
    shape: str = "circle"
    size: float = 5.0
    dashed: bool = False
    faint: bool = False
    rings: Sequence[Place] = ()

    @property
    def key(self) -> Key:
        """The legend entry."""
        shape = self.shape if self.points or self.rings else ""
        return Key(self.label, self.colour, shape, hollow=bool(self.rings), line=bool(self.line), dashed=self.dashed)


@dataclass(frozen=True)
class Panel:
    """One pair of axes; the first series is drawn first, behind the others.

    Attributes:
        binary_x, binary_y: whether the x axis, or the y axis, is logarithmic to base 2.
        from_zero: whether the y axis begins at zero.
        percent: whether y values are shares, written in percent.
        limit: the name and the x value of a dashed vertical line.
        keys: further legend entries.
    """

    title: str
    xlabel: str
    ylabel: str
    series: Sequence[Series] = field(default_factory=tuple)
    binary_x: bool = False
    binary_y: bool = False
    from_zero: bool = False
    percent: bool = False
    limit: tuple[str, float] | None = None
    keys: Sequence[Key] = ()


def chart(panels: Sequence[Panel], height: float = 460.0, note: str = "", width: float = WIDTH) -> Picture:
    """The panels side by side, each with its legend below, and a note at the foot.

    Raises `ValueError` if there is no panel, or if a panel has no point.

    >>> picture = chart([Panel("t", "x", "y", [Series("a", "#222222", [(1, 2), (2, 3)], [(1, 2)])])])
    >>> picture.svg().count("<circle"), ">a<" in picture.svg()  # the point and its key
    (2, True)
    """
    if not panels:
        raise ValueError("panels is empty: expected at least one")
    for position, panel in enumerate(panels):
        if not _places(panel):
            raise ValueError(f"panels[{position}] has no point to draw: give its series some")
    panel_width = width / len(panels)
    legends = [[series.key for series in panel.series if series.label] + list(panel.keys) for panel in panels]
    below = max(legend_height(keys, panel_width - 90) for keys in legends)
    picture = Picture(height + below + 24 * bool(note), width)
    for at, (panel, keys) in enumerate(zip(panels, legends, strict=True)):
        left = panel_width * at
        _draw(picture, panel, (left + 78, 40, left + panel_width - 16, height - 62))
        picture.legend(keys, left + 78, height - 8, panel_width - 90)
    if note:
        picture.text((12, height + below + 12), note, size=12, colour=GREY)
    return picture


def _places(panel: Panel) -> list[Place]:
    return [place for series in panel.series for place in (*series.line, *series.points, *series.rings)]


def _draw(picture: Picture, panel: Panel, area: Box) -> None:
    left, top, right, bottom = area
    xs, ys = zip(*_places(panel), strict=True)
    limits = [] if panel.limit is None else [panel.limit[1]]
    x = AxisScale(*_spread([*xs, *limits], panel.binary_x, 0.08), left, right, panel.binary_x)
    low, high = _spread(ys, panel.binary_y, 0.12)
    y = AxisScale(0.0 if panel.from_zero and not panel.binary_y else low, high, bottom, top, panel.binary_y)
    picture.text((left, top - 16), panel.title, size=14, look='font-weight="bold"')
    picture.x_axis(x, top, bottom, panel.xlabel)
    picture.y_axis(y, left, right, panel.ylabel, "{:.0%}".format if panel.percent else "{:g}".format)

    def at(places: Sequence[Place]) -> list[Place]:
        return [(x(across), y(up)) for across, up in places]

    taken = [box for series in panel.series for box in boxes_along(at(series.line))]
    taken += [(px - 5, py - 5, px + 5, py + 5) for series in panel.series for px, py in at(series.points) if not series.names]
    taken += [(px - _RING, py - _RING, px + _RING, py + _RING) for series in panel.series for px, py in at(series.rings)]
    crossed: list[Box] = []
    if panel.limit is not None:
        name, limit = panel.limit[0], x(panel.limit[1])
        taken.append((limit - 6 - text_width(name, _LETTERS), top + 13 - _LETTERS, limit - 6, top + 16))
        crossed = boxes_along([(limit, top), (limit, bottom)])
    named = [
        (place, name, series.colour)
        for series in panel.series
        for place, name in zip(at(series.points), series.names, strict=bool(series.names))
        if name
    ]
    boxes = place_labels(
        [place for place, *_ in named], [_size(name) for _, name, _ in named], area, taken=taken, crossed=crossed
    )
    if panel.limit is not None:
        name, value = panel.limit
        for start, end in _outside_boxes(x(value), (top, bottom), boxes):
            picture.line([(x(value), start), (x(value), end)], VERMILLION, 1.3, dashed=True)
        picture.text((x(value) - 6, top + 13), name, size=_LETTERS, colour=VERMILLION, anchor="end")
    for series in panel.series:
        if series.line:
            picture.line(at(series.line), series.colour, 1.8, dashed=series.dashed, opacity=0.35 if series.faint else 1.0)
    for series in panel.series:
        with picture.group(f'data-series="{escaped(series.label)}"'):
            for index, place in enumerate(at(series.points)):
                is_hollow = bool(series.hollow) and series.hollow[index]
                tooltip = series.tooltips[index] if series.tooltips else _values(series, index)
                picture.mark(series.shape, place, series.colour, series.size, hollow=is_hollow, tooltip=tooltip)
            for place in at(series.rings):
                picture.mark(series.shape, place, series.colour, _RING, fill="none")
    for (place, name, colour), (left, top, right, bottom) in zip(named, boxes, strict=True):
        nearest = (min(max(place[0], left), right), min(max(place[1], top), bottom))
        if math.dist(nearest, place) > 20:  # a line connects a distant name to its point
            picture.line([place, nearest], GREY, 0.8)
        picture.text((left + 4, bottom - 0.3 * _LETTERS), name, size=_LETTERS, colour=colour)


def _size(name: str) -> tuple[float, float]:
    return text_width(name, _LETTERS) + 8, _LETTERS * 1.2


def _outside_boxes(x: float, span: tuple[float, float], boxes: Sequence[Box]) -> Iterator[tuple[float, float]]:
    """The parts of a vertical line at `x` that are in none of the boxes.

    >>> list(_outside_boxes(5, (0, 100), [(0, 20, 9, 30), (6, 40, 9, 50), (0, 25, 9, 35)]))
    [(0, 20), (35, 100)]
    """
    start, end = span
    for left, top, right, bottom in sorted(boxes, key=lambda box: box[1]):
        if left < x < right:
            if top > start:
                yield start, top
            start = max(start, bottom)
    if start < end:
        yield start, end


def _values(series: Series, index: int) -> str:
    name = f"{series.names[index]}: " if series.names else ""
    return name + ", ".join(f"{value:.4g}" for value in series.points[index])


def _spread(values: Sequence[float], binary: bool, share: float) -> tuple[float, float]:
    """The range of the values, widened on both sides by `share` times its length."""
    if binary:
        low, high = _spread([math.log2(value) for value in values], False, share)
        return 2.0**low, 2.0**high
    low, high = min(values), max(values)
    # Large values that differ only in their last digit are drawn as equal values.
    margin = share * (high - low if high - low > 1e-9 * abs(high) else abs(high) or 1.0)
    return low - margin, high + margin


# --- placing labels ----------------------------------------------------------------------------------------------------


def place_labels(
    points: Sequence[tuple[float, float]],
    sizes: Sequence[tuple[float, float]],
    area: Box,
    *,
    taken: Sequence[Box] = (),
    crossed: Sequence[Box] = (),
) -> list[Box]:
    """For each point, a box of the given size near the point, inside `area`, clear of other boxes, all points and `taken`.

    Boxes are tried in rings around each point, the most crowded points first. A box in a near ring may overlap the boxes
    `crossed` if no box there is clear of them. If no box is free, the label gets the box with the least overlap.
    """
    obstacles = [(x - _RADIUS, y - _RADIUS, x + _RADIUS, y + _RADIUS) for x, y in points] + list(taken)
    placed: dict[int, Box] = {}

    def nearness(index: int) -> float:
        return sum(1 / (1 + math.dist(points[index], other)) for other in points)

    for index in sorted(range(len(points)), key=nearness, reverse=True):
        best, least = (0.0, 0.0, 0.0, 0.0), math.inf
        for number, box in enumerate(_candidates(points[index], sizes[index])):
            if number == _NEAR_RINGS * _DIRECTIONS and least < _CROSSES:
                break
            overlap = sum(_shared(box, other) for other in [*obstacles, *placed.values()]) + _outside(box, area)
            overlap += _CROSSES / 2 if overlap == 0 and any(_shared(box, other) for other in crossed) else 0
            if overlap < least:
                best, least = box, overlap
            if overlap == 0:
                break
        placed[index] = best
    return [placed[index] for index in range(len(points))]


def boxes_along(path: Sequence[Sequence[float]]) -> list[Box]:
    """Small adjacent boxes along the line through `path`, as obstacles for labels."""
    boxes: list[Box] = []
    for (x0, y0), (x1, y1) in itertools.pairwise(path):
        parts = max(1, math.ceil(math.dist((x0, y0), (x1, y1)) / _STEP))
        for part in range(parts + 1):
            x, y = x0 + (x1 - x0) * part / parts, y0 + (y1 - y0) * part / parts
            boxes.append((x - 1, y - 1, x + 1, y + 1))
    return boxes


def _candidates(point: tuple[float, float], size: tuple[float, float]) -> Iterator[Box]:
    """Boxes of `size` around the point, the nearest first; at each distance, the box at the right is the first."""
    (x, y), (width, height) = point, size
    for distance in _DISTANCES:
        for step in range(_DIRECTIONS):
            # 0, 1, -1, 2, -2, …: from the right, turning to both sides.
            turn = (step + 1) // 2 * (1 if step % 2 else -1)
            angle = 2 * math.pi * turn / _DIRECTIONS
            across, up = math.cos(angle), math.sin(angle)
            # In every direction, the side of the box that faces the point is at `distance`.
            left = x + across * distance - width * (1 - across) / 2
            bottom = y + up * distance - height * (1 - up) / 2
            yield (left, bottom, left + width, bottom + height)


def _shared(first: Box, second: Box) -> float:
    width = min(first[2], second[2]) - max(first[0], second[0]) + _CLEARANCE
    height = min(first[3], second[3]) - max(first[1], second[1]) + _CLEARANCE
    return width * height if width > 0 and height > 0 else 0.0


def _outside(box: Box, area: Box) -> float:
    across = max(0.0, area[0] - box[0]) + max(0.0, box[2] - area[2])
    up = max(0.0, area[1] - box[1]) + max(0.0, box[3] - area[3])
    return across * (box[3] - box[1]) + up * (box[2] - box[0])


class FrontierPoint(NamedTuple):
    """A training step: its device memory, its estimated time, and whether it was compiled; only a named policy has a `name`.

    A policy that is not `usable` cannot be the plan, whatever its memory; its tooltip says why.
    """

    device_bytes: int
    seconds: float
    compiled: bool
    tooltip: str
    name: str = ""
    usable: bool = True


def frontier_figure(
    frontier: Sequence[FrontierPoint],
    named: Sequence[FrontierPoint],
    chosen: FrontierPoint,
    budget: int,
    title: str = "",
    width: float = WIDTH,
) -> Picture:
    """The frontier (the least memory first), the named policies, the `chosen` plan in a ring, and the budget as a dashed line.

    Points that were not compiled are hollow, and policies that are not usable are grey diamonds. Raises `ValueError` for an
    empty frontier.

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
    far = _FAR * max(point.seconds for point in (*frontier, chosen))
    slowest = max([far, *(point.seconds for point in points if point.seconds <= _NEAR * far)])

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

    drawn = [series(FRONTIER, BLUE, frontier, line=[at(point) for point in frontier])]
    for name, colour, shape, usable in (("a named policy", INK, "circle", True), (UNUSABLE, GREY, "diamond", False)):
        if policies := [point for point in named if point.usable is usable]:
            drawn.append(series(name, colour, policies, names=[label(point) for point in policies], shape=shape))
    drawn.append(Series(THE_PLAN, VERMILLION, rings=[at(chosen)]))
    hollow = Key("hollow: predicted, not compiled", GREY, shape="circle", hollow=True)
    limit = ("budget", scaled_bytes(budget, unit))
    panel = Panel(title, f"device memory, {unit}", f"estimated step, {word}", drawn, limit=limit, keys=[hollow])
    return chart([panel], height=540, width=width)
