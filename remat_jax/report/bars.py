"""Horizontal bars, stacked from parts: panels side by side that share the names of their rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from remat_jax.report.svg import GREY, INK, WIDTH, AxisScale, Key, Picture, legend_height, text_width

_ROW, _THICKNESS = 36.0, 26.0
_TOP, _BELOW = 40.0, 56.0


@dataclass(frozen=True)
class BarSegment:
    """A part of a bar: its length in the panel's unit, its colour, whether it is hatched, and its tooltip."""

    length: float
    colour: str
    hatched: bool = False
    says: str = ""


@dataclass(frozen=True)
class PanelBar:
    """A bar from its parts, and the text at its end; `missing` writes the text in grey italics."""

    parts: Sequence[BarSegment]
    text: str = ""
    missing: bool = False

    @property
    def length(self) -> float:
        """The length of all parts."""
        return sum(part.length for part in self.parts)


@dataclass(frozen=True)
class BarPanel:
    """One system of axes.

    Attributes:
        title, label: the text above the panel and at its axis.
        rows: the bars of each row, from top to bottom; several share the row's height, and a row may have none.
        end: the right end of the axis; None leaves room beside the longest bar for its text.
        mark: a value at which a dashed line is drawn.
    """

    title: str
    label: str
    rows: Sequence[Sequence[PanelBar]]
    end: float | None = None
    mark: float | None = None


def bars_picture(names: Sequence[str], panels: Sequence[BarPanel], keys: Sequence[Key] = (), title: str = "") -> Picture:
    """The panels side by side, with the names of the rows at the left and the legend below.

    A name whose row has no bar in any panel is a heading.

    >>> picture = bars_picture(["off"], [BarPanel("Bytes", "MiB", [[PanelBar([BarSegment(3.0, INK, says="3 MiB")], "3.0")]])])
    >>> [text in picture.svg() for text in (">off<", ">Bytes<", ">3.0<", "<title>3 MiB</title>")]
    [True, True, True, True]
    """
    left = 24 + max(map(text_width, names))
    top = _TOP + 28 * bool(title)
    bottom = top + _ROW * len(names)
    picture = Picture(bottom + _BELOW + legend_height(keys, WIDTH - 40))
    if title:
        picture.text((12, 24), title, size=14)
    for row, name in enumerate(names):
        is_heading = not any(panel.rows[row] for panel in panels)
        look = 'font-weight="bold"' if is_heading else ""
        picture.text((left - 10, top + _ROW * (row + 0.5) + 4.5), name, anchor="end", look=look)
    width = (WIDTH - left - 24 * len(panels)) / len(panels)
    for at, panel in enumerate(panels):
        start = left + (width + 24) * at
        end = panel.end or 1.22 * max((bar.length for bars in panel.rows for bar in bars), default=0.0) or 1.0
        scale = AxisScale(0, max(end, 1.1 * (panel.mark or 0)), start, start + width)
        _panel(picture, panel, scale, top, bottom)
    picture.legend(keys, 20, bottom + _BELOW - 6, WIDTH - 40)
    return picture


def _panel(picture: Picture, panel: BarPanel, scale: AxisScale, top: float, bottom: float) -> None:
    picture.text((scale.start, top - 12), panel.title, size=14, look='font-weight="bold"')
    picture.x_axis(scale, top, bottom, panel.label)
    for row, bars in enumerate(panel.rows):
        thickness = _THICKNESS / max(1, len(bars))
        for at, bar in enumerate(bars):
            y = top + _ROW * row + (_ROW - _THICKNESS) / 2 + thickness * at
            length = 0.0
            for part in bar.parts:
                x = scale(length)
                length += part.length
                picture.bar(x, y, scale(length) - x, thickness * 0.94, part.colour, hatched=part.hatched, says=part.says)
            colour, look = (GREY, 'font-style="italic"') if bar.missing else (INK, "")
            picture.text((scale(length) + 6, y + thickness / 2 + 4), bar.text, size=11, colour=colour, look=look)
    if panel.mark is not None:
        picture.line([(scale(panel.mark), top), (scale(panel.mark), bottom)], INK, 1.2, dashed=True)
