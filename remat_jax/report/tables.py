"""Tables and number formats shared by the command line and the reports."""

from __future__ import annotations

import io
import math
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, SupportsIndex

from rich.console import Console
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from remat_jax.reading import visible
from remat_jax.report.fitted_table import FittedTable

MISSING = "n/a"
BYTE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
TIME_UNITS = (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6), ("ns", 1e-9))

# A number and its unit: "12", "-3.5 MiB", "1.34×", "1.2e-16"; but not a name such as "8xh100".
_NUMBER = re.compile(r"[-+]?(\d[\d.,]*(e[-+]?\d+)?|inf|nan)([×%]| ?[A-Za-z/]+)?")


def table(
    title: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[object]],
    *,
    formats: Mapping[str, Callable[[Any], str]] | None = None,
    caption: str | None = None,
    optional: Sequence[str] = (),
) -> Table:
    """A Rich table with right-aligned columns of numbers and left-aligned columns of text.

    On a narrow console no word is broken. If the table is still too wide, the columns named in `optional` are left out first.

    `formats` maps a column to the function that formats its values; `None` is written `n/a` in every column. Text is literal:
    square brackets, as in `blocks[0]`, are not Rich's markup. An empty column without a name is left out.

    Raises `ValueError` if a row's length differs from that of `columns`, and for a format of an unknown column.

    >>> t = table("memory", ["mode", "device"], [["off", 2048], ["offload", None]], formats={"device": format_bytes})
    >>> [str(cell) for cell in t.columns[1].cells], t.columns[1].justify
    (['2.0 KiB', 'n/a'], 'right')
    >>> [column.header.plain for column in table("fits", ["batch", ""], [[1, ""], [2, ""]]).columns]
    ['batch']
    """
    formats = dict(formats or {})
    unknown = sorted(set(formats) - set(columns))
    if unknown:
        raise ValueError(f"formats names {unknown}, which are not among the columns {list(columns)}: correct the names")
    for position, row in enumerate(rows):
        if len(row) != len(columns):
            raise ValueError(
                f"rows[{position}] has {len(row)} values, expected {len(columns)}, one for each of {list(columns)}"
            )
    result = FittedTable(title=Text(title) if title else None, caption=Text(caption) if caption else None)
    result.optional = optional
    written = [
        [MISSING if value is None else formats.get(name, str)(value) for name, value in zip(columns, row, strict=True)]
        for row in rows
    ]
    shown = [position for position, name in enumerate(columns) if name or any(row[position] for row in written)]
    for position in shown:
        numeric = _is_numeric([row[position] for row in written])
        # A wrapped number can be misread, so only text wraps.
        result.add_column(Text(columns[position]), justify="right" if numeric else "left", no_wrap=numeric, overflow="fold")
    for cells in written:
        result.add_row(*(Text(cells[position]) for position in shown))
    return result


def format_bytes(n: SupportsIndex | None, unit: str | None = None) -> str:
    """A number of bytes with one decimal in `unit`, by default the smallest binary unit that gives less than 1024.

    `n` may be a negative difference. `None` is written `n/a`.

    Raises `TypeError` for a number that is not an integer and `ValueError` for an unknown unit.

    >>> format_bytes(1536), format_bytes(1536, unit="MiB"), format_bytes(None)
    ('1.5 KiB', '0.0 MiB', 'n/a')
    """
    if unit is not None and unit not in BYTE_UNITS:
        raise ValueError(f"unit={unit!r} is not a unit of bytes: use one of {', '.join(BYTE_UNITS)}, or None to choose")
    if n is None:
        return MISSING
    try:
        count = operator.index(n)
    except TypeError:
        raise TypeError(f"n={n!r} is not a number of bytes: expected an integer or None") from None
    unit = unit or byte_unit(count)
    return f"{count} B" if unit == "B" else f"{scaled_bytes(count, unit):.1f} {unit}"


def byte_unit(n: int) -> str:
    """The smallest unit in which `n` bytes, rounded to one decimal, are below 1024."""
    # Without rounding first, 1024**2 - 1 bytes would be written "1024.0 KiB".
    return next((unit for unit in BYTE_UNITS if round(abs(scaled_bytes(n, unit)), 1) < 1024), BYTE_UNITS[-1])


def scaled_bytes(n: int, unit: str) -> float:
    """`n` bytes in `unit`."""
    return n / 1024.0 ** BYTE_UNITS.index(unit)


def format_ratio(ratio: float | None) -> str:
    """A ratio to about three significant digits, with a multiplication sign; `None` is written `n/a`, NaN `nan`.

    >>> [format_ratio(r) for r in (1.0, 1.337, 12.34, 123.4, 0.00213, None)]
    ['1.00×', '1.34×', '12.3×', '123×', '0.0021×', 'n/a']
    """
    if ratio is None:
        return MISSING
    if not math.isfinite(ratio):
        return str(float(ratio))
    size = abs(ratio)
    if size == 0 or 0.1 <= size:
        decimals = 2 if round(size, 2) < 10 else 1 if round(size, 1) < 100 else 0
        return f"{ratio:.{decimals}f}×"
    return f"{ratio:.2g}×"


def format_error(error: float | None) -> str:
    """A numerical error to two significant digits; exactly zero is written `0`, `None` `n/a`, NaN `nan`.

    Raises `ValueError` for a negative error.

    >>> format_error(1.234e-16), format_error(0.0), format_error(None)
    ('1.2e-16', '0', 'n/a')
    """
    if error is None:
        return MISSING
    if error < 0:
        raise ValueError(f"error={error!r} is negative: expected a norm or the size of a difference, 0 or more")
    if error == 0:
        return "0"
    return f"{error:.1e}" if math.isfinite(error) else str(float(error))


def format_seconds(seconds: float | None) -> str:
    """An estimated time in a suitable unit, to two significant digits.

    >>> format_seconds(0.0123), format_seconds(2.5e-5), format_seconds(0.456), format_seconds(0.0), format_seconds(None)
    ('12 ms', '25 µs', '460 ms', '0 s', 'n/a')
    >>> format_seconds(0.000999)
    '1 ms'
    """
    if seconds is None:
        return MISSING
    unit, size = time_unit(seconds)
    if size < 1 and abs(seconds) >= 995 * size:  # 999 µs is 1 ms
        unit, size = time_unit(1001 * size)
        return f"{seconds / size:.1g} {unit}"
    return f"{float(f'{seconds / size:.2g}'):.4g} {unit}" if abs(seconds) >= size else "0 s"


def time_unit(seconds: float) -> tuple[str, float]:
    """The largest unit of time that is at most `seconds`, and the unit's length in seconds."""
    return next((unit for unit in TIME_UNITS if abs(seconds) >= unit[1]), TIME_UNITS[-1])


ASSUMED_RANGE = (0.85, 1.35)
"""The range of the true time, in multiples of an estimate that uses assumed rates.

Published large matmuls reach 0.65 to 0.87 of the data sheet's rate; 0.8 is assumed. The rest of a model is slower.
"""


def format_estimate(seconds: float | None, assumed: bool) -> str:
    """An estimated time as text; if the estimate uses assumed rates, the range `ASSUMED_RANGE` around it.

    >>> format_estimate(0.82, False), format_estimate(0.82, True)
    ('820 ms', '700 ms to 1.1 s')
    """
    if not seconds or not assumed:
        return format_seconds(seconds)
    return " to ".join(format_seconds(share * seconds) for share in ASSUMED_RANGE)


def format_difference(seconds: float | None, assumed: bool, below: str = "less") -> str:
    """An estimated difference of two times; `below` marks a negative one, whose minus would look like that of a range.

    >>> format_difference(-0.0012, True), format_difference(0.0012, False, "slower")
    ('1 ms to 1.6 ms less', '1.2 ms')
    """
    if seconds is None or seconds >= 0:
        return format_estimate(seconds, assumed)
    return f"{format_estimate(-seconds, assumed)} {below}"


def format_flops(n: int, *, sign: bool = False) -> str:
    """A number of operations to three significant digits; with `sign` a signed difference, empty for 0.

    >>> format_flops(17_200_000_000), format_flops(-2000, sign=True), format_flops(0, sign=True)
    ('17.2 GFLOP', '-2 kFLOP', '')
    """
    if not n:
        return "" if sign else "0"
    scaled, unit = float(n), ""
    for larger in ("k", "M", "G", "T", "P", "E"):
        if abs(scaled) < 1000:
            break
        scaled, unit = scaled / 1000, larger
    return f"{scaled:{'+' if sign else ''}.3g} {unit}FLOP"


def _is_numeric(cells: Sequence[str]) -> bool:
    present = [cell for cell in cells if cell not in (MISSING, "")]
    return bool(present) and all(_NUMBER.fullmatch(cell) for cell in present)


class SafeConsole(Console):
    """A console that shows control characters in any name as escapes."""

    def render(self, renderable: Any, options: Any = None) -> Iterator[Segment]:
        """Rich's segments with control characters escaped; Rich also calls this method for the parts of `renderable`."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(visible(segment.text), segment.style)


def render(renderable: Any, width: int = 160) -> str:
    """`renderable` (a table, or anything that Rich can draw) as plain text of at most `width` columns.

    >>> "off" in render(table("", ["mode"], [["off"]]))
    True
    """
    console = SafeConsole(width=width, file=io.StringIO(), color_system=None)
    with console.capture() as capture:
        console.print(renderable)
    return capture.get().rstrip("\n")
