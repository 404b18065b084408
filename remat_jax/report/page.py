"""One self-contained HTML page: a verdict, checks, a tree, a table that sorts and filters, bars. It loads nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from remat_jax.report.document import document, escaped
from remat_jax.report.html_tables import Cell, Column, html_table, state
from remat_jax.report.tables import format_bytes


@dataclass
class TreeNode:
    """A node of the tree: its name, the text beside it, whether it passed, a mark, and its children."""

    name: str
    text: str = ""
    passed: bool = True
    mark: str = ""
    children: dict[str, TreeNode] = field(default_factory=dict)


@dataclass(frozen=True)
class Bar:
    """A bar: its label, its group, and its parts in bytes by name."""

    label: str
    group: str
    parts: Mapping[str, int | None]


def html_page(title: str, verdict: str, passed: bool, **evidence: Any) -> str:
    """The page as text; `evidence` are the keyword arguments of `page_body`.

    >>> text = html_page("t", "v", True, checks=[("one", True, "")], tree=TreeNode("m"), columns=[], rows=[],
    ...                  bars=[], details={})
    >>> "http" in text, '<th scope="row">one</th>' in text
    (False, True)
    """
    return document(title, page_body(verdict, passed, **evidence), scripts=["tables.js"])


def page_body(
    verdict: str,
    passed: bool,
    *,
    checks: Sequence[tuple[str, bool, str]],
    tree: TreeNode,
    columns: Sequence[Column],
    rows: Sequence[tuple[bool, Sequence[Cell]]],
    bars: Sequence[Bar],
    details: Mapping[str, str],
    level: int = 2,
) -> str:
    """The page below the title; needs `tables.js`.

    `rows` are pairs (passed, one cell per column); `details` are texts by heading; `level` is the level of the headings.
    """
    head, close = f"<h{level}>", f"</h{level}>"
    parts = [
        f'<p class="verdict {state(passed)}" role="status">{escaped(verdict)}</p>',
        f"{head}Checks{close}{_checks(checks)}",
        f"{head}Tensors{close}{_tensors(columns, rows)}",
        f"{head}Modules{close}",
        '<p class="hint">Modules that differ are opened; the first difference of each pass is marked.</p>',
        f'<ul class="tree">{_node(tree)}</ul>',
        f"{head}Memory{close}{_bars(bars, level + 1)}" if bars else "",
        *(f"{head}{escaped(heading)}{close}<pre>{escaped(text)}</pre>" for heading, text in details.items() if text),
    ]
    return "".join(parts)


def _checks(checks: Iterable[tuple[str, bool, str]]) -> str:
    rows = "".join(
        f'<tr class="{state(passed)}"><td>{"✓" if passed else "✗"}</td>'
        f'<th scope="row">{escaped(name)}</th><td>{escaped(result)}</td></tr>'
        for name, passed, result in checks
    )
    return f'<div class="wide"><table class="checks"><tbody>{rows}</tbody></table></div>'


def _tensors(columns: Sequence[Column], rows: Sequence[tuple[bool, Sequence[Cell]]]) -> str:
    return (
        '<p class="tools"><label>Filter <input id="filter" type="search" placeholder="part of a row"></label> '
        '<label><input id="failed" type="checkbox"> only what failed</label> '
        f'<output id="count">{len(rows)} of {len(rows)}</output></p>'
        f"{html_table(columns, rows, label='tensors', name='rows')}"
    )


def _node(node: TreeNode) -> str:
    mark = f' <strong class="mark">{escaped(node.mark)}</strong>' if node.mark else ""
    label = f'<span class="{state(node.passed)}">{escaped(node.name)}</span> <small>{escaped(node.text)}</small>{mark}'
    if not node.children:
        return f"<li>{label}</li>"
    opened = " open" if not node.passed or _marked(node) else ""
    inside = "".join(map(_node, node.children.values()))
    return f"<li><details{opened}><summary>{label}</summary><ul>{inside}</ul></details></li>"


def _marked(node: TreeNode) -> bool:
    return bool(node.mark) or any(map(_marked, node.children.values()))


def _bars(bars: Sequence[Bar], level: int) -> str:
    largest = max((size or 0 for bar in bars for size in bar.parts.values()), default=0) or 1
    lines, group = [], None
    for bar in bars:
        if bar.group != group:
            group = bar.group
            lines.append(f"<h{level}>{escaped(group)}</h{level}>")
        for name, size in bar.parts.items():
            if size is None:
                continue
            lines.append(
                f'<div class="bar"><span>{escaped(bar.label)}, {escaped(name)}</span>'
                f'<i class="{escaped(name)}" style="width:{60 * size / largest:.2f}%"></i><b>{format_bytes(size)}</b></div>'
            )
    hint = "Residuals on the device and on the host, without parameters and inputs; the peak includes everything."
    return f'<p class="hint">{hint}</p>' + "".join(lines)
