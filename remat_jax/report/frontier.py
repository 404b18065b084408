"""Memory against time: the frontier as a line, named policies as points, the plan ringed, the budget as a dashed line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from remat_jax.report.labels import place_labels
from remat_jax.report.style import BLUE, GREY, INK, VERMILLION, new_figure, style
from remat_jax.report.tables import byte_unit, scaled_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Place = tuple[int, float, bool]
"""Device bytes, seconds, whether compiled."""

_FAR = 1.25
_TIMES = (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6), ("ns", 1e-9))


def frontier_figure(
    frontier: Sequence[Place], named: Sequence[tuple[str, Place]], chosen: Place, budget: int, title: str
) -> Figure:
    """Device memory against the estimated time of a step, as a Matplotlib figure.

    Args:
      frontier: the points to join, the smallest first. Points that were not compiled are hollow.
      named: names and places of other policies.
      chosen: the plan, ringed.
      budget: drawn as a dashed line; points to its right do not fit.
      title: the title above the figure.

    Raises:
      ValueError: the frontier is empty.
      ImportError: Matplotlib is not installed.

    >>> figure = frontier_figure([(2**30, 1.0, True)], [("full", (2**30, 1.2, True))], (2**30, 1.0, True), 2**31, "t")
    >>> figure.axes[0].get_xlabel(), [text.get_text() for text in figure.axes[0].texts]
    ('device memory, GiB', ['budget', 'full'])
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

    def called(name: str, place: Place) -> str:
        return name if place[1] <= slowest else f"{name} ↑ {place[1] / second:.3g} {word}"

    with style():
        figure = new_figure(5.4)
        axes = figure.subplots()
        axes.set_title(title, pad=10)
        axes.set(xlabel=f"device memory, {unit}", ylabel=f"estimated step, {word}")
        axes.grid(True)
        axes.margins(0.08, 0.12)
        axes.plot(*zip(*map(at, frontier), strict=True), color=BLUE, linewidth=1.5, zorder=3, label="frontier")
        _marks(axes, [at(place) for place in frontier], [place[2] for place in frontier], BLUE)
        _marks(axes, [at(place) for _, place in named], [place[2] for _, place in named], INK)
        axes.scatter(*at(chosen), 210, facecolors="none", edgecolors=VERMILLION, linewidths=2, zorder=6, label="the plan")
        axes.axvline(scaled_bytes(budget, unit), color=VERMILLION, linestyle=(0, (5, 3)), linewidth=1.2)
        # Inside the axes, since the title is above them.
        axes.annotate(
            "budget",
            (scaled_bytes(budget, unit), 1.0),
            xycoords=axes.get_xaxis_transform(),
            xytext=(-4, -4),
            textcoords="offset points",
            ha="right",
            va="top",
            fontsize=9,
            color=VERMILLION,
        )
        axes.plot([], [], "o", color=INK, label="a named policy")
        axes.plot([], [], "o", markerfacecolor="white", markeredgecolor=GREY, label="hollow: predicted, not compiled")
        axes.legend(loc="upper right", bbox_to_anchor=(1, 0.93))
        _name(
            figure,
            axes,
            [called(*entry) for entry in named],
            [at(place) for _, place in named],
            [at(place) for place in frontier],
        )
    return figure


def _marks(axes: Axes, places: Sequence[tuple[float, float]], filled: Sequence[bool], colour: str) -> None:
    for (x, y), full in zip(places, filled, strict=True):
        axes.scatter(x, y, 42, facecolors=colour if full else "white", edgecolors=colour, linewidths=1.4, zorder=5)


def _name(
    figure: Figure,
    axes: Axes,
    names: Sequence[str],
    places: Sequence[tuple[float, float]],
    others: Sequence[tuple[float, float]],
) -> None:
    """Write each name beside its point, clear of all points."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    if not names:
        return
    scale = 72 / figure.dpi
    renderer = FigureCanvasAgg(figure).get_renderer()
    figure.draw_without_rendering()

    def in_points(data_points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
        return [(float(x) * scale, float(y) * scale) for x, y in axes.transData.transform(data_points)]

    texts = [axes.text(0, 0, name, fontsize=9, color=INK, zorder=7) for name in names]
    extents = [text.get_window_extent(renderer) for text in texts]
    frame = axes.get_window_extent(renderer)
    area = (frame.x0 * scale, frame.y0 * scale, frame.x1 * scale, frame.y1 * scale)
    taken = [(x - 5, y - 5, x + 5, y + 5) for x, y in in_points(others)]
    sizes = [(extent.width * scale, extent.height * scale) for extent in extents]
    boxes = place_labels(in_points(places), sizes, area, taken=taken)
    back = axes.transData.inverted()
    for text, (left, bottom, _, _) in zip(texts, boxes, strict=True):
        text.set(position=back.transform((left / scale, bottom / scale)), verticalalignment="bottom")
        text.set_in_layout(False)
