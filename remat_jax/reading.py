"""Reads untrusted input: the bytes of files, plain data from JSON, and text for a terminal."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import types
import unicodedata
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

LARGEST = 2**62
"""Every integer (bytes, iterations, positions) in a file must be below this bound."""


def read_limited(path: str | os.PathLike[str], most: int) -> bytes:
    """The content of a regular file of at most `most` bytes. Refuses pipes, which may never end, and larger files.

    Raises:
      ValueError: the file is not regular, or has more than `most` bytes; or `path` is malformed, as with a null byte.
      OSError: the file does not exist, or cannot be read.
      TypeError: `path` is not a path.
    """
    if Path(path).exists() and not Path(path).is_file():
        raise ValueError("it is not a regular file")
    with Path(path).open("rb") as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise ValueError(f"it has more than {most} bytes")
    return content


def visible(text: str) -> str:
    """`text` with control characters as escapes, except for newlines and tabs."""
    if text.isprintable():
        return text
    return "".join(
        letter.encode("unicode_escape").decode() if unicodedata.category(letter)[0] == "C" and letter not in "\n\t" else letter
        for letter in text
    )


def from_plain(kind: Any, value: Any) -> Any:
    """Make an instance of `kind` (a dataclass or a field's type) from `value`, plain data from JSON or `dataclasses.asdict`.

    Raises:
      ValueError: a wrong type, a number that is negative or not finite, an integer from `LARGEST` up, a missing or unknown key.

    >>> from_plain(tuple[int, ...], [1, 2]), from_plain(float | None, 3)
    ((1, 2), 3.0)
    >>> from_plain(int, -1)
    Traceback (most recent call last):
    ...
    ValueError: -1 is not a valid int
    """
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        for alternative in arguments:
            try:
                return from_plain(alternative, value)
            except ValueError:
                continue
    elif origin is Literal and value in arguments and isinstance(value, str):
        return value
    elif origin in (dict, Mapping) and isinstance(value, dict):
        return {from_plain(arguments[0], key): from_plain(arguments[1], item) for key, item in value.items()}
    elif origin is tuple and isinstance(value, list | tuple):
        item_kinds = [arguments[0]] * len(value) if arguments[1:] == (...,) else arguments
        return tuple(from_plain(item_kind, item) for item_kind, item in _pairs(item_kinds, value))
    elif hasattr(kind, "_fields") and isinstance(value, list | tuple):
        return kind(*(from_plain(hint, item) for hint, item in _pairs(list(_hints(kind).values()), value)))
    elif isinstance(kind, type) and dataclasses.is_dataclass(kind) and isinstance(value, dict):
        hints = _hints(kind)
        names = {field.name for field in dataclasses.fields(kind) if field.init}
        if names != value.keys():
            raise ValueError(
                f"{getattr(kind, '__name__', kind)} has wrong keys: {sorted(names ^ value.keys())} are missing or unknown"
            )
        return kind(**{name: from_plain(hints[name], value[name]) for name in names})
    elif kind is float and type(value) in (int, float) and math.isfinite(value) and value >= 0:
        return float(value)
    elif type(value) is kind and not (kind is int and not 0 <= value < LARGEST):
        return value
    raise ValueError(f"{str(value)[:80]} is not a valid {getattr(kind, '__name__', kind)}")


_hints = functools.cache(get_type_hints)


def _pairs(kinds: Any, values: Any) -> Any:
    if len(kinds) != len(values):
        raise ValueError(f"{len(values)} values, expected {len(kinds)}")
    return zip(kinds, values, strict=True)
