"""One self-contained HTML page: a verdict, checks, a tree, a table that sorts and filters, bars. It loads nothing.

The palette is that of the pictures, light or dark as the reader has it.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources

from remat_jax.report.tables import MISSING, format_bytes

Cell = str | float | int | bool | None


@dataclass
class Node:
    """A node of the tree: its name, what is said beside it, whether it holds, a mark, and what is inside."""

    name: str
    text: str = ""
    passed: bool = True
    mark: str = ""
    children: dict[str, Node] = field(default_factory=dict)


@dataclass(frozen=True)
class Column:
    """A column of the table: its title, and how its cells are written; they sort by their values."""

    title: str
    style: str = "text"


@dataclass(frozen=True)
class Bar:
    """A bar: what it stands for, and its parts in bytes by name."""

    label: str
    group: str
    parts: Mapping[str, int | None]


def html_page(
    title: str,
    verdict: str,
    passed: bool,
    *,
    checks: Sequence[tuple[str, bool, str]],
    tree: Node,
    columns: Sequence[Column],
    rows: Sequence[tuple[bool, Sequence[Cell]]],
    bars: Sequence[Bar],
    details: Mapping[str, str],
) -> str:
    """The page as text. `rows` are (whether it holds, one cell per column); `details` are texts to unfold, by heading.

    >>> text = html_page("t", "v", True, checks=[("one", True, "")], tree=Node("m"), columns=[], rows=[], bars=[], details={})
    >>> "http" in text, '<th scope="row">one</th>' in text
    (False, True)
    """
    parts = [
        f"<h1>{_text(title)}</h1>",
        f'<p class="verdict {_state(passed)}" role="status">{_text(verdict)}</p>',
        _checks(checks),
        _table(columns, rows),
        "<h2>Modules</h2>",
        '<p class="hint">Opened where something differs; the first difference of each pass is marked.</p>',
        f'<ul class="tree">{_node(tree)}</ul>',
        _bars(bars),
        *(f"<h2>{_text(heading)}</h2><pre>{_text(text)}</pre>" for heading, text in details.items() if text),
    ]
    style, script = (_asset(name) for name in ("page.css", "page.js"))
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{_text(title)}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{style}</style></head>'
        f"<body><main>{''.join(parts)}</main><script>{script}</script></body></html>\n"
    )


def _asset(name: str) -> str:
    return resources.files("remat_jax.report").joinpath(name).read_text(encoding="utf-8")


def _text(value: object) -> str:
    return html.escape(str(value))


def _state(passed: bool) -> str:
    return "ok" if passed else "failed"


def _checks(checks: Iterable[tuple[str, bool, str]]) -> str:
    rows = "".join(
        f'<tr class="{_state(passed)}"><td>{"✓" if passed else "✗"}</td>'
        f'<th scope="row">{_text(name)}</th><td>{_text(found)}</td></tr>'
        for name, passed, found in checks
    )
    return f'<h2>Checks</h2><div class="wide"><table class="checks"><tbody>{rows}</tbody></table></div>'


def _table(columns: Sequence[Column], rows: Sequence[tuple[bool, Sequence[Cell]]]) -> str:
    heads = "".join(
        f'<th scope="col" aria-sort="none"><button type="button" data-column="{index}">{_text(column.title)}</button></th>'
        for index, column in enumerate(columns)
    )
    body = "".join(
        f'<tr class="{_state(passed)}">' + "".join(_cell(c, v) for c, v in zip(columns, cells, strict=True)) + "</tr>"
        for passed, cells in rows
    )
    return (
        "<h2>Tensors</h2>"
        '<p class="tools"><label>Filter <input id="filter" type="search" placeholder="part of a row"></label> '
        '<label><input id="failed" type="checkbox"> only what failed</label> '
        f'<output id="count">{len(rows)} of {len(rows)}</output></p>'
        f'<div class="wide"><table id="rows"><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table></div>'
    )


def _cell(column: Column, value: Cell) -> str:
    if column.style == "text" or isinstance(value, str):
        return f'<td data-value="{_text(value)}">{_text(MISSING if value is None else value)}</td>'
    number = math.nan if value is None else float(value)
    # What is not there sorts below everything.
    sorted_by = -1 if math.isnan(number) else number
    return f'<td class="number" data-value="{sorted_by}">{_text(_number(value, column.style))}</td>'


def _number(value: float | None, style: str) -> str:
    if value is None or value == 0:
        return MISSING if value is None else "0"
    return f"{value:.2f}×" if style == "ratio" and 0.01 <= value < 1e4 else f"{value:.1e}"


def _node(node: Node) -> str:
    mark = f' <strong class="mark">{_text(node.mark)}</strong>' if node.mark else ""
    label = f'<span class="{_state(node.passed)}">{_text(node.name)}</span> <small>{_text(node.text)}</small>{mark}'
    if not node.children:
        return f"<li>{label}</li>"
    opened = " open" if not node.passed or _marked(node) else ""
    inside = "".join(map(_node, node.children.values()))
    return f"<li><details{opened}><summary>{label}</summary><ul>{inside}</ul></details></li>"


def _marked(node: Node) -> bool:
    return bool(node.mark) or any(map(_marked, node.children.values()))


def _bars(bars: Sequence[Bar]) -> str:
    if not bars:
        return ""
    largest = max((size or 0 for bar in bars for size in bar.parts.values()), default=0) or 1
    lines, group = [], None
    for bar in bars:
        if bar.group != group:
            group = bar.group
            lines.append(f"<h3>{_text(group)}</h3>")
        for name, size in bar.parts.items():
            if size is None:
                continue
            lines.append(
                f'<div class="bar"><span>{_text(bar.label)}, {_text(name)}</span>'
                f'<i class="{_text(name)}" style="width:{60 * size / largest:.2f}%"></i><b>{format_bytes(size)}</b></div>'
            )
    hint = "What is kept between the passes, on the device and on the host, parameters and inputs excluded; the peak has all."
    return f'<h2>Memory</h2><p class="hint">{hint}</p>' + "".join(lines)
