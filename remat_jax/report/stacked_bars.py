"""Panels of stacked horizontal bars, in particular of memory by module or by other parts, with a bar for each policy."""

from __future__ import annotations

import itertools
import math
import re
import string
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from remat_jax.report.document import escaped
from remat_jax.report.svg import (
    BLUE,
    GREEN,
    GREY,
    INK,
    ORANGE,
    PURPLE,
    SKY,
    VERMILLION,
    WIDTH,
    AxisScale,
    Key,
    Picture,
    legend_height,
    text_width,
)
from remat_jax.report.tables import byte_unit, format_bytes, scaled_bytes

Memory = Mapping[tuple[str, str], int]
"""The bytes of one bar by a pair of names: (module path, phase) in a `MemoryReport`, (part, kind) in a figure.

A figure draws each part in its own colour, and hatches some kinds.
"""

_COLOURS = (BLUE, ORANGE, GREEN, VERMILLION, SKY, PURPLE, "#F0E442")
ARGUMENT = "argument "
"""The names of a finished step's arguments begin so: a module of the model may have an argument's name."""
_ARGUMENTS = {"parameters": "#4d4d4d", "frozen parameters": "#6e6e6e", "optimizer state": "#909090", "batch": "#b5b5b5"}
_OTHER_ARGUMENTS, _MOST_GIVEN = "other arguments", 3
_OTHER, _NOWHERE, ARGUMENTS = "other modules", "of no module", "arguments and results"
_GREYS = {
    **_ARGUMENTS,
    ARGUMENTS: _ARGUMENTS["optimizer state"],
    _OTHER_ARGUMENTS: "#b5b5b5",
    _OTHER: "#d0d0d0",
    _NOWHERE: "#e8e8e8",
}
KEPT, WORKING = "kept", "working set"
_PHASES = {"argument": KEPT, "forward": KEPT}
_LONGEST_NAME = 34
MOST_MODULES = len(_COLOURS)
"""At most this number of modules have their own colour."""
_ROW, _THICKNESS, _NAME, _DESCENT = 36.0, 26.0, 16.0, 4.0
_TOP, _BELOW, _TEXT = 40.0, 56.0, 11.0
_LEAST_WIDTH = 600.0
"""Pictures with fewer pixels stack the panels, with the names above the bars. Wider pictures have the panels side by side, with
the names at the left.
"""


def module_memory_figure(memory: Mapping[str, Memory], title: str, modules: int = MOST_MODULES) -> Picture:
    """Stacked bars of device memory at the peak; `memory` maps each policy to its `MemoryReport.live_bytes_by_module`.

    Plain parts are arguments and saved arrays of the forward pass. Hatched parts are the working set: recomputed arrays and
    arrays of the backward pass. Modules are ranked by their largest share of any bar; the first `modules` (at most 7) have
    their own colours.

    Raises `ValueError` if there is no policy, if a policy has no bytes, or if `modules` is out of range.

    >>> picture = module_memory_figure({"off": {("ffn/up", "forward"): 2048, ("parameters", "argument"): 512}}, "a model")
    >>> "<title>off: A up, kept 2.0 KiB, 80.0 % (2,048 bytes)</title>" in picture.svg()
    True
    """
    if not 1 <= modules <= len(_COLOURS):
        raise ValueError(f"modules={modules!r}: expected 1 to {len(_COLOURS)}, one for each colour")
    empty = [policy for policy, bytes_of in memory.items() if not sum(bytes_of.values())]
    if not memory or empty:
        raise ValueError(
            f"memory: {f'no array is alive under {empty[0]!r}' if empty else 'no policy'}; measure for a GPU or TPU target"
        )
    hatched = {WORKING: "recomputed or backward"}
    return stacked_figure(grouped(memory, modules), "on the device at the peak", hatched=hatched, title=title)


def stacked_figure(
    bars: Mapping[str, Memory],
    label: str,
    *,
    hatched: Mapping[str, str] = MappingProxyType({}),
    limit: tuple[str, int] | None = None,
    title: str = "",
    width: float = WIDTH,
) -> Picture:
    """Bars of bytes by part and kind; each part has a colour and a letter. A second panel shows the shares of each bar.

    Args:
      label: the label of the axis of bytes.
      hatched: the kinds that are drawn with stripes, and their names in the legend.
      limit: a name and bytes, drawn as a dashed line unless the line is far beyond the bars.
    """
    letters, spare = part_letters(bars), itertools.cycle(_COLOURS)
    greys = itertools.cycle(_ARGUMENTS.values())
    colours = {part: _GREYS.get(part) or next(greys if part.startswith(ARGUMENT) else spare) for part in letters}
    totals = {name: sum(parts.values()) for name, parts in bars.items()}
    largest = max(totals.values())
    unit = byte_unit(largest)

    def drawn(name: str, scale: float, text: str = "") -> list[PanelBar]:
        segments, described = [], []
        for (part, kind), size in bars[name].items():
            described.append(f"{letters[part]} {part}, {kind} {format_bytes(size)}")
            tooltip = f"{name}: {described[-1]}, {100 * size / (totals[name] or 1):.1f} % ({size:,} bytes)"
            segments.append(BarSegment(size * scale, colours[part], kind in hatched, tooltip, letters[part]))
        return [PanelBar(segments, text, label=f"{name}: {format_bytes(totals[name])}: {'; '.join(described)}")]

    keys = [Key(_short(part), colour, letter=letters[part]) for part, colour in colours.items()]
    kinds = {kind for parts in bars.values() for _, kind in parts}
    keys += [Key(f"hatched: {text}", "#777777", hatched=True) for kind, text in hatched.items() if kind in kinds]
    mark = None
    if limit and limit[1] <= 1.5 * largest:
        mark = scaled_bytes(limit[1], unit)
        keys.append(Key(f"dashed line: {limit[0]}, {format_bytes(limit[1])}", INK, line=True, dashed=True))
    sizes = [drawn(name, scaled_bytes(1, unit), format_bytes(total, unit)) for name, total in totals.items()]
    panels = [BarPanel("Bytes", f"{label}, {unit}", sizes, mark=mark)]
    if any(len(parts) > 1 for parts in bars.values()):
        shares = [drawn(name, 100 / (total or 1)) for name, total in totals.items()]
        panels.append(BarPanel("Shares", "of each bar, %", shares, end=100.0))
    return bars_picture([_short(name) for name in bars], panels, keys, title, width)


def part_letters(bars: Mapping[str, Memory]) -> dict[str, str]:
    """A dict from part to letter, for all parts of the bars in order of appearance."""
    parts = dict.fromkeys(part for bar in bars.values() for part, _ in bar)
    return dict(zip(parts, itertools.cycle(string.ascii_uppercase), strict=False))


def grouped(memory: Mapping[str, Memory], modules: int) -> dict[str, dict[tuple[str, str], int]]:
    """A dict from policy to its bar, which maps (module or argument, `kept` or `working set`) to bytes.

    Layers whose paths differ only in a number are merged into one module, and the arrays of an argument into one part. Then
    modules are ranked by their largest share of any bar. All modules after the first `modules` are merged into one part, and
    so are all arguments of a finished step after the first three.
    """
    paths = dict.fromkeys(path for bar in memory.values() for path, phase in bar if _argument(path, phase) is None)
    names = dict(zip(paths, without_common_root(merged_layers(paths)), strict=True))
    bars = {policy: Counter[tuple[str, str]]() for policy in memory}
    for policy, bar in memory.items():
        for (path, phase), size in bar.items():
            module = _argument(path, phase) or names[path] or _NOWHERE
            bars[policy][module, _PHASES.get(phase, WORKING)] += size

    def largest_share(part: str) -> float:
        return max((bar[part, KEPT] + bar[part, WORKING]) / (bar.total() or 1) for bar in bars.values())

    ranked = sorted({part for bar in bars.values() for part, _ in bar}, key=lambda part: (-largest_share(part), part))
    given = [part for part in ranked if part.startswith(ARGUMENT)]
    computed = [part for part in ranked if part not in {*given, *_ARGUMENTS, _OTHER_ARGUMENTS, _NOWHERE}]
    order = [*computed[:modules], _OTHER, _NOWHERE, *_ARGUMENTS, *given[:_MOST_GIVEN], _OTHER_ARGUMENTS]
    merged: dict[str, dict[tuple[str, str], int]] = {}
    for policy, parts in bars.items():
        sizes = Counter[tuple[str, str]]()
        for (module, kind), size in parts.items():
            merged_into = _OTHER_ARGUMENTS if module in given else _OTHER
            sizes[module if module in order else merged_into, kind] += size
        merged[policy] = dict(sorted(sizes.items(), key=lambda entry: (order.index(entry[0][0]), entry[0][1])))
    return merged


def merged_layers(paths: Iterable[str]) -> list[str]:
    """The paths, with the first varying number of each written as `*`.

    A number varies if it differs among the paths with the same text before it.

    >>> merged_layers(["Net/block_0/Dense_0", "Net/block_0/Dense_1", "Net/block_1/Dense_0", "Net/head_0"])
    ['Net/block_*/Dense_0', 'Net/block_*/Dense_1', 'Net/block_*/Dense_0', 'Net/head_0']
    """
    split = [path.split("/") for path in paths]
    numbers: dict[tuple[str, ...], set[str]] = {}
    for parts in split:
        for place, (stem, number, rest) in _numbered(parts):
            numbers.setdefault((*parts[:place], stem, rest), set()).add(number)
    merged = []
    for parts in split:
        for place, (stem, _, rest) in _numbered(parts):
            if len(numbers[(*parts[:place], stem, rest)]) > 1:
                parts[place] = f"{stem}*{rest}"
                break
        merged.append("/".join(parts))
    return merged


def without_common_root(paths: Sequence[str]) -> list[str]:
    """The paths without the model's class, which is the first part of more than half of the paths. Other paths may lack it.

    >>> without_common_root(["Net/ffn/up", "Net/head", "Net", "head"]), without_common_root(["a/x", "b/x"])
    (['ffn/up', 'head', 'Net', 'head'], ['a/x', 'b/x'])
    """
    roots = Counter(path.split("/")[0] for path in paths if path)
    root, times = max(roots.items(), key=lambda entry: entry[1], default=("", 0))
    if 2 * times <= roots.total():
        return list(paths)
    return [path.removeprefix(f"{root}/") for path in paths]


def _numbered(parts: Sequence[str]) -> list[tuple[int, tuple[str, str, str]]]:
    """The position of each part that ends in a number, and (stem, number, rest); the rest is an array's suffix (`:input#0`)."""
    matches = [(place, re.fullmatch(r"(|.*?_)(\d+)(:.*)?", part)) for place, part in enumerate(parts)]
    return [(place, (match[1], match[2], match[3] or "")) for place, match in matches if match is not None]


def _argument(path: str, phase: str) -> str | None:
    """The name of the step's argument that a buffer contains or copies; None for arrays that the step computes."""
    name = re.sub(r"\[\d+\]$", "", path)
    if name in _ARGUMENTS:
        return name
    if name.startswith(ARGUMENT):
        return name
    return _OTHER_ARGUMENTS if phase == "argument" else None


def _short(name: str) -> str:
    return name if len(name) <= _LONGEST_NAME else f"{name[: _LONGEST_NAME // 2 - 1]}…{name[-_LONGEST_NAME // 2 + 1 :]}"


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
            if panel.mark is not None:  # in a narrow picture the line leaves out the names, which are above the bars
                line_top = row_bottom - (_ROW - _DESCENT if is_narrow else row_height)
                _draw_limit(
                    picture, scale(panel.mark), line_top, row_bottom, [_text_span(bar, scale) for bar in panel.rows[row]]
                )
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
        picture.text((_text_span(bar, scale)[0], y + thickness / 2 + 4), bar.text, size=_TEXT, colour=colour, look=style)


def _draw_limit(picture: Picture, across: float, top: float, bottom: float, texts: Sequence[tuple[float, float]]) -> None:
    """A row's part of the dashed line; the text beside a bar, from left to right in `texts`, interrupts it."""
    margin = (_ROW - _THICKNESS) / 2
    spans = [(top, bottom - _ROW + margin), (bottom - margin, bottom)]
    if not any(left <= across <= right for left, right in texts):
        spans = [(top, bottom)]
    for begin, end in spans:
        picture.line([(across, begin), (across, end)], INK, 1.2, dashed=True)


def _text_span(bar: PanelBar, scale: AxisScale) -> tuple[float, float]:
    """The left and right ends of a bar's text in pixels."""
    left = scale(sum(part.length for part in bar.parts)) + 6
    return left, left + text_width(bar.text, _TEXT)
