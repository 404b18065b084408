"""Stacked bars of a page: each part has a letter, a colour and maybe stripes; a table under the bars has the bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from remat_jax.report.document import escaped
from remat_jax.report.html_tables import Cell, Column, html_table
from remat_jax.report.tables import format_bytes

PartKey = tuple[str, str]
"""The name of a part of a bar, and its kind."""

_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_LEAST = 4.5
"""The least width of a part with a letter, in per cent of the bar."""


@dataclass(frozen=True)
class StackedBar:
    """A bar: its label, and its parts in bytes."""

    label: str
    parts: Mapping[PartKey, int]

    @property
    def total(self) -> int:
        """The sum of all parts."""
        return sum(self.parts.values())


def stacked_bars(
    stacks: Sequence[StackedBar],
    *,
    label: str,
    striped: str = "",
    limit: tuple[str, int] | None = None,
    colours: Mapping[str, str] | None = None,
) -> str:
    """Bars on one scale, or in shares of each bar if the reader chooses so; their legend; the same figures as a table.

    Args:
      label: a description for screen readers.
      striped: the kind of part that is drawn with stripes.
      limit: a name and bytes, drawn as a line across all bars unless it is far beyond them.
      colours: CSS classes by name; other names get classes in order of appearance.

    >>> text = stacked_bars([StackedBar("full", {("ffn", "kept"): 1024, ("head", "kept"): 512})], label="memory")
    >>> 'aria-label="full: 1.5 KiB: A ffn, kept 1.0 KiB; B head, kept 512 B"' in text
    True
    """
    names = list(dict.fromkeys(name for stack in stacks for name, _ in stack.parts))
    letters = {name: _LETTERS[at % len(_LETTERS)] for at, name in enumerate(names)}
    free = (f"c{at}" for at in range(len(names)))
    classes = {name: (colours or {}).get(name) or next(free) for name in names}
    largest = max((stack.total for stack in stacks), default=0)
    shown = limit if limit and limit[1] <= 1.5 * largest else None
    scale = max(largest, shown[1] if shown else 0) or 1
    shares = _SHARES if len(stacks) > 1 and any(len(stack.parts) > 1 for stack in stacks) else ""
    bars = "".join(_bar(stack, letters, classes, striped, scale, shown) for stack in stacks)
    return (
        f'<div class="stacks" role="group" aria-label="{escaped(label)}">{shares}{bars}</div>'
        f"{_legend(letters, classes, striped if _has(stacks, striped) else '', shown)}"
        f"<details><summary>The same as a table</summary>{_table(stacks, letters, label)}</details>"
    )


_SHARES = '<label class="scale"><input type="checkbox" autocomplete="off"> each bar in shares of itself</label>'


def _has(stacks: Sequence[StackedBar], kind: str) -> bool:
    return bool(kind) and any(part[1] == kind for stack in stacks for part in stack.parts)


def _bar(
    stack: StackedBar,
    letters: Mapping[str, str],
    classes: Mapping[str, str],
    striped: str,
    scale: int,
    limit: tuple[str, int] | None,
) -> str:
    texts, pieces = [], []
    for (name, kind), size in stack.parts.items():
        text = f"{letters[name]} {name}, {kind} {format_bytes(size)}"
        texts.append(text)
        share, share_of_bar = 100 * size / scale, 100 * size / (stack.total or 1)
        letter = f"<b>{letters[name]}</b>" if share_of_bar >= _LEAST else ""
        look = f"{classes[name]}{' striped' * (kind == striped)}{' slim' * (share < _LEAST)}"
        tooltip = f"{escaped(text)}, {share_of_bar:.1f} % ({size:,} bytes)"
        pieces.append(
            f'<i class="{look}" style="--of-all:{share:.3f}%;--of-own:{share_of_bar:.3f}%" title="{tooltip}">{letter}</i>'
        )
    line = f'<em style="left:{100 * limit[1] / scale:.3f}%"></em>' if limit else ""
    total = format_bytes(stack.total)
    return (
        f'<div class="line"><span class="of">{escaped(stack.label)}</span>'
        f'<span class="pieces" role="img" aria-label="{escaped(f"{stack.label}: {total}: " + "; ".join(texts))}">'
        f"{''.join(pieces)}{line}</span>"
        f'<b class="total" data-value="{stack.total}" title="{stack.total:,} bytes">{total}</b></div>'
    )


def _legend(letters: Mapping[str, str], classes: Mapping[str, str], striped: str, limit: tuple[str, int] | None) -> str:
    entries = [f'<li><i class="{classes[name]}"><b>{letter}</b></i> {escaped(name)}</li>' for name, letter in letters.items()]
    if striped:
        entries.append(f'<li><i class="plain striped"></i> striped: {escaped(striped)}</li>')
    if limit:
        entries.append(f'<li><i class="limit"></i> dashed line: {escaped(limit[0])}, {format_bytes(limit[1])}</li>')
    return f'<ul class="letters">{"".join(entries)}</ul>'


def _table(stacks: Sequence[StackedBar], letters: Mapping[str, str], label: str) -> str:
    parts = dict.fromkeys(part for stack in stacks for part in stack.parts)
    columns = [Column(""), Column("what", "name"), Column("kind"), *(Column(stack.label, "bytes") for stack in stacks)]
    rows: list[tuple[bool, list[Cell]]] = [
        (True, [letters[part[0]], *part, *(stack.parts.get(part, 0) for stack in stacks)]) for part in parts
    ]
    rows.append((True, ["", "together", "", *(stack.total for stack in stacks)]))
    return html_table(columns, rows, label=f"{label}, as a table", sortable=False)
