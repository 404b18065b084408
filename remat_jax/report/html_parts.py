"""The parts of a page: tables that sort by exact values, pictures for a wide and for a narrow window, stacked bars."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from remat_jax.report.document import escaped
from remat_jax.report.stacked_bars import Memory, part_letters, stacked_figure
from remat_jax.report.svg import NARROW, WIDTH, Picture
from remat_jax.report.tables import (
    MISSING,
    format_bytes,
    format_difference,
    format_error,
    format_flops,
    format_ratio,
    format_seconds,
)


class Estimate(NamedTuple):
    """An estimated time, or a difference of times, in seconds; if a rate is `assumed`, it is written as a range."""

    seconds: float | None
    assumed: bool


Cell = str | float | int | bool | Estimate | None
_NUMBERS: Mapping[str, Callable[[Any], str]] = {
    "count": "{:,}".format,
    "bytes": format_bytes,
    "seconds": format_seconds,
    "flops": format_flops,
    "error": format_error,
    "ratio": format_ratio,
}


@dataclass(frozen=True)
class Column:
    """A column; `style` is `text`, `name` (the row's heading), `count`, `bytes`, `seconds`, `flops`, `error` or `ratio`."""

    title: str
    style: str = "text"


def html_table(
    columns: Sequence[Column],
    rows: Iterable[Sequence[Cell]],
    *,
    label: str,
    name: str = "",
    sortable: bool = True,
    passed: Iterable[bool] | None = None,
) -> str:
    """A table as HTML. `label` is for screen readers. Rows whose entry in `passed` is False are marked.

    >>> text = html_table([Column("policy", "name"), Column("device", "bytes")], [["full", 2048]], label="memory")
    >>> '<td class="number" data-value="2048" title="2,048 bytes">2.0 KiB</td>' in text
    True
    """
    heads = "".join(_head(index, column, sortable) for index, column in enumerate(columns))
    body = "".join(
        f'<tr class="{state(is_passed)}">' + "".join(_cell(c, v) for c, v in zip(columns, cells, strict=True)) + "</tr>"
        for cells, is_passed in zip(rows, itertools.repeat(True) if passed is None else passed, strict=False)
    )
    id_attribute = f' id="{name}"' if name else ""
    class_attribute = ' class="sortable"' if sortable else ""
    # A table wider than the window scrolls inside this region. `tabindex` makes a table without buttons reachable by keyboard.
    tabindex = "" if sortable else ' tabindex="0"'
    return (
        f'<div class="wide" role="region" aria-label="{escaped(label)}"{tabindex}><table{id_attribute}{class_attribute}>'
        f"<thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def state(passed: bool) -> str:
    """The CSS class of a check that passed or failed."""
    return "ok" if passed else "failed"


def html_picture(draw: Callable[[float], Picture], label: str, role: str = "img") -> str:
    """`draw(width)` as HTML, for a wide and for a narrow window; `label` is for screen readers."""
    drawn = (f'<div class="{window}">{draw(width).html()}</div>' for window, width in (("broad", WIDTH), ("narrow", NARROW)))
    return f'<div class="picture" role="{role}" aria-label="{escaped(label)}">{"".join(drawn)}</div>'


def stacked_bars(bars: Mapping[str, Memory], label: str, **options: Any) -> str:
    """The picture that `stacked_figure` draws from these arguments, and its values as a table; "" if there are no bars.

    >>> text = stacked_bars({"full": {("ffn", "kept"): 1024, ("head", "kept"): 512}}, "memory")
    >>> 'aria-label="full: 1.5 KiB: A ffn, kept 1.0 KiB; B head, kept 512 B"' in text
    True
    """
    if not bars:
        return ""
    picture = html_picture(lambda width: stacked_figure(bars, label, width=width, **options), label, role="group")
    letters = part_letters(bars)
    parts = dict.fromkeys(part for bar in bars.values() for part in bar)
    columns = [Column(""), Column("what", "name"), Column("kind"), *(Column(name, "bytes") for name in bars)]
    rows: list[list[Cell]] = [[letters[part[0]], *part, *(bar.get(part, 0) for bar in bars.values())] for part in parts]
    rows.append(["", "together", "", *(sum(bar.values()) for bar in bars.values())])
    table = html_table(columns, rows, label=f"{label}, as a table", sortable=False)
    return f"{picture}<details><summary>The same as a table</summary>{table}</details>"


def _head(index: int, column: Column, sortable: bool) -> str:
    title = escaped(column.title)
    number = ' class="number"' if column.style in _NUMBERS else ""
    if not sortable:
        return f'<th scope="col"{number}>{title}</th>'
    return f'<th scope="col"{number} aria-sort="none"><button type="button" data-column="{index}">{title}</button></th>'


def _cell(column: Column, value: Cell) -> str:
    if column.style not in _NUMBERS or isinstance(value, str):
        text = escaped(MISSING if value is None else value)
        kind, scope = ("th", ' scope="row"') if column.style == "name" else ("td", "")
        return f'<{kind}{scope} data-value="{text}">{text}</{kind}>'
    written = _NUMBERS[column.style]
    if isinstance(value, Estimate):
        written, value = functools.partial(format_difference, assumed=value.assumed), value.seconds
    # Missing values sort below all numbers.
    sorted_by = -1 if value is None or math.isnan(value) else value
    exact = f' title="{value:,} bytes"' if column.style == "bytes" and value is not None else ""
    text = MISSING if value is None else written(value)
    return f'<td class="number" data-value="{sorted_by}"{exact}>{escaped(text)}</td>'
