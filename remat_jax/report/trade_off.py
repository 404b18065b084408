"""The trade-off: residual bytes against step time, a labelled point for every row."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from remat_jax.report.labels import boxes_along, place_labels
from remat_jax.report.rows import Row, group, mode_label, plain_rows
from remat_jax.report.style import GREY, framework_colours, new_figure, style
from remat_jax.report.tables import byte_unit, scaled_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MARKERS = ("s", "o", "D", "^", "v", "P")


def trade_off_figure(rows: Iterable[Any]) -> Figure:
    """Residual bytes on the device against relative step time, one labelled point per row, as a Matplotlib figure.

    A line joins the points of one framework in order of time. Hollow points have residuals in host memory. Rows without a time
    or residual bytes are listed below the picture. `rows` are those of `demo_pictures` for one model.
    """
    rows = plain_rows(rows)
    drawn = [row for row in rows if row["relative_time"] is not None and row["residual_device_bytes"] is not None]
    left_out = [row for row in rows if row not in drawn]
    unit = byte_unit(max((row["residual_device_bytes"] for row in drawn), default=0))
    with style():
        figure = new_figure(6.2)
        axes = figure.subplots()
        for number, (framework, its_rows) in enumerate(group(drawn, "framework").items()):
            _framework_points(axes, its_rows, unit, framework_colours(rows)[framework], number)
        axes.set(xlabel="step time relative to the same framework without checkpointing")
        axes.set_ylabel(f"residuals on the device, {unit}")
        axes.margins(0.12, 0.12)
        axes.grid(True)
        axes.plot([], [], "o", markerfacecolor="white", markeredgecolor=GREY, label="hollow: residuals on the host")
        figure.legend(loc="outside upper left", ncols=6, handletextpad=0.4, columnspacing=1.6)
        if left_out:
            names = ", ".join(f"{row['framework']} {mode_label(row)}" for row in left_out)
            figure.supxlabel(f"Not measured, so not drawn: {names}", fontsize=9, color=GREY, wrap=True)
        _label_points(figure, axes, drawn, unit, framework_colours(rows))
    return figure


def _framework_points(axes: Axes, rows: Sequence[Row], unit: str, colour: str, number: int) -> None:
    ordered = _by_time(rows)
    x, y = zip(*(_place(row, unit) for row in ordered), strict=True)
    marker = _MARKERS[number % len(_MARKERS)]
    axes.plot(x, y, color=colour, linewidth=1.3, alpha=0.35, zorder=2)
    faces = ["white" if row["residual_host_bytes"] else colour for row in ordered]
    # Frameworks often agree to the byte: later points are smaller and on top, so that all show.
    size = max(24.0, 140 * 0.45**number)
    axes.scatter(x, y, size, marker=marker, facecolors=faces, edgecolors=colour, linewidths=1.6, zorder=4 + number)
    axes.plot([], [], color=colour, marker=marker, label=str(rows[0]["framework"]))


def _label_points(figure: Figure, axes: Axes, rows: Sequence[Row], unit: str, colours: dict[str, str]) -> None:
    """Write each mode beside its point, with a thin line to the point if the label is further away."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    if not rows:
        return
    # Place labels in points (1/72 inch), independent of the resolution.
    scale = 72 / figure.dpi
    renderer = FigureCanvasAgg(figure).get_renderer()
    figure.draw_without_rendering()
    from_display = axes.transData.inverted()

    def to_points(its_rows: Sequence[Row]) -> list[tuple[float, float]]:
        places = axes.transData.transform([_place(row, unit) for row in its_rows])
        return [(float(x) * scale, float(y) * scale) for x, y in places]

    points = to_points(rows)
    texts = [axes.text(0, 0, mode_label(row), fontsize=9, color=colours[row["framework"]], zorder=9) for row in rows]
    extents = [text.get_window_extent(renderer) for text in texts]
    sizes = [(extent.width * scale, extent.height * scale) for extent in extents]
    joins = [to_points(_by_time(framework_rows)) for framework_rows in group(rows, "framework").values()]
    area = axes.get_window_extent(renderer)
    frame = (area.x0 * scale, area.y0 * scale, area.x1 * scale, area.y1 * scale)
    boxes = place_labels(points, sizes, frame, taken=[box for path in joins for box in boxes_along(path)])
    for text, point, (left, bottom, right, top) in zip(texts, points, boxes, strict=True):
        text.set(position=from_display.transform((left / scale, bottom / scale)), verticalalignment="bottom")
        text.set_in_layout(False)
        nearest = (min(max(point[0], left), right), min(max(point[1], bottom), top))
        if math.dist(nearest, point) > 14:
            ends = [(a / scale, b / scale) for a, b in (point, nearest)]
            x, y = zip(*from_display.transform(ends), strict=True)
            axes.plot(x, y, color=GREY, linewidth=0.7, zorder=3, scalex=False, scaley=False)


def _place(row: Row, unit: str) -> tuple[float, float]:
    return float(row["relative_time"]), scaled_bytes(row["residual_device_bytes"], unit)


def _by_time(rows: Sequence[Row]) -> list[Row]:
    return sorted(rows, key=lambda row: (row["relative_time"], row["residual_device_bytes"]))
