"""The rows of the pictures: one per framework and mode, checked and grouped."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]

ROW_KEYS = ("framework", "model", "mode", "residual_device_bytes", "residual_host_bytes", "peak_bytes", "relative_time")
PEAK_KINDS = ("torch", "cpu", "h200")

_LONGEST_MODE = 34


def plain_rows(rows: Iterable[Any]) -> list[Row]:
    """`rows` as mappings: a mapping as it is, a dataclass instance as its fields. Values may be `None`.

    Raises `ValueError` if there is no row, a row lacks one of `ROW_KEYS`, `peak_bytes` has a key outside `PEAK_KINDS` or
    `relative_time` is not a positive number, and `TypeError` for a row that is neither a mapping nor a dataclass instance.

    >>> plain_rows([{"framework": "PyTorch"}])
    Traceback (most recent call last):
    ...
    ValueError: rows[0] lacks model, mode, residual_device_bytes, residual_host_bytes, peak_bytes, relative_time: ...
    """
    result: list[Row] = []
    for position, given in enumerate(rows):
        row = _mapping(given, position)
        missing = [key for key in ROW_KEYS if key not in row]
        if missing:
            raise ValueError(f"rows[{position}] lacks {', '.join(missing)}: give these keys, with None where there is no value")
        unknown = sorted(set(row["peak_bytes"] or ()) - set(PEAK_KINDS))
        if unknown:
            raise ValueError(f"rows[{position}]['peak_bytes'] has {unknown}: expected only {', '.join(PEAK_KINDS)}")
        time = row["relative_time"]
        if time is not None and not (math.isfinite(time) and time > 0):
            raise ValueError(f"rows[{position}]['relative_time']={time!r}: expected a ratio above 0, or None")
        result.append(row)
    if not result:
        raise ValueError("rows is empty: expected at least one row, for one framework and mode")
    return result


def group(rows: Sequence[Row], key: str) -> dict[str, list[Row]]:
    """The rows grouped by their value of `key`, in order of appearance.

    >>> list(group([{"m": "b"}, {"m": "a"}, {"m": "b"}], "m"))
    ['b', 'a']
    """
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(str(row[key]), []).append(row)
    return groups


def peak(row: Row, kind: str) -> int | None:
    """The row's peak in bytes for one of `PEAK_KINDS`, or `None`.

    >>> peak({"peak_bytes": {"cpu": 3}}, "cpu"), peak({"peak_bytes": None}, "cpu")
    (3, None)
    """
    value: int | None = (row["peak_bytes"] or {}).get(kind)
    return value


def mode_label(row: Row) -> str:
    """The row's mode, shortened in the middle if it is too long for a picture.

    >>> mode_label({"mode": "save: block/attention/*, block/mlp/up*; recompute: *"})
    'save: block/atte…/up*; recompute: *'
    """
    mode = str(row["mode"])
    if len(mode) <= _LONGEST_MODE:
        return mode
    half = _LONGEST_MODE // 2
    return f"{mode[: half - 1]}…{mode[-half - 1 :]}"


def _mapping(row: Any, position: int) -> Row:
    if isinstance(row, Mapping):
        return row
    if dataclasses.is_dataclass(row) and not isinstance(row, type):
        return dataclasses.asdict(row)
    raise TypeError(
        f"rows[{position}] is a {type(row).__name__}: expected a mapping or a dataclass instance with the keys "
        f"{', '.join(ROW_KEYS)}"
    )
