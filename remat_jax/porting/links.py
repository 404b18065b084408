"""Apply rules to names and shapes: find which tensors become which arrays, and list everything that does not fit."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from remat_jax.errors import PortingError, nearest
from remat_jax.porting.pattern import Captures, Place, Shape
from remat_jax.porting.rules import Rule, Rules


@dataclass(frozen=True)
class Link:
    """A rule applied to concrete names: the tensors `torch` become the arrays `flax`."""

    rule: Rule
    torch: tuple[str, ...]
    flax: tuple[Place, ...]

    def flax_shapes(self, arrays: Mapping[str, Shape]) -> list[Shape]:
        """The shapes of this link's `flax` places, in order. `arrays` has the shape of each whole array by path."""
        return [place.shape(arrays[place.path]) for place in self.flax]


def links_of_tensors(rules: Rules, names: Iterable[str]) -> dict[str, Link]:
    """Tensor name → the link of the first rule that matches the name; names that no rule matches are left out."""
    links = {}
    for name in names:
        matches = ((rule, pattern.match(name)) for rule in rules.rules for pattern in rule.torch)
        candidates = (_link(rule, captures) for rule, captures in matches if captures is not None)
        if link := next(filter(None, candidates), None):
            links[name] = link
    return links


def links_of_places(rules: Rules, shapes: Mapping[str, Shape]) -> dict[Place, Link]:
    """Place (an array, or part of a stacked array) → the link of the first rule that fills it."""
    links: dict[Place, Link] = {}
    for path, shape in shapes.items():
        here: dict[Place, Link] = {}
        matches = ((rule, match) for rule in rules.rules for target in rule.flax for match in target.matches(path, shape))
        for rule, (captures, place) in matches:
            link = _link(rule, captures)
            # Several rules may fill parts of a stack; a later rule that indexes different axes is ignored.
            if link and (not here or place.axes == next(iter(here)).axes):
                here.setdefault(place, link)
        links |= here
    return links


def tied_pairs(rules: Rules, names: Iterable[str]) -> list[tuple[str, str]]:
    """The ties with at least one name in `names`, as (the name that rules use, the second name)."""
    pairs = [
        (first.format(captures), second.format(captures))
        for name in names
        for first, second in rules.ties
        for captures in (first.match(name), second.match(name))
        if captures is not None
    ]
    return list(dict.fromkeys((first, second) for first, second in pairs if first is not None and second is not None))


def _link(rule: Rule, captures: Captures) -> Link | None:
    names = tuple(name for pattern in rule.torch if (name := pattern.format(captures)) is not None)
    places = tuple(place for target in rule.flax if (place := target.format(captures)) is not None)
    return Link(rule, names, places) if len(names) == len(rule.torch) and len(places) == len(rule.flax) else None


def fit(rules: Rules, tensors: Mapping[str, Shape], arrays: Mapping[str, Shape]) -> tuple[list[Link], list[str]]:
    """The links that fit, and the problems: every tensor must be used, and every array filled, exactly once."""
    by_tensor = links_of_tensors(rules, tensors)
    by_place = links_of_places(rules, arrays)
    # A rule applies only to tensors that no earlier rule matches, and to places that no earlier rule fills.
    links = list(dict.fromkeys([*by_tensor.values(), *by_place.values()]))
    problems = [
        f"{name}: extra, shape {_text(shape)}: no rule matches it; write a rule, or name it under 'extra:'"
        for name, shape in tensors.items()
        if name not in by_tensor and not rules.allows_extra(name)
    ]
    filled = {place.path for place in by_place}
    problems += [
        f"{path}: not filled, shape {_text(shape)}: no rule fills it; write a rule, or name it under 'missing:'"
        for path, shape in arrays.items()
        if path not in filled and not rules.allows_missing(path)
    ]
    free = [name for name in tensors if name not in by_tensor], [path for path in arrays if path not in filled]
    good = []
    for link in links:
        if tensors.keys().isdisjoint(link.torch) and all(rules.allows_missing(place.path) for place in link.flax):
            continue
        misfits = _misfits(link, tensors, arrays, free)
        problems += misfits
        good += [] if misfits else [link]
    return good, problems + _used_twice(links, tensors, arrays) + _holes(links, arrays)


def _misfits(
    link: Link, tensors: Mapping[str, Shape], arrays: Mapping[str, Shape], free: tuple[list[str], list[str]]
) -> list[str]:
    to = ", ".join(map(str, link.flax))
    problems = []
    for name in link.torch:
        if name not in tensors:
            problems.append(f"{name}: missing, wanted for {to} by the rule '{link.rule}'.{nearest(name, free[0])}")
    for place in link.flax:
        if place.path not in arrays:
            sources = ", ".join(f"{name} {tensors[name] or ''}".strip() for name in link.torch if name in tensors)
            problems.append(f"{place.path}: not in the Flax model, where {sources} should go.{nearest(place.path, free[1])}")
        elif not place.inside(arrays[place.path]):
            problems.append(
                f"{place}: outside the stack, whose shape is {_text(arrays[place.path])}; from {', '.join(link.torch)}"
            )
    return problems or _misshapen(link, tensors, arrays)


def _misshapen(link: Link, tensors: Mapping[str, Shape], arrays: Mapping[str, Shape]) -> list[str]:
    after = link.flax_shapes(arrays)
    to = ", ".join(f"{place} {_text(shape)}" for place, shape in zip(link.flax, after, strict=True))
    try:
        expected = link.rule.transform.before(after, len(link.torch))
    except PortingError as error:
        return [f"{name}: shape {_text(tensors[name])} does not fit {to}: {error}" for name in link.torch]
    return [
        f"{name}: shape {_text(tensors[name])}, expected {_text(shape)} for {to} by '{link.rule.transform}'"
        for name, shape in zip(link.torch, expected, strict=True)
        if tuple(tensors[name]) != tuple(shape)
    ]


def _used_twice(links: list[Link], tensors: Mapping[str, Shape], arrays: Mapping[str, Shape]) -> list[str]:
    users: dict[str, list[str]] = {}
    fillers: dict[Place, list[str]] = {}
    for link in links:
        for name in link.torch:
            if name in tensors:
                users.setdefault(name, []).append(", ".join(map(str, link.flax)))
        for place in link.flax:
            if place.path in arrays and all(name in tensors for name in link.torch):
                fillers.setdefault(place, []).append(", ".join(link.torch))
    problems = [f"{name}: duplicated, used for {' and again for '.join(uses)}" for name, uses in users.items() if uses[1:]]
    problems += [f"{place}: duplicated, filled by {' and again by '.join(by)}" for place, by in fillers.items() if by[1:]]
    return [f"{problem}; each is used exactly once" for problem in problems]


def _holes(links: list[Link], arrays: Mapping[str, Shape]) -> list[str]:
    """A problem for each unfilled part of a partly filled stack, and for each stack whose places index different axes."""
    parts: dict[str, set[Place]] = {}
    for place in (place for link in links for place in link.flax):
        if place.path in arrays and place.inside(arrays[place.path]):
            parts.setdefault(place.path, set()).add(place)
    problems = []
    for path, filled in parts.items():
        shape, axes = arrays[path], next(iter(filled)).axes
        if any(place.axes != axes for place in filled):
            problems.append(f"{path}: duplicated, filled as {' and as '.join(sorted(map(str, filled)))}; use one kind of index")
            continue
        every = itertools.product(
            *(range(size) if axis in axes else [None] for axis, size in enumerate(shape[: max(axes, default=-1) + 1]))
        )
        holes = [str(place) for index in every if (place := Place(path, index)) not in filled]
        problems += [
            f"{hole}: not filled, shape {_text(shape)}: no rule fills this part of the stack; write a rule" for hole in holes
        ]
    return problems


def _text(shape: Shape) -> str:
    return str(tuple(shape))
