"""The renderer of every picture: lines, marks, bars, text, axes and legends, written as one SVG file."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from remat_jax.report.document import escaped, write_whole

# The palette of Okabe and Ito, which colour-blind readers can distinguish.
BLUE, SKY, GREEN, ORANGE, VERMILLION, PURPLE = "#0072B2", "#56B4E9", "#009E73", "#E69F00", "#D55E00", "#CC79A7"
INK, GREY, EDGE, GRID, WHITE = "#222222", "#757575", "#bbbbbb", "#e6e6e6", "#ffffff"

WIDTH, NARROW = 1000.0, 350.0
"""Widths in pixels: of a picture, and of a picture for a small screen."""
FORMATS = (".svg",)
SHAPES = ("circle", "square", "diamond", "triangle")

_OUTLINES = {
    "square": ((-0.9, -0.9), (0.9, -0.9), (0.9, 0.9), (-0.9, 0.9)),
    "diamond": ((0, -1.25), (1.25, 0), (0, 1.25), (-1.25, 0)),
    "triangle": ((0, -1.2), (1.1, 0.8), (-1.1, 0.8)),
}
_STRIPE, _STRIPES_APART = 2.5, 9.0
_LETTERED = 15.0
"""A bar of at least this width in pixels has its letter inside."""
_ROW = 22.0

Place = tuple[float, float]


@dataclass(frozen=True)
class AxisScale:
    """Maps values from `low` to `high` to pixels from `start` to `end`; if `binary`, on a logarithmic scale to base 2.

    >>> AxisScale(0, 10, 100, 200)(5), AxisScale(0, 10, 100, 200).ticks(5), AxisScale(3, 70, 0, 1, binary=True).ticks(9)
    (150.0, [0.0, 2.0, 4.0, 6.0, 8.0, 10.0], [4.0, 8.0, 16.0, 32.0, 64.0])
    """

    low: float
    high: float
    start: float
    end: float
    binary: bool = False

    def __call__(self, value: float) -> float:
        """The pixel of a value."""
        low, high, at = map(math.log2, (self.low, self.high, value)) if self.binary else (self.low, self.high, value)
        return self.start + (self.end - self.start) * (at - low) / (high - low)

    def ticks(self, most: int) -> list[float]:
        """About `most` round values; for a binary scale, at most `most` powers of two."""
        if self.binary:
            powers = range(math.ceil(math.log2(self.low)), math.floor(math.log2(self.high)) + 1)
            return [2.0**power for power in powers[:: math.ceil(len(powers) / most) or 1]]
        raw = (self.high - self.low) / most
        power = 10.0 ** math.floor(math.log10(raw))
        step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * (1 - 1e-9))
        return [step * n for n in range(math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9) + 1)]


@dataclass(frozen=True)
class Key:
    """An entry of a legend: a line (`line`), a mark (`shape`), a mark on a line or, without both, a bar with a letter."""

    label: str
    colour: str
    shape: str = ""
    hollow: bool = False
    hatched: bool = False
    line: bool = False
    dashed: bool = False
    letter: str = ""


class Picture:
    """A picture; `parts` are its elements in the order of drawing. Sizes are in pixels."""

    def __init__(self, height: float, width: float = WIDTH) -> None:
        self.height, self.width = height, width
        self.parts: list[str] = []

    def svg(self) -> str:
        """The file's text; equal pictures have equal texts."""
        return self.html().replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1)

    def html(self) -> str:
        """The element for an HTML page. It needs no namespace there, so the page contains no web address."""
        return (
            f'<svg viewBox="0 0 {self.width:g} {self.height:g}" width="{self.width:g}" height="{self.height:g}" '
            f'font-family="DejaVu Sans, Verdana, sans-serif" font-size="13">\n'
            f'<rect width="100%" height="100%" fill="{WHITE}"/>\n' + "\n".join(self.parts) + "\n</svg>\n"
        )

    @contextlib.contextmanager
    def group(self, attributes: str) -> Iterator[None]:
        """Put the elements drawn in this context into one group, with `attributes` in SVG's syntax."""
        self.parts.append(f"<g {attributes}>")
        yield
        self.parts.append("</g>")

    def line(
        self, places: Iterable[Place], colour: str, width: float = 1.0, *, dashed: bool = False, opacity: float = 1.0
    ) -> None:
        """A line through `places`."""
        path = "L".join(f"{x:.2f} {y:.2f}" for x, y in places)
        look = ' stroke-dasharray="6 4"' * dashed + f' stroke-opacity="{opacity:g}"' * (opacity != 1)
        self.parts.append(f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="{width:g}"{look}/>')

    def bar(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        colour: str,
        *,
        letter: str = "",
        hatched: bool = False,
        tooltip: str = "",
    ) -> None:
        """A rectangle, with `letter` in its middle if the rectangle is wide enough."""
        self._rectangle(x, y, width, height, f'fill="{colour}" stroke="{WHITE}" stroke-width=".5"', _title(tooltip))
        # Stripes and letter ignore the pointer, so that it reaches the bar with the tooltip.
        through = 'pointer-events="none"'
        if hatched:
            stripes = f'stroke="{WHITE}" stroke-width="{_STRIPE:g}" {through}'
            self.parts.append(f'<path class="hatch" d="{_stripes(x, y, width, height)}" {stripes}/>')
        if letter and width >= _LETTERED:
            middle, centre = x + width / 2, y + height / 2
            self._rectangle(middle - 6, centre - 6, 12, 12, f'rx="3" fill="{WHITE}" {through}')
            self.text((middle, centre + 3.6), letter, size=10, anchor="middle", look=f'font-weight="bold" {through}')

    def _rectangle(self, x: float, y: float, width: float, height: float, look: str, inside: str = "") -> None:
        self.parts.append(f'<rect x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:.2f}" {look}>{inside}</rect>')

    def mark(
        self,
        shape: str,
        place: Place,
        colour: str,
        size: float = 5.0,
        *,
        hollow: bool = False,
        fill: str = "",
        tooltip: str = "",
    ) -> None:
        """A mark of one of the `SHAPES`; a hollow mark is white inside unless `fill` is given."""
        x, y = place
        look = f'fill="{fill or (WHITE if hollow else colour)}" stroke="{colour}" stroke-width="1.8"'
        if shape == "circle":
            self.parts.append(f'<circle cx="{x:.2f}" cy="{y:.2f}" r="{size:g}" {look}>{_title(tooltip)}</circle>')
            return
        corners = " ".join(f"{x + size * across:.2f},{y + size * down:.2f}" for across, down in _OUTLINES[shape])
        self.parts.append(f'<polygon points="{corners}" {look}>{_title(tooltip)}</polygon>')

    def text(
        self, place: Place, text: str, *, size: float = 13, colour: str = INK, anchor: str = "start", look: str = ""
    ) -> None:
        """Text at `place`, a point of its baseline; `look` has further attributes."""
        if not text:
            return
        x, y = place
        attributes = f'x="{x:.2f}" y="{y:.2f}" font-size="{size:g}" fill="{colour}" text-anchor="{anchor}" {look}'
        self.parts.append(f"<text {attributes.rstrip()}>{escaped(text)}</text>")

    def x_axis(self, scale: AxisScale, top: float, bottom: float, label: str) -> None:
        """Vertical grid lines with their values below, and the axis."""
        for value in scale.ticks(max(2, round((scale.end - scale.start) / 62))):
            self.line([(scale(value), top), (scale(value), bottom)], GRID)
            self.text((scale(value), bottom + 19), f"{round(value, 9):g}", anchor="middle")
        self.line([(scale.start, bottom), (scale.end, bottom)], EDGE)
        self.text(((scale.start + scale.end) / 2, bottom + 41), label, anchor="middle")

    def y_axis(self, scale: AxisScale, left: float, right: float, label: str, write: Callable[[float], str]) -> None:
        """Horizontal grid lines with their values at the left, and the axis."""
        for value in scale.ticks(8):
            self.line([(left, scale(value)), (right, scale(value))], GRID)
            self.text((left - 8, scale(value) + 4.5), write(round(value, 9)), anchor="end")
        self.line([(left, scale.start), (left, scale.end)], EDGE)
        middle = (scale.start + scale.end) / 2
        self.text((left - 58, middle), label, anchor="middle", look=f'transform="rotate(-90 {left - 58:.2f} {middle:.2f})"')

    def legend(self, keys: Sequence[Key], left: float, top: float, width: float) -> None:
        """The keys from left to right, in rows of at most `width`."""
        for key, (across, down) in zip(keys, _flow(keys, width), strict=True):
            x, y = left + across, top + down + _ROW / 2
            if key.line:
                self.line([(x, y), (x + 26, y)], key.colour, 1.8, dashed=key.dashed)
            if key.shape:
                self.mark(key.shape, (x + 13, y), key.colour, hollow=key.hollow)
            if not key.line and not key.shape:
                self.bar(x, y - 6, 26, 12, key.colour, letter=key.letter, hatched=key.hatched)
            self.text((x + 34, y + 4), key.label, size=12)

    def save(self, path: str | Path) -> str:
        """Write the picture, creating its folder, and return the path. Raises `ValueError` for an ending other than .svg."""
        path = Path(path)
        if path.suffix.lower() not in FORMATS:
            raise ValueError(
                f"path={str(path)!r} ends in {path.suffix!r}: pictures are written as SVG; expected a name that ends in .svg"
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        return str(write_whole(path, self.svg()))


def legend_height(keys: Sequence[Key], width: float) -> float:
    """The height of a legend in `width` pixels."""
    return max((down + _ROW for _, down in _flow(keys, width)), default=0.0)


def text_width(text: str, size: float = 13) -> float:
    """The width of `text` in pixels, estimated from the letters of DejaVu Sans."""
    return size * sum(0.34 if letter in "iljIft.,:;'|!/()[] " else 0.9 if letter in "mwMW@%" else 0.64 for letter in text)


def _flow(keys: Sequence[Key], width: float) -> list[Place]:
    places, across, down = [], 0.0, 0.0
    for key in keys:
        needed = 34 + text_width(key.label, 12)
        if across and across + needed > width:
            across, down = 0.0, down + _ROW
        places.append((across, down))
        across += needed + 22
    return places


def _stripes(x: float, y: float, width: float, height: float) -> str:
    """Diagonal stripes in a rectangle, as a path and not as an SVG pattern.

    If several pictures of a page share a pattern, hiding the picture that defines the pattern removes it from all pictures.
    """
    inset = _STRIPE / 2
    x, y, width, height = x + inset, y + inset, max(0.0, width - _STRIPE), max(0.0, height - _STRIPE)
    path = ""
    for stripe in range(1, math.ceil((width + height) / _STRIPES_APART)):
        along = stripe * _STRIPES_APART
        path += f"M{x + max(0.0, along - height):.1f} {y + min(along, height):.1f}"
        path += f"L{x + min(along, width):.1f} {y + max(0.0, along - width):.1f}"
    return path


def _title(tooltip: str) -> str:
    return f"<title>{escaped(tooltip)}</title>" if tooltip else ""
