"""Tables of a page: cells show readable figures and sort by their exact values."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from remat_jax.report.document import escaped
from remat_jax.report.tables import MISSING, format_bytes, format_flops, format_seconds

Cell = str | float | int | bool | None


@dataclass(frozen=True)
class Column:
    """A column of a table: its title, and the format of its cells.

    `style` is `text`, `name` (the row's heading), `count`, `bytes`, `seconds`, `flops`, `error` or `ratio`.
    """

    title: str
    style: str = "text"


def html_table(
    columns: Sequence[Column],
    rows: Iterable[tuple[bool, Sequence[Cell]]],
    *,
    label: str,
    name: str = "",
    sortable: bool = True,
) -> str:
    """A table as HTML. `rows` are pairs (passed, one cell per column); `label` is for screen readers.

    >>> text = html_table([Column("policy", "name"), Column("device", "bytes")], [(True, ["full", 2048])], label="memory")
    >>> '<td class="number" data-value="2048" title="2,048 bytes">2.0 KiB</td>' in text
    True
    """
    heads = "".join(_head(index, column, sortable) for index, column in enumerate(columns))
    body = "".join(
        f'<tr class="{state(passed)}">' + "".join(_cell(c, v) for c, v in zip(columns, cells, strict=True)) + "</tr>"
        for passed, cells in rows
    )
    id_attribute = f' id="{name}"' if name else ""
    class_attribute = ' class="sortable"' if sortable else ""
    # A table that is wider than the window scrolls by itself. Without buttons inside, the keyboard must reach the table.
    tabindex = "" if sortable else ' tabindex="0"'
    return (
        f'<div class="wide" role="region" aria-label="{escaped(label)}"{tabindex}><table{id_attribute}{class_attribute}>'
        f"<thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def state(passed: bool) -> str:
    """The CSS class of a check that passed or failed."""
    return "ok" if passed else "failed"


def _head(index: int, column: Column, sortable: bool) -> str:
    title = escaped(column.title)
    number = "" if column.style in ("text", "name") else ' class="number"'
    if not sortable:
        return f'<th scope="col"{number}>{title}</th>'
    return f'<th scope="col"{number} aria-sort="none"><button type="button" data-column="{index}">{title}</button></th>'


def _cell(column: Column, value: Cell) -> str:
    if column.style in ("text", "name") or isinstance(value, str):
        written = escaped(MISSING if value is None else value)
        kind, scope = ("th", ' scope="row"') if column.style == "name" else ("td", "")
        return f'<{kind}{scope} data-value="{written}">{written}</{kind}>'
    number = math.nan if value is None else float(value)
    # Missing values sort below all numbers.
    sorted_by: float | int = -1 if value is None or math.isnan(number) else value
    exact = f' title="{value:,} bytes"' if column.style == "bytes" and value is not None else ""
    return f'<td class="number" data-value="{sorted_by}"{exact}>{escaped(_number(value, column.style))}</td>'


def _number(value: float | int | None, style: str) -> str:
    if style == "bytes":
        return format_bytes(None if value is None else int(value))
    if style == "seconds":
        return format_seconds(value)
    if style == "flops":
        return MISSING if value is None else format_flops(int(value))
    if style == "count" and value is not None:
        return f"{int(value):,}"
    if value is None or value == 0:
        return MISSING if value is None else "0"
    return f"{value:.2f}×" if style == "ratio" and 0.01 <= value < 1e4 else f"{value:.1e}"
