"""Finding out by questions to both models which module is which, and whether there is only one answer.

A question is a set of values. Where all modules that could be exchanged have the same values, it does not matter which is
which, and where a square matrix is symmetric, it does not matter which way it lies. So one module, or one matrix, can be asked
about at a time: only it is made different, and the models agree where it is in its place. That takes a run for each pair of
modules at most, and not one for each of their permutations.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from remat_jax.errors import PortingError
from remat_jax.porting.auto.candidates import MapCandidate, Space
from remat_jax.porting.auto.pair import LIMIT, ModelPair, Values
from remat_jax.porting.float64 import FLOAT32_REMEDY

# Two gradients that are equal by symmetry differ by rounding alone.
EQUAL = 1e-9


def identify(pair: ModelPair, space: Space, start: MapCandidate) -> MapCandidate:
    """The candidate by which the models agree, whatever the names say, found from `start`.

    Raises:
        PortingError: they agree by none: they differ in more than their weights.
    """
    start = _agreeing_when_alike(pair, space, start)
    places, used = list(start.places), set[int]()
    alike, others = space.alike(pair.generic(1)), space.symmetric(pair.generic(2))
    for group in space.groups():
        for unit in group:
            asked = space.with_one_other(alike, others, unit)
            free = _first(places[unit], [places[other] for other in group])
            for place in (place for place in free if place not in used):
                trial = space.moved(MapCandidate(tuple(places), start.choices), unit, place)
                if trial and pair.disagreement(space.rules(trial), asked, gradients=False)[0] <= LIMIT:
                    places, start = list(trial.places), trial
                    used.add(place)
                    break
    return _orient(pair, space, start)


def _agreeing_when_alike(pair: ModelPair, space: Space, start: MapCandidate) -> MapCandidate:
    """With everything exchangeable alike, the only questions are those of each kind of module as a whole."""
    values = space.alike(pair.generic(1))
    errors = []
    for trial in space.uniform_choices(start):
        error, where = pair.disagreement(space.rules(trial), values, gradients=False)
        if error <= LIMIT:
            return trial
        errors.append((error, where))
    error, where = min(errors)
    raise PortingError(
        f"the models agree by no map: with equal weights in all modules of equal shapes, {where} still differs by {error:.1e}; "
        "they differ in more than their weights (epsilon, padding, activation, mask, a missing layer, float32 inside); "
        f"of the last: {FLOAT32_REMEDY}"
    )


def _orient(pair: ModelPair, space: Space, start: MapCandidate) -> MapCandidate:
    for unit in range(len(start.places)):
        ways = space.table[unit][start.places[unit]]
        if len(ways) < 2:
            continue
        # The others stay symmetric, so that only this unit's way is asked about.
        values = space.with_one_other(space.symmetric(pair.generic(3)), pair.generic(3), unit)
        for choice in _first(start.choices[unit], range(len(ways))):
            trial = start.chosen(unit, choice)
            if pair.disagreement(space.rules(trial), values, gradients=False)[0] <= LIMIT:
                start = trial
                break
    return start


def other_answers(pair: ModelPair, space: Space, answer: MapCandidate) -> Iterator[MapCandidate]:
    """Candidates beside `answer` by which the models agree as well.

    Were exchanging two modules a symmetry of the model, their gradients would be equal where their values are; were
    transposing a matrix one, its gradient would be symmetric where it is. One gradient rules out almost every other candidate
    so; the rest are tried.
    """
    alike = space.alike(pair.generic(4))
    gradients = pair.flax_gradients(space.rules(answer), alike)
    values = pair.generic(5)
    suspects = [*space.exchanges(answer, lambda one, other: _equal(space, gradients, one, other))]
    for unit in range(len(answer.places)):
        for choice in range(len(space.table[unit][answer.places[unit]])):
            if choice != answer.choices[unit] and not space.rules_out(answer, unit, choice, gradients, EQUAL):
                suspects.append(answer.chosen(unit, choice))
    for suspect in suspects:
        if pair.disagreement(space.rules(suspect), values)[0] <= LIMIT:
            yield suspect


def _equal(space: Space, gradients: Values, one: int, other: int) -> bool:
    pairs = [(a, b) for a, b in zip(space.names(one), space.names(other), strict=True) if a in gradients and b in gradients]
    scale = max((float(np.linalg.norm(gradients[name])) for names in pairs for name in names), default=0.0)
    return all(float(np.linalg.norm(gradients[a] - gradients[b])) <= EQUAL * scale for a, b in pairs)


def unexercised(pair: ModelPair, space: Space, answer: MapCandidate) -> list[int]:
    """The units that the outputs do not depend on at all, so that nothing can be proved of them.

    A gradient of 0 is not enough: a frozen weight has none, and the outputs change with it.
    """
    values, other = pair.generic(5), pair.generic(6)
    gradients = pair.flax_gradients(space.rules(answer), values)
    total = max((float(np.abs(x).max(initial=0)) for x in gradients.values()), default=0.0)
    found = []
    for unit in range(len(answer.places)):
        names = [name for name in space.names(unit) if name in gradients]
        if any(float(np.abs(gradients[name]).max(initial=0)) > 1e-13 * total for name in names):
            continue
        if names and pair.change(space.rules(answer), values, space.with_one_other(values, other, unit)) <= LIMIT:
            found.append(unit)
    return found


def _first(preferred: int, others: Sequence[int]) -> list[int]:
    return list(dict.fromkeys([preferred, *others]))
