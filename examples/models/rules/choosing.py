"""The choice between several projects' names for the weights of one model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

T = TypeVar("T")


def named(names: str, choices: Mapping[str, T]) -> T:
    """Return the entry of `choices` for `names`.

    Raises:
        ValueError: `names` is none of the choices.

    >>> named("diffsynth", {"diffusers": 1, "diffsynth": 2})
    2
    """
    if names not in tuple(choices):
        raise ValueError(f"names={names!r}: expected {' or '.join(map(repr, choices))}, the project that the weights come from")
    return choices[names]
