"""Find the right candidate for a weight map by running both models, and check that it is unique.

If all modules of equal shapes have equal values, their order has no effect. So a run in which one module has different values
shows whether this module is in the right place. This takes at most one run per pair of modules, not one per permutation. If
a square matrix is symmetric, its orientation has no effect. So a run in which only one module's matrices are not symmetric
shows whether they must be transposed.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from remat_jax.porting.auto.pair import LIMIT, ModelPair, Values
from remat_jax.porting.auto.recipes import Table, Way
from remat_jax.porting.auto.units import FlaxUnit, TorchUnit
from remat_jax.porting.float64 import FLOAT32_REMEDY
from remat_jax.porting.rules import Rules

# Gradients count as equal up to this relative difference: gradients that a symmetry makes equal differ only by rounding.
EQUAL = 1e-9


_CLOSE = 1.01
"""Candidates whose errors are within this factor of the smallest error count as equally good."""


@dataclass(frozen=True)
class MapCandidate:
    """A possible weight map.

    For every PyTorch unit (one module's weights), `places` has the index of its Flax unit, `choices` the index of its `Way` in
    the `Table` of `recipes.py`.
    """

    places: tuple[int, ...]
    choices: tuple[int, ...]

    def chosen(self, unit: int, choice: int) -> MapCandidate:
        """The same candidate with a different way for one unit."""
        return replace(self, choices=(*self.choices[:unit], choice, *self.choices[unit + 1 :]))


@dataclass(frozen=True)
class Space:
    """All candidates: the units of both models, the ways between them, and the user's rules.

    `tensors` and `arrays` are the names that every candidate maps, or leaves over under `extra:` and `missing:`; `buffers` are
    the tensors that are no parameters.
    """

    torch: list[TorchUnit]
    flax: list[FlaxUnit]
    table: Table
    given: Rules
    tensors: tuple[str, ...] = ()
    arrays: tuple[str, ...] = ()
    buffers: frozenset[str] = frozenset()

    def rules(self, candidate: MapCandidate) -> Rules:
        """The candidate as rules, unit by unit."""
        ways = [self.way(candidate, unit) for unit in range(len(self.torch))]
        return self.given | Rules(tuple(rule for way in ways for rule in way), (), *self.left_over(candidate))

    def left_over(self, candidate: MapCandidate) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The PyTorch tensors and the Flax arrays that a candidate does not map."""
        rules = [rule for unit in range(len(self.torch)) for rule in self.way(candidate, unit)]
        used = {name.text for rule in rules for name in rule.torch}
        filled = {target.path.text for rule in rules for target in rule.flax}
        return tuple(name for name in self.tensors if name not in used), tuple(x for x in self.arrays if x not in filled)

    def ways(self, candidate: MapCandidate, unit: int) -> list[Way]:
        """The possible ways to convert a unit at its place in the candidate."""
        return self.table[unit][candidate.places[unit]]

    def way(self, candidate: MapCandidate, unit: int) -> Way:
        """The way to convert a unit in the candidate."""
        return self.ways(candidate, unit)[candidate.choices[unit]]

    def names(self, unit: int) -> list[str]:
        """The names of the tensors of a unit."""
        return [self.torch[unit].full(local) for local, _ in self.torch[unit].tensors]

    def groups(self) -> list[list[int]]:
        """The groups of two or more units that have equal shapes and fit the same places."""
        groups: dict[object, list[int]] = {}
        for unit in range(len(self.torch)):
            groups.setdefault(self._fit(unit), []).append(unit)
        return [group for group in groups.values() if len(group) > 1]

    def _fit(self, unit: int) -> object:
        """A key that is equal for exchangeable units: the unit's shapes, and the places that it fits."""
        return tuple(shape for _, shape in self.torch[unit].tensors), tuple(map(bool, self.table[unit]))

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
        """`values`, but with the values of one unit from `other`."""
        return values | {name: other[name] for name in self.names(unit)}

    def moved(self, candidate: MapCandidate, unit: int, place: int) -> MapCandidate | None:
        """The candidate with `unit` at `place`, exchanged with the unit there; None if no way fits."""
        if candidate.places[unit] == place:
            return candidate
        return self._exchanged(candidate, [(unit, candidate.places.index(place))])

    def _exchanged(self, candidate: MapCandidate, pairs: list[tuple[int, int]]) -> MapCandidate | None:
        places, choices = list(candidate.places), list(candidate.choices)
        for first, second in pairs:
            places[first], places[second] = places[second], places[first]
            for unit in (first, second):
                ways = self.table[unit][places[unit]]
                if not ways:
                    return None
                choices[unit] = min(choices[unit], len(ways) - 1)
        return MapCandidate(tuple(places), tuple(choices))

    def uniform_choices(self, start: MapCandidate) -> Iterator[MapCandidate]:
        """At most 64 candidates, `start` first, in which all units of one kind and rank are converted in the same way."""
        kinds: dict[tuple[str, tuple[int, ...], int], list[int]] = {}
        for unit, torch_unit in enumerate(self.torch):
            count = len(self.ways(start, unit))
            if count > 1:
                ranks = tuple(len(shape) for _, shape in torch_unit.tensors)
                kinds.setdefault((torch_unit.kind, ranks, count), []).append(unit)
        yield start
        choices = (range(count) for _, _, count in kinds)
        for chosen in itertools.islice(itertools.product(*choices), 64):
            trial = start
            for choice, units in zip(chosen, kinds.values(), strict=True):
                for unit in units:
                    trial = trial.chosen(unit, choice)
            if trial != start:
                yield trial

    def usual(self, start: MapCandidate) -> MapCandidate:
        """`start`, in which a unit of several ways is converted like units of its kind that have only one way.

        A square matrix may be transposed or not; in a model whose other matrices are transposed, it is transposed too.
        """
        known: dict[str, Counter[tuple[int, str]]] = {}
        for unit, torch_unit in enumerate(self.torch):
            if len(self.ways(start, unit)) == 1:
                known.setdefault(torch_unit.kind, Counter()).update(_transforms(self.way(start, unit)))
        for unit, torch_unit in enumerate(self.torch):
            seen, ways = known.get(torch_unit.kind, Counter()), self.ways(start, unit)
            scores = [sum(seen[text] for text in _transforms(way)) for way in ways]
            start = start.chosen(unit, scores.index(max(scores)))
        return start

    def exchanges(self, answer: MapCandidate, gradients: Values) -> list[MapCandidate]:
        """Variants of `answer` that exchange two units, or two modules of several units, whose gradients are equal."""
        trials = [
            self._exchanged(answer, pairs)
            for group in self.groups()
            for first, second in itertools.combinations(group, 2)
            if self._equal(first, second, gradients)
            for pairs in ([(first, second)], self._modules(first, second))
            if all(a == first or (self._fit(a) == self._fit(b) and self._equal(a, b, gradients)) for a, b in pairs)
        ]
        return list(dict.fromkeys(trial for trial in trials if trial is not None))

    def _equal(self, first: int, second: int, gradients: Values) -> bool:
        names = zip(self.names(first), self.names(second), strict=True)
        pairs = [(a, b) for a, b in names if a in gradients and b in gradients]
        scale = max((float(np.linalg.norm(gradients[name])) for pair in pairs for name in pair), default=0.0)
        return all(float(np.linalg.norm(gradients[a] - gradients[b])) <= EQUAL * scale for a, b in pairs)

    def _modules(self, one_unit: int, other_unit: int) -> list[tuple[int, int]]:
        """Pair the units of two modules: the outermost module with `one_unit` but not `other_unit`, and its counterpart."""
        first, second = (self.torch[unit].name.split(".") for unit in (one_unit, other_unit))
        depth = next((i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), 0)
        prefixes = [".".join(parts[: depth + 1]) for parts in (first, second)]
        by_name = {unit.name: index for index, unit in enumerate(self.torch)}
        inside = [name for name in by_name if name == prefixes[0] or name.startswith(prefixes[0] + ".")]
        partners = [prefixes[1] + name.removeprefix(prefixes[0]) for name in inside]
        if any(name not in by_name for name in partners):
            return [(one_unit, other_unit)]
        return [(by_name[a], by_name[b]) for a, b in zip(inside, partners, strict=True)]

    def rules_out(self, answer: MapCandidate, unit: int, choice: int, gradients: Values) -> bool:
        """Whether `gradients`, computed with symmetric matrices, show that transposing the unit's matrix changes the model."""
        for rule, other in zip(self.way(answer, unit), self.ways(answer, unit)[choice], strict=True):
            if rule.transform == other.transform or len(rule.torch) != 1:
                continue
            gradient = gradients.get(rule.torch[0].text)
            if {str(rule.transform), str(other.transform)} == {"linear", "identity"} and gradient is not None:
                return bool(np.linalg.norm(gradient - gradient.T) > EQUAL * np.linalg.norm(gradient))
        return False


def _transforms(way: Way) -> list[tuple[int, str]]:
    """The transforms of a way, each with its place: a weight's comes before a bias's."""
    return [(place, str(rule.transform)) for place, rule in enumerate(way)]


def identify(pair: ModelPair, space: Space, start: MapCandidate) -> tuple[MapCandidate, str]:
    """Search from `start` for the candidate under which the models agree, regardless of names.

    Returns the candidate and "", or the best candidate and the reason why the models agree under no candidate.
    """
    if pair.disagreement(space.rules(start), pair.generic(0), gradients=False)[0] <= LIMIT:
        return start, ""  # the outputs agree: under another map, the gradients would not agree either
    answer, problem = _agreeing_when_alike(pair, space, start)
    if problem:
        return answer, problem
    alike, others, used = space.alike(pair.generic(1)), space.symmetric(pair.generic(2)), set[int]()
    for group in space.groups():
        for unit in group:
            pair.tell(f"trying places for {space.torch[unit].name}")
            values = space.with_one_other(alike, others, unit)
            places = _first(answer.places[unit], [answer.places[other] for other in group])
            for place in (place for place in places if place not in used):
                trial = space.moved(answer, unit, place)
                if trial and pair.disagreement(space.rules(trial), values, gradients=False)[0] <= LIMIT:
                    answer = trial
                    used.add(place)
                    break
    return _orient(pair, space, answer), ""


def _agreeing_when_alike(pair: ModelPair, space: Space, start: MapCandidate) -> tuple[MapCandidate, str]:
    """The first of `uniform_choices` under which the models agree if all exchangeable units have equal values.

    If there is none, the candidate of the smallest error, and a text.
    """
    values = space.alike(pair.generic(1))
    errors: list[tuple[float, str, MapCandidate]] = []
    for trial in space.uniform_choices(start):
        pair.tell(f"trying ways to convert the weights, {len(errors) + 1}")
        errors.append((*pair.disagreement(space.rules(trial), values, gradients=False), trial))
        if errors[-1][0] <= LIMIT:
            return trial, ""
    # Ways that differ only in the orientation of symmetric matrices differ by rounding: the first is the usual way.
    least = min(error for error, _, _ in errors)
    error, where, best = next(entry for entry in errors if entry[0] <= _CLOSE * least)
    return best, (
        f"no map makes the models agree: with equal weights in all modules of equal shapes, {where} still differs by "
        f"{error:.1e}; the models differ in more than their weights (epsilon, padding, activation, mask, a missing layer, "
        f"a cast to float32); for a cast to float32: {FLOAT32_REMEDY}"
    )


def _orient(pair: ModelPair, space: Space, start: MapCandidate) -> MapCandidate:
    for unit in range(len(start.places)):
        choices = range(len(space.ways(start, unit)))
        if len(choices) < 2:
            continue
        # The matrices of the other units stay symmetric, so that the run tests only this unit's way.
        values = space.with_one_other(space.symmetric(pair.generic(3)), pair.generic(3), unit)
        for choice in _first(start.choices[unit], choices):
            trial = start.chosen(unit, choice)
            if pair.disagreement(space.rules(trial), values, gradients=False)[0] <= LIMIT:
                start = trial
                break
    return start


def other_answers(pair: ModelPair, space: Space, answer: MapCandidate, unused: Sequence[int]) -> list[MapCandidate]:
    """Candidates other than `answer` under which the models also agree; the way of a unit in `unused` stays the same.

    If exchanging two modules is a symmetry of the model, equal values give equal gradients; if transposing a matrix is a
    symmetry, a symmetric matrix has a symmetric gradient. So one gradient rules out most candidates; only the rest are run.
    """
    alike = space.alike(pair.generic(4))
    gradients = pair.flax_gradients(space.rules(answer), alike)
    values = pair.generic(5)
    suspects = space.exchanges(answer, gradients)
    for unit in set(range(len(answer.places))) - set(unused):
        for choice in range(len(space.ways(answer, unit))):
            if choice != answer.choices[unit] and not space.rules_out(answer, unit, choice, gradients):
                suspects.append(answer.chosen(unit, choice))
    return [suspect for suspect in suspects if pair.disagreement(space.rules(suspect), values)[0] <= LIMIT]


def unexercised(pair: ModelPair, space: Space, answer: MapCandidate) -> list[int]:
    """The units on which the outputs do not depend at all, so that nothing can be proved about them.

    A gradient of 0 does not prove independence: the outputs may depend on a frozen weight, which has no gradient.
    """
    values, other = pair.generic(5), pair.generic(6)
    gradients = pair.flax_gradients(space.rules(answer), values)
    total = max((float(np.abs(x).max(initial=0)) for x in gradients.values()), default=0.0)
    unused = []
    for unit in range(len(answer.places)):
        names = [name for name in space.names(unit) if name in gradients]
        if any(float(np.abs(gradients[name]).max(initial=0)) > 1e-13 * total for name in names):
            continue
        if names and pair.change(space.rules(answer), values, space.with_one_other(values, other, unit)) <= LIMIT:
            unused.append(unit)
    return unused


def _first(preferred: int, others: Sequence[int]) -> list[int]:
    return list(dict.fromkeys([preferred, *others]))
