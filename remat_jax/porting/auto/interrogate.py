"""Finds the Flax module of each PyTorch module by running both models, and checks that the answer is unique.

A question is a set of values. If all exchangeable modules have equal values, their order does not matter; if a square matrix
is symmetric, its orientation does not matter. So each question is about one module or matrix: only its values differ, and the
models agree if it is in the right place. This takes at most one run per pair of modules, not one per permutation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from remat_jax.errors import PortingError
from remat_jax.porting.auto.candidates import MapCandidate, Space
from remat_jax.porting.auto.pair import LIMIT, ModelPair, Values
from remat_jax.porting.float64 import FLOAT32_REMEDY

# Gradients that are equal by symmetry differ only by rounding.
EQUAL = 1e-9


def identify(pair: ModelPair, space: Space, start: MapCandidate) -> MapCandidate:
    """The candidate for which the models agree, regardless of names, searched from `start`.

    Raises:
        PortingError: the models agree for no candidate: they differ in more than their weights.
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
    """The candidate for which the models agree while all exchangeable units are equal: only whole kinds are varied."""
    values = space.alike(pair.generic(1))
    errors = []
    for trial in space.uniform_choices(start):
        error, where = pair.disagreement(space.rules(trial), values, gradients=False)
        if error <= LIMIT:
            return trial
        errors.append((error, where))
    error, where = min(errors)
    raise PortingError(
        f"no map makes the models agree: with equal weights in all modules of equal shapes, {where} still differs by "
        f"{error:.1e}; the models differ in more than their weights (epsilon, padding, activation, mask, a missing layer, "
        f"float32 inside); for float32 inside: {FLOAT32_REMEDY}"
    )


def _orient(pair: ModelPair, space: Space, start: MapCandidate) -> MapCandidate:
    for unit in range(len(start.places)):
        ways = space.table[unit][start.places[unit]]
        if len(ways) < 2:
            continue
        # The other units stay symmetric, so that the question is only about this unit's way.
        values = space.with_one_other(space.symmetric(pair.generic(3)), pair.generic(3), unit)
        for choice in _first(start.choices[unit], range(len(ways))):
            trial = start.chosen(unit, choice)
            if pair.disagreement(space.rules(trial), values, gradients=False)[0] <= LIMIT:
                start = trial
                break
    return start


def other_answers(pair: ModelPair, space: Space, answer: MapCandidate) -> Iterator[MapCandidate]:
    """Candidates beside `answer` for which the models agree as well.

    If exchanging two modules were a symmetry of the model, equal values would give equal gradients. If transposing a matrix
    were a symmetry, a symmetric matrix would have a symmetric gradient. So one gradient rules out almost every other
    candidate; the rest are run.
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
    """The units on which the outputs do not depend at all, so that nothing can be proved about them.

    A gradient of 0 is not enough: a frozen weight has no gradient, but the outputs depend on it.
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
