"""Panels of stacked horizontal bars; all panels have the same row names."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from remat_jax.report.document import escaped
from remat_jax.report.svg import GREY, INK, WIDTH, AxisScale, Key, Picture, legend_height, text_width

_ROW, _THICKNESS, _NAME = 36.0, 26.0, 16.0
_TOP, _BELOW = 40.0, 56.0
_LEAST_WIDTH = 600.0
"""In pixels. Narrower pictures stack the panels, with the names above the bars. Wider pictures have the panels side by
side, with the names at the left.
"""


@dataclass(frozen=True)
class BarSegment:
    """A part of a bar; `length` is in the panel's unit, and `letter` is drawn on the part."""

    length: float
    colour: str
    hatched: bool = False
    tooltip: str = ""
    letter: str = ""


@dataclass(frozen=True)
class PanelBar:
    """A bar with `text` at its end (in grey italics if `missing`). Screen readers get `label` or, without it, the tooltips."""

    parts: Sequence[BarSegment]
    text: str = ""
    missing: bool = False
    label: str = ""


@dataclass(frozen=True)
class BarPanel:
    """One pair of axes. `label` is the text at the axis of values; a dashed line is drawn at the value `mark`.

    `rows` has the bars of each row; several bars share the row's height. `end` is the largest value of the axis; if it is None,
    the axis leaves room for the text after the longest bar.
    """

    title: str
    label: str
    rows: Sequence[Sequence[PanelBar]]
    end: float | None = None
    mark: float | None = None


def bars_picture(
    names: Sequence[str], panels: Sequence[BarPanel], keys: Sequence[Key] = (), title: str = "", width: float = WIDTH
) -> Picture:
    """The panels, with the names of their rows, and the legend below. A row that has no bar in any panel is a heading.

    >>> bar = PanelBar([BarSegment(3.0, INK, tooltip="3 MiB")], "3.0")
    >>> picture = bars_picture(["off"], [BarPanel("Bytes", "MiB", rows=[[bar]])])
    >>> [text in picture.svg() for text in (">off<", ">Bytes<", ">3.0<", "<title>3 MiB</title>")]
    [True, True, True, True]
    """
    is_narrow = width < _LEAST_WIDTH
    columns, row_height, left = len(panels), _ROW, 24 + max(map(text_width, names))
    if is_narrow:
        columns, row_height, left = 1, _ROW + _NAME, 12.0
    top = _TOP + 28 * bool(title)
    panel_width = (width - left - 24 * columns) / columns
    panel_height = _TOP + row_height * len(names) + _BELOW
    bottom = top - _TOP + panel_height * math.ceil(len(panels) / columns)
    picture = Picture(bottom + legend_height(keys, width - 40), width)
    picture.text((12, 24), title, size=14)
    for at, panel in enumerate(panels):
        start = left + (panel_width + 24) * (at % columns)
        lengths = [sum(part.length for part in bar.parts) for bars in panel.rows for bar in bars]
        end = panel.end or 1.22 * max(lengths, default=0.0) or 1.0
        scale = AxisScale(0, max(end, 1.1 * (panel.mark or 0)), start, start + panel_width)
        panel_top = top + panel_height * (at // columns)
        picture.text((start, panel_top - 12), panel.title, size=14, look='font-weight="bold"')
        picture.x_axis(scale, panel_top, panel_top + row_height * len(names), panel.label)
        for row, name in enumerate(names):
            look = 'font-weight="bold"' * (not any(panel.rows[row] for panel in panels))
            row_bottom = panel_top + row_height * (row + 1)
            if is_narrow:
                picture.text((start, row_bottom - _ROW), name, look=look)
            elif not at:
                picture.text((start - 10, row_bottom - _ROW / 2 + 4.5), name, anchor="end", look=look)
            _draw_row(picture, panel.rows[row], scale, row_bottom - (_ROW + _THICKNESS) / 2)
        if panel.mark is not None:
            dashed = [(scale(panel.mark), panel_top), (scale(panel.mark), panel_top + row_height * len(names))]
            picture.line(dashed, INK, 1.2, dashed=True)
    picture.legend(keys, 20, bottom - 6, width - 40)
    return picture


def _draw_row(picture: Picture, bars: Sequence[PanelBar], scale: AxisScale, top: float) -> None:
    thickness = _THICKNESS / max(1, len(bars))
    for at, bar in enumerate(bars):
        y, length = top + thickness * at, 0.0
        label = bar.label or "; ".join(part.tooltip for part in bar.parts) or bar.text
        with picture.group(f'role="img" aria-label="{escaped(label)}"'):
            for part in bar.parts:
                x = scale(length)
                length += part.length
                look: dict[str, Any] = {"letter": part.letter, "hatched": part.hatched, "tooltip": part.tooltip}
                picture.bar(x, y, scale(length) - x, thickness * 0.94, part.colour, **look)
        colour, style = (GREY, 'font-style="italic"') if bar.missing else (INK, "")
        picture.text((scale(length) + 6, y + thickness / 2 + 4), bar.text, size=11, colour=colour, look=style)
