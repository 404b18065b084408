"""Equal names that a weight map exchanges, such as gate and up: usually a fault of the port."""

from __future__ import annotations

import os.path
import re
from collections import Counter
from collections.abc import Sequence

from remat_jax.porting.auto.interrogate import MapCandidate, Space
from remat_jax.porting.auto.recipes import tokens

_AUTOMATIC = re.compile(r"[A-Z]\w*_\d+")
"""A name that Linen gives a module: its class, and its number in the order of creation."""


def crossings(space: Space, answer: MapCandidate, named: MapCandidate) -> list[tuple[str, ...]]:
    """The groups of PyTorch modules whose equal names in Flax `answer` exchanges; `named` is the map that names suggest.

    In each group, the name of every module differs from those of the others in the same words as its Flax name.
    """
    groups: dict[tuple[str, ...], None] = {}
    for cycle in _cycles(answer, named):
        torch = [space.torch[unit].name for unit in cycle]
        flax = [space.flax[named.places[unit]].name for unit in cycle]
        if _distinct(torch) == _distinct(flax) and not _are_automatic(flax):
            groups[tuple(sorted(_outermost(torch)))] = None
    return list(groups)


def _cycles(answer: MapCandidate, named: MapCandidate) -> list[list[int]]:
    """The cycles of units of which each has in `answer` the place that the next has in `named`."""
    at = {place: unit for unit, place in enumerate(named.places)}
    cycles, seen = [], set[int]()
    for first in range(len(answer.places)):
        cycle: list[int] = []
        unit: int | None = first
        while unit is not None and unit not in seen:
            seen.add(unit)
            cycle.append(unit)
            unit = at.get(answer.places[unit])
        if len(cycle) > 1 and unit == first:
            cycles.append(cycle)
    return cycles


def _distinct(names: Sequence[str]) -> list[Counter[str]]:
    """The words and numbers of each name that not all names have."""
    counts = [tokens(name) for name in names]
    common = counts[0]
    for count in counts:
        common = common & count
    return [count - common for count in counts]


def _are_automatic(names: Sequence[str]) -> bool:
    """Whether the names differ only in numbers that Linen gave, in the order of creation."""
    parts = list(zip(*(name.split("/") for name in names), strict=False))
    differing = [part for part in parts if len(set(part)) > 1]
    return bool(differing) and all(_AUTOMATIC.fullmatch(name) for part in differing for name in part)


def _outermost(names: Sequence[str]) -> list[str]:
    """The names up to the first part in which they differ, so that two exchanged layers count once."""
    parts = [name.split(".") for name in names]
    depth = len(os.path.commonprefix(parts))
    return [".".join(part[: depth + 1]) for part in parts]
