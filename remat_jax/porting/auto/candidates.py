"""The candidates for a weight map: the Flax unit of each PyTorch unit, and the way to convert it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from remat_jax.porting.auto.recipes import Table, Way
from remat_jax.porting.auto.units import FlaxUnit, TorchUnit
from remat_jax.porting.rules import Rules

Values = dict[str, np.ndarray]


@dataclass(frozen=True)
class MapCandidate:
    """For every PyTorch unit, the index of its Flax unit and of the way between the two."""

    places: tuple[int, ...]
    choices: tuple[int, ...]

    def chosen(self, unit: int, choice: int) -> MapCandidate:
        """The same candidate with another way for one unit."""
        return replace(self, choices=(*self.choices[:unit], choice, *self.choices[unit + 1 :]))


@dataclass(frozen=True)
class Space:
    """All candidates: the units of both models, the ways between them, and the user's rules."""

    torch: list[TorchUnit]
    flax: list[FlaxUnit]
    table: Table
    given: Rules

    def rules(self, candidate: MapCandidate) -> Rules:
        """The candidate as rules, unit by unit."""
        ways = [self.way(candidate, unit) for unit in range(len(self.torch))]
        return self.given | Rules(tuple(rule for way in ways for rule in way))

    def way(self, candidate: MapCandidate, unit: int) -> Way:
        """The rules of one unit."""
        return self.table[unit][candidate.places[unit]][candidate.choices[unit]]

    def names(self, unit: int) -> list[str]:
        """The names of the tensors of a unit."""
        return [self.torch[unit].full(local) for local, _ in self.torch[unit].tensors]

    def groups(self) -> list[list[int]]:
        """The groups of units that their shapes allow to be exchanged, without groups of one."""
        groups: list[list[int]] = []
        for unit in range(len(self.torch)):
            home = next((group for group in groups if self._exchangeable(group[0], unit)), None)
            if home is None:
                groups.append([unit])
            else:
                home.append(unit)
        return [group for group in groups if len(group) > 1]

    def _exchangeable(self, one: int, other: int) -> bool:
        shapes = [[shape for _, shape in self.torch[unit].tensors] for unit in (one, other)]
        return shapes[0] == shapes[1] and [bool(w) for w in self.table[one]] == [bool(w) for w in self.table[other]]

    def symmetric(self, values: Values) -> Values:
        """The values with every square matrix made symmetric."""
        names = {name for unit in range(len(self.torch)) for name in self.names(unit)}
        square = {name: x for name, x in values.items() if name in names and x.ndim == 2 and x.shape[0] == x.shape[1]}
        return values | {name: (x + x.T) / 2 for name, x in square.items()}

    def alike(self, values: Values) -> Values:
        """The values with all exchangeable units equal, and every square matrix symmetric."""
        values = self.symmetric(values)
        for group in self.groups():
            for unit in group[1:]:
                values |= {name: values[first] for name, first in zip(self.names(unit), self.names(group[0]), strict=True)}
        return values

    def with_one_other(self, values: Values, other: Values, unit: int) -> Values:
        """The values with one unit's values taken from `other`."""
        return values | {name: other[name] for name in self.names(unit)}

    def moved(self, candidate: MapCandidate, unit: int, place: int) -> MapCandidate | None:
        """The candidate with `unit` at `place`, exchanged with the unit there; None if no way fits."""
        if candidate.places[unit] == place:
            return candidate
        return self._exchanged(candidate, [(unit, candidate.places.index(place))])

    def _exchanged(self, candidate: MapCandidate, pairs: list[tuple[int, int]]) -> MapCandidate | None:
        places, choices = list(candidate.places), list(candidate.choices)
        for one, other in pairs:
            places[one], places[other] = places[other], places[one]
            for unit in (one, other):
                ways = self.table[unit][places[unit]]
                if not ways:
                    return None
                choices[unit] = min(choices[unit], len(ways) - 1)
        return MapCandidate(tuple(places), tuple(choices))

    def uniform_choices(self, start: MapCandidate) -> Iterator[MapCandidate]:
        """The candidate unchanged, then with all units of one kind and shape converted in another way together."""
        kinds: dict[tuple[object, ...], list[int]] = {}
        for unit, place in enumerate(start.places):
            if len(self.table[unit][place]) > 1:
                ranks = tuple(len(shape) for _, shape in self.torch[unit].tensors)
                kinds.setdefault((self.torch[unit].kind, ranks, len(self.table[unit][place])), []).append(unit)
        counts = [range(len(self.table[units[0]][start.places[units[0]]])) for units in kinds.values()]
        for chosen in itertools.islice(itertools.product(*counts), 64):
            trial = start
            for choice, units in zip(chosen, kinds.values(), strict=True):
                for unit in units:
                    trial = trial.chosen(unit, choice)
            yield trial

    def exchanges(self, answer: MapCandidate, equal: Callable[[int, int], bool]) -> Iterator[MapCandidate]:
        """The candidate with two units, or two modules of several units, exchanged; only units that are `equal`."""
        seen = set()
        for group in self.groups():
            for one, other in itertools.combinations(group, 2):
                if not equal(one, other):
                    continue
                for pairs in ([(one, other)], self._modules(one, other)):
                    if all(a == one or (self._exchangeable(a, b) and equal(a, b)) for a, b in pairs):
                        trial = self._exchanged(answer, pairs)
                        if trial and trial not in seen:
                            seen.add(trial)
                            yield trial

    def _modules(self, one: int, other: int) -> list[tuple[int, int]]:
        """The pairs of units in the two largest differing modules that contain one of the units each."""
        first, second = (self.torch[unit].name.split(".") for unit in (one, other))
        depth = next((i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), 0)
        prefixes = [".".join(parts[: depth + 1]) for parts in (first, second)]
        by_name = {unit.name: index for index, unit in enumerate(self.torch)}
        inside = [name for name in by_name if name == prefixes[0] or name.startswith(prefixes[0] + ".")]
        partners = [prefixes[1] + name.removeprefix(prefixes[0]) for name in inside]
        if any(name not in by_name for name in partners):
            return [(one, other)]
        return [(by_name[a], by_name[b]) for a, b in zip(inside, partners, strict=True)]

    def rules_out(self, answer: MapCandidate, unit: int, choice: int, gradients: Values, limit: float) -> bool:
        """Whether the gradient at a symmetric point shows that a matrix may not be transposed."""
        ways = self.table[unit][answer.places[unit]]
        for mine, its in zip(ways[answer.choices[unit]], ways[choice], strict=True):
            if mine.transform == its.transform or len(mine.torch) != 1:
                continue
            gradient = gradients.get(mine.torch[0].text)
            if {str(mine.transform), str(its.transform)} == {"linear", "identity"} and gradient is not None:
                return bool(np.linalg.norm(gradient - gradient.T) > limit * np.linalg.norm(gradient))
        return False
