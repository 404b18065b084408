"""Bars: the memory and the step time of every row."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from remat_jax.report.rows import PEAK_KINDS, Row, group, mode_label, peak, plain_rows
from remat_jax.report.style import BLUE, GREEN, GREY, INK, ORANGE, SKY, VERMILLION, framework_colours, new_figure, style
from remat_jax.report.tables import MISSING, byte_unit, format_ratio, scaled_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_PEAKS = {
    "torch": ("PyTorch, tracked", VERMILLION),
    "cpu": ("JAX, compiled for CPU", ORANGE),
    "h200": ("JAX, compiled for H200", GREEN),
}


def memory_figure(rows: Iterable[Any]) -> Figure:
    """A Matplotlib figure of every row's residual bytes, on the device and on the host, and its peak memory.

    The bars of a panel share the unit at its axis. `rows` are those of `demo_pictures` for one model.
    """
    rows = plain_rows(rows)
    slots, height = _slots(rows)
    with style():
        figure = new_figure(height)
        left, right = figure.subplots(1, 2, sharey=True)
        _residual_panel(left, slots)
        _peak_panel(right, slots)
        _name_slots(left, slots)
        _legend_below(figure, left, right)
    return figure


def time_figure(rows: Iterable[Any]) -> Figure:
    """A Matplotlib figure of every row's step time relative to the same framework without checkpointing.

    `rows` are those of `demo_pictures` for one model.
    """
    rows = plain_rows(rows)
    slots, height = _slots(rows)
    colours = framework_colours(rows)
    with style():
        figure = new_figure(height)
        axes = figure.subplots()
        for y, row in _row_slots(slots):
            _bar(axes, y, row["relative_time"], 0.66, format_ratio, color=colours[row["framework"]])
        axes.axvline(1.0, color=INK, linewidth=1, linestyle=(0, (4, 3)))
        _frame(axes, "Step time", "relative to the same framework without checkpointing (dashed)")
        axes.set_xlim(right=max(axes.get_xlim()[1], 1.1))
        _name_slots(axes, slots)
    return figure


def _residual_panel(axes: Axes, slots: Sequence[tuple[float, str | Row]]) -> None:
    placed = _row_slots(slots)
    values = [row[key] for _, row in placed for key in ("residual_device_bytes", "residual_host_bytes")]
    unit = byte_unit(max((value for value in values if value is not None), default=0))
    for y, row in placed:
        device, host = row["residual_device_bytes"], row["residual_host_bytes"]
        on_device = None if device is None else scaled_bytes(device, unit)
        on_host = None if host is None else scaled_bytes(host, unit)
        if on_device is not None:
            axes.barh(y, on_device, 0.66, color=BLUE, label="on the device")
        if on_host:
            axes.barh(y, on_host, 0.66, left=on_device or 0.0, color=SKY, hatch="///", label="on the host")
        texts = [MISSING if value is None else f"{value:.1f}" for value in (on_device, on_host)]
        text = texts[0] if on_host == 0 or texts == [MISSING, MISSING] else f"{texts[0]} + {texts[1]}"
        _end_label(axes, (on_device or 0.0) + (on_host or 0.0), y, text, missing=text == MISSING)
    _frame(axes, "Residuals", f"residuals, {unit}")


def _peak_panel(axes: Axes, slots: Sequence[tuple[float, str | Row]]) -> None:
    placed = _row_slots(slots)
    values = [value for _, row in placed for kind in PEAK_KINDS if (value := peak(row, kind)) is not None]
    unit = byte_unit(max(values, default=0))
    frameworks = group([row for _, row in placed], "framework")
    for y, row in placed:
        # A kind that no row of the framework has is left out; a kind that only this row lacks is drawn as missing.
        kinds = [k for k in PEAK_KINDS if any(peak(other, k) is not None for other in frameworks[row["framework"]])]
        thickness = 0.76 / max(1, len(kinds))
        for number, kind in enumerate(kinds):
            name, colour = _PEAKS[kind]
            value = peak(row, kind)
            _bar(
                axes,
                y + (number - (len(kinds) - 1) / 2) * thickness,
                None if value is None else scaled_bytes(value, unit),
                thickness * 0.92,
                lambda x: f"{x:.1f}",
                color=colour,
                label=name,
            )
        if not kinds:
            _end_label(axes, 0.0, y, MISSING, missing=True)
    _frame(axes, "Peak memory", f"of one training step, {unit}")


def _slots(rows: Sequence[Row]) -> tuple[list[tuple[float, str | Row]], float]:
    """The heights on the axis of each framework's heading and rows, and the figure's height in inches."""
    slots: list[tuple[float, str | Row]] = []
    y = 0.0
    for framework, its_rows in group(rows, "framework").items():
        slots.append((y, framework))
        slots.extend((y + 1 + position, row) for position, row in enumerate(its_rows))
        y += len(its_rows) + 1.4
    return slots, 1.4 + 0.33 * y


def _row_slots(slots: Sequence[tuple[float, str | Row]]) -> list[tuple[float, Row]]:
    return [(y, entry) for y, entry in slots if not isinstance(entry, str)]


def _name_slots(axes: Axes, slots: Sequence[tuple[float, str | Row]]) -> None:
    names = [entry if isinstance(entry, str) else mode_label(entry) for _, entry in slots]
    axes.set_yticks([y for y, _ in slots], names)
    for label, (_, entry) in zip(axes.get_yticklabels(), slots, strict=True):
        label.set_fontweight("bold" if isinstance(entry, str) else "normal")
    axes.set_ylim(slots[-1][0] + 0.7, slots[0][0] - 0.6)


def _bar(axes: Axes, y: float, value: float | None, height: float, write: Callable[[float], str], **style: Any) -> None:
    if value is not None:
        axes.barh(y, value, height, **style)
    _end_label(axes, value or 0.0, y, MISSING if value is None else write(value), missing=value is None)


def _end_label(axes: Axes, x: float, y: float, text: str, *, missing: bool) -> None:
    colour, slant = (GREY, "italic") if missing else (INK, "normal")
    axes.annotate(
        text, (x, y), xytext=(4, 0), textcoords="offset points", va="center", fontsize=8, color=colour, fontstyle=slant
    )


def _frame(axes: Axes, title: str, label: str) -> None:
    from matplotlib.patches import Rectangle

    axes.set_title(title, pad=8)
    axes.set_xlabel(label)
    axes.grid(True, axis="x")
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    # Leave room for the value beside the longest bar.
    longest = max((bar.get_x() + bar.get_width() for bar in axes.patches if isinstance(bar, Rectangle)), default=0.0)
    axes.set_xlim(0, longest * 1.22 or 1.0)


def _legend_below(figure: Figure, *panels: Axes) -> None:
    """A legend below the panels with one entry per name, in the panels' order."""
    entries: dict[str, Any] = {}
    for axes in panels:
        for handle, name in zip(*axes.get_legend_handles_labels(), strict=True):
            entries.setdefault(name, handle)
    if entries:
        figure.legend(list(entries.values()), list(entries), loc="outside lower center", ncols=len(entries))
