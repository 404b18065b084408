"""A Rich table that fits its console: it breaks no word, and leaves out columns if it is still too wide."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

_WORD_CAP = 34
"""Words up to this width are never broken while there is a column to leave out; the longest named policy has 30 letters."""
_NARROWEST = 12
# A word, or a number with its unit; in a range, "to" stays with the first number.
_WORDS = re.compile(r"[\d.,]+ (?:[KMGT]iB|B|ns|µs|ms|s|%|[kMGTPE]?FLOP|[A-Za-z]+/s)(?= |$)(?: to(?= ))?|\S+")
_PIECES = re.compile(r"[^/:._\-,]*[/:._\-,]?")


class FittedTable(Table):
    """A table of plain text. If it is too wide, the columns named in `optional` are left out first, in this order.

    Then the last columns of numbers are left out, but never one of the first two columns. The caption names what is left out.
    Columns of text stay: they wrap, and if nothing else helps, words are broken, after separators where there are some.
    """

    optional: Sequence[str] = ()

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        """Rich's segments."""
        yield from Table.__rich_console__(self._fitted(options.max_width), console, options)

    def _fitted(self, width: int) -> Table:
        columns = [_Column(column) for column in self.columns]
        shown = list(range(len(columns)))
        titles = [column.title for column in columns]
        named = [titles.index(title) for title in self.optional if title in titles]
        to_drop = [*named, *(at for at in reversed(shown[2:]) if at not in named and self.columns[at].no_wrap)]
        dropped = []
        while to_drop and _total([columns[at].least for at in shown]) > width:
            dropped.append(to_drop.pop(0))
            shown.remove(dropped[-1])
        kept = [columns[at] for at in shown]
        widths = _widths(kept, width)
        left_out = ", ".join(titles[at] for at in sorted(dropped) if titles[at])
        note = f"Left out for lack of room: {left_out}." if left_out else ""
        caption = "\n".join(filter(None, (str(self.caption or ""), note)))
        # A title breaks at the table's edge, also between a number and its unit. So the table is as wide as a title that fits.
        title = cell_len(str(self.title or ""))
        fitted = Table(
            title=self.title, caption=Text(caption) if caption else None, min_width=title if title <= width else None
        )
        for column, room in zip(kept, widths, strict=True):
            fitted.add_column(_wrapped(column.title, room), justify=column.justify, no_wrap=True)
        for row in zip(*(column.cells for column in kept), strict=True):
            fitted.add_row(*map(_wrapped, row, widths))
        return fitted


class _Column:
    """A column's texts, and its greatest and least widths."""

    def __init__(self, column: Any) -> None:
        self.title, self.justify = str(column.header), column.justify
        self.cells = [str(cell) for cell in column.cells]
        texts = (self.title, *self.cells)
        self.natural = max((cell_len(line) for text in texts for line in text.splitlines()), default=0)
        # Numbers do not wrap; their heading does.
        whole = [line for text in self.cells if column.no_wrap for line in text.splitlines()]
        words = [
            *_WORDS.findall(self.title),
            *(word for text in self.cells if not column.no_wrap for word in _WORDS.findall(text)),
        ]
        self.least = max(max(map(cell_len, whole), default=0), min(max(map(cell_len, words), default=0), _WORD_CAP))


def _total(widths: Sequence[int]) -> int:
    """The width of a table with columns of these widths: each has a blank on both sides and a line."""
    return sum(widths) + 3 * len(widths) + 1


def _widths(columns: Sequence[_Column], width: int) -> list[int]:
    """The columns' widths: the widest are narrowed first, down to their least, and below it only if nothing else is left."""
    widths, narrowest = [column.natural for column in columns], [min(column.least, _NARROWEST) for column in columns]
    # The first column has the names of the rows, which are broken last.
    bounds = ([column.least for column in columns], [columns[0].least, *narrowest[1:]], narrowest)
    for least in bounds if columns else ():
        while _total(widths) > width and (wide := [at for at, bound in enumerate(least) if widths[at] > bound]):
            widths[max(wide, key=widths.__getitem__)] -= 1
    return widths


def _wrapped(text: str, width: int) -> Text:
    """`text` in lines of at most `width`, broken between words; a longer word is broken after a separator, if it has one."""
    lines = []
    for paragraph in text.splitlines():
        line = ""
        for word in _WORDS.findall(paragraph):
            if line and cell_len(line) + 1 + cell_len(word) > width:
                lines.append(line)
                line = ""
            line = f"{line} {word}" if line else word
            while cell_len(line) > width:
                head = _head(line, width)
                lines.append(head)
                line = line[len(head) :]
        lines.append(line)
    return Text("\n".join(lines))


def _head(word: str, width: int) -> str:
    """The longest start of `word` of at most `width` that ends with a separator; without one, its first `width` letters."""
    head = ""
    for piece in _PIECES.findall(word):
        if cell_len(head + piece) > width:
            break
        head += piece
    return head or word[: max(1, width)]
