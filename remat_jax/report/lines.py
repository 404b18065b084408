"""Line charts: measured points beside the values of a formula."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from remat_jax.report.style import BLUE, GREEN, INK, ORANGE, PURPLE, SKY, VERMILLION, new_figure, style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLOURS = (INK, VERMILLION, BLUE, GREEN, ORANGE, PURPLE, SKY)
_MARKERS = ("o", "s", "D", "^", "v", "P", "X")


@dataclass(frozen=True)
class Line:
    """One quantity.

    Attributes:
        label: its name in the legend.
        line: points (x, y) of a formula, joined. May be empty.
        points: measured points (x, y), marked. May be empty.
        dashed: draw the line dashed, as a claim instead of a result.
    """

    label: str
    line: Sequence[tuple[float, float]] = ()
    points: Sequence[tuple[float, float]] = ()
    dashed: bool = False


@dataclass(frozen=True)
class Panel:
    """One system of axes. `logarithmic` and `logarithmic_y` make the x and the y axis logarithmic to base 2."""

    title: str
    xlabel: str
    ylabel: str
    lines: Sequence[Line] = field(default_factory=tuple)
    logarithmic: bool = False
    logarithmic_y: bool = False
    percent: bool = False


def lines_figure(panels: Sequence[Panel], height: float = 4.6) -> Figure:
    """The panels side by side as a Matplotlib figure; the i-th lines of all panels have the same colour.

    Raises:
        ValueError: there is no panel, or a panel has no point to draw.
        ImportError: Matplotlib is not installed.

    >>> figure = lines_figure([Panel("t", "x", "y", [Line("a", [(1, 2), (2, 3)], [(1, 2)])])])
    >>> [axes.get_title(loc="left") for axes in figure.axes]
    ['t']
    """
    if not panels:
        raise ValueError("panels is empty: expected at least one")
    for position, panel in enumerate(panels):
        if not any([*line.line, *line.points] for line in panel.lines):
            raise ValueError(f"panels[{position}] has no point to draw: give its lines some")
    with style():
        figure = new_figure(height)
        row = figure.subplots(1, len(panels), squeeze=False)[0]
        for axes, panel in zip(row, panels, strict=True):
            _draw(axes, panel)
    return figure


def _draw(axes: Axes, panel: Panel) -> None:
    from matplotlib.ticker import PercentFormatter, StrMethodFormatter

    for number, line in enumerate(panel.lines):
        colour = _COLOURS[number % len(_COLOURS)]
        if line.line:
            dashes = (0, (4, 2)) if line.dashed else "-"
            axes.plot(*zip(*line.line, strict=True), color=colour, linestyle=dashes, linewidth=1.5, zorder=2)
        if line.points:
            # Later marks are smaller, so that equal values of two lines both show.
            size = max(3.0, 7.5 - 1.1 * number)
            marker = _MARKERS[number % len(_MARKERS)]
            axes.plot(*zip(*line.points, strict=True), marker, color=colour, markersize=size, zorder=3 + number)
        axes.plot(
            [],
            [],
            color=colour,
            linestyle=((0, (4, 2)) if line.dashed else "-") if line.line else "",
            linewidth=1.5,
            marker=_MARKERS[number % len(_MARKERS)] if line.points else "",
            markersize=5,
            label=line.label,
        )
    if panel.logarithmic:
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    if panel.logarithmic_y:
        axes.set_yscale("log", base=2)
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    else:
        axes.set_ylim(bottom=0)
    if panel.percent:
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.set_title(panel.title, pad=8)
    axes.set(xlabel=panel.xlabel, ylabel=panel.ylabel)
    axes.grid(True)
    axes.legend(loc="best")
