"""What is unusual in a weight map, and usually a fault of the port.

Two kinds: equal names that the map exchanges, such as gate and up, and a weight that it transforms unlike its siblings, such as
a single kernel that is not transposed.
"""

from __future__ import annotations

import os.path
import re
from collections import Counter
from collections.abc import Sequence

from remat_jax.porting.auto.interrogate import MapCandidate, Space
from remat_jax.porting.auto.recipes import tokens
from remat_jax.porting.rules import Rule

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


def like_siblings(space: Space, answer: MapCandidate) -> tuple[MapCandidate, list[str]]:
    """`answer` with every weight transformed like its siblings, and a text for each weight that this changes.

    Siblings are weights of PyTorch modules of one kind that fill Flax arrays of equal local names. If their transforms differ,
    the transform that most shapes require counts, then the transform of most siblings, then the usual one for the kind.
    """
    counts: dict[tuple[str, str], Counter[str]] = {}
    required: dict[tuple[str, str], Counter[str]] = {}
    for unit in range(len(space.torch)):
        for place, rule in enumerate(space.way(answer, unit)):
            kind, text = _kind(space, unit, rule), str(rule.transform)
            counts.setdefault(kind, Counter())[text] += 1
            required.setdefault(kind, Counter())[text] += len(_fitting(space, answer, unit, place)) == 1
    usual, texts = answer, list[str]()
    for unit in range(len(space.torch)):
        for place, rule in enumerate(space.way(answer, unit)):
            kind, own = _kind(space, unit, rule), str(rule.transform)
            rank = {text: (required[kind][text], counts[kind][text]) for text in _fitting(space, answer, unit, place)}
            most = max(rank, key=lambda text: rank[text])
            if most == own or not counts[kind][most]:
                continue
            wanted = [str(other.transform) for other in space.way(usual, unit)]
            wanted[place] = most
            ways = [[str(each.transform) for each in way] for way in space.ways(answer, unit)]
            usual = usual.chosen(unit, ways.index(wanted))
            texts.append(f"{rule.torch[0].text} by {own!r} instead of {most!r}")
    return usual, texts


def _fitting(space: Space, answer: MapCandidate, unit: int, place: int) -> list[str]:
    """The possible transforms of one rule of a unit, the usual transform first."""
    return list(dict.fromkeys(str(way[place].transform) for way in space.ways(answer, unit)))


def _kind(space: Space, unit: int, rule: Rule) -> tuple[str, str]:
    """The kind of the PyTorch module, and the local name of the Flax array that the rule fills."""
    return space.torch[unit].kind, rule.flax[0].path.text.rpartition("/")[2]


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
