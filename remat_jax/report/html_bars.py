"""Stacked bars of a page: each part has a letter, a colour and maybe stripes, and a table behind them has the bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from remat_jax.report.document import escaped
from remat_jax.report.html_tables import Cell, Column, html_table
from remat_jax.report.tables import format_bytes

Part = tuple[str, str]
"""What it is of, and its kind."""

_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_LEAST = 4.5
"""Per cent of the width below which a part has no room for its letter."""


@dataclass(frozen=True)
class Stack:
    """A bar: its label, and its parts in bytes."""

    label: str
    parts: Mapping[Part, int]

    @property
    def total(self) -> int:
        """All parts together."""
        return sum(self.parts.values())


def stacked_bars(
    stacks: Sequence[Stack],
    *,
    label: str,
    striped: str = "",
    limit: tuple[str, int] | None = None,
    colours: Mapping[str, str] | None = None,
) -> str:
    """Bars of one scale, or each in shares of itself as the reader chooses; their legend; and the same as a table.

    Args:
      label: what they show, for a screen reader.
      striped: the kind of part that is drawn with stripes.
      limit: a name and bytes, drawn as a line across all bars where it is not far beyond them.
      colours: class by name; the others have one in the order in which they come.

    >>> text = stacked_bars([Stack("full", {("ffn", "kept"): 1024, ("head", "kept"): 512})], label="memory")
    >>> 'aria-label="full: 1.5 KiB: A ffn, kept 1.0 KiB; B head, kept 512 B"' in text
    True
    """
    names = list(dict.fromkeys(name for one in stacks for name, _ in one.parts))
    letters = {name: _LETTERS[at % len(_LETTERS)] for at, name in enumerate(names)}
    free = (f"c{at}" for at in range(len(names)))
    classes = {name: (colours or {}).get(name) or next(free) for name in names}
    largest = max((one.total for one in stacks), default=0)
    shown = limit if limit and limit[1] <= 1.5 * largest else None
    scale = max(largest, shown[1] if shown else 0) or 1
    shares = _SHARES if len(stacks) > 1 and any(len(one.parts) > 1 for one in stacks) else ""
    bars = "".join(_bar(one, letters, classes, striped, scale, shown) for one in stacks)
    return (
        f'<div class="stacks" role="group" aria-label="{escaped(label)}">{shares}{bars}</div>'
        f"{_legend(letters, classes, striped if _has(stacks, striped) else '', shown)}"
        f"<details><summary>The same as a table</summary>{_table(stacks, letters, label)}</details>"
    )


_SHARES = '<label class="scale"><input type="checkbox" autocomplete="off"> each bar in shares of itself</label>'


def _has(stacks: Sequence[Stack], kind: str) -> bool:
    return bool(kind) and any(part[1] == kind for one in stacks for part in one.parts)


def _bar(
    stack: Stack,
    letters: Mapping[str, str],
    classes: Mapping[str, str],
    striped: str,
    scale: int,
    limit: tuple[str, int] | None,
) -> str:
    said, pieces = [], []
    for (name, kind), size in stack.parts.items():
        text = f"{letters[name]} {name}, {kind} {format_bytes(size)}"
        said.append(text)
        share, own = 100 * size / scale, 100 * size / (stack.total or 1)
        letter = f"<b>{letters[name]}</b>" if own >= _LEAST else ""
        look = f"{classes[name]}{' striped' * (kind == striped)}{' slim' * (share < _LEAST)}"
        told = f"{escaped(text)}, {own:.1f} % ({size:,} bytes)"
        pieces.append(f'<i class="{look}" style="--of-all:{share:.3f}%;--of-own:{own:.3f}%" title="{told}">{letter}</i>')
    line = f'<em style="left:{100 * limit[1] / scale:.3f}%"></em>' if limit else ""
    total = format_bytes(stack.total)
    return (
        f'<div class="line"><span class="of">{escaped(stack.label)}</span>'
        f'<span class="pieces" role="img" aria-label="{escaped(f"{stack.label}: {total}: " + "; ".join(said))}">'
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


def _table(stacks: Sequence[Stack], letters: Mapping[str, str], label: str) -> str:
    parts = dict.fromkeys(part for one in stacks for part in one.parts)
    columns = [Column(""), Column("what", "name"), Column("kind"), *(Column(one.label, "bytes") for one in stacks)]
    rows: list[tuple[bool, list[Cell]]] = [
        (True, [letters[part[0]], *part, *(one.parts.get(part, 0) for one in stacks)]) for part in parts
    ]
    rows.append((True, ["", "together", "", *(one.total for one in stacks)]))
    return html_table(columns, rows, label=f"{label}, as a table", sortable=False)
