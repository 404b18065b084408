"""Writes a target as a TOML file that `target("path/to/file.toml:name")` reads."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from importlib import resources
from typing import Any

from remat_jax.errors import TargetError
from remat_jax.hardware.checks import TABLE
from remat_jax.hardware.target import read_table


def entry(name: str) -> dict[str, Any]:
    """The entry of a target in this package's table, as plain data.

    Raises:
        TargetError: the table has no such target.

    >>> entry("h200")["memory_bytes"]
    150754820096
    """
    known = tomllib.loads(resources.files("remat_jax.hardware").joinpath(TABLE).read_text(encoding="utf-8"))
    if name not in known:
        raise TargetError(f"target={name!r} is not in the table; the names are {', '.join(known)}")
    found: dict[str, Any] = known[name]
    return found


def target_text(name: str, facts: Mapping[str, Any]) -> str:
    """A target's entry as TOML, tables last. The text is read back once, so that a wrong entry is never written.

    Raises:
        TargetError: as in `target` for the file.

    >>> print(target_text("mine", {"kind": "cpu", "description": "a CPU", "source": {}}))
    [mine]
    kind = "cpu"
    description = "a CPU"
    <BLANKLINE>
    [mine.source]
    <BLANKLINE>
    """
    text = "\n".join(_table((name,), facts)) + "\n"
    read_table(text)
    return text


def _table(path: tuple[str, ...], values: Mapping[str, Any]) -> list[str]:
    plain = {key: value for key, value in values.items() if not isinstance(value, Mapping)}
    lines = [f"[{'.'.join(map(_key, path))}]", *(f"{_key(key)} = {_value(value)}" for key, value in plain.items())]
    for key, value in values.items():
        if isinstance(value, Mapping):
            lines += ["", *_table((*path, key), value)]
    return lines


def _key(key: str) -> str:
    return key if key.replace("_", "").replace("-", "").isalnum() and key.isascii() else json.dumps(key)


def _value(value: Any) -> str:
    """A text, number, boolean or list of these as TOML, which JSON writes alike; non-ASCII letters stay as they are."""
    return json.dumps(value, ensure_ascii=False)
