"""The search: compiles the most promising proposals until none is worth it, or compilations or time are used up."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from remat_jax.planning.candidate import Compiled, StepCandidate, Tried
from remat_jax.planning.choose_fastest import choose_fastest
from remat_jax.planning.generators import GENERATORS, Generator
from remat_jax.planning.known import Known

Compile = Callable[[Sequence[StepCandidate], Tried | None], list[Compiled]]
"""Compiles candidates in parallel, given the best step so far; an empty result means that the time is up."""

CompileOtherwise = Callable[[Tried], int | None]
"""Compiles a step with other kernels, and returns the bytes that it then needs more; None if it is not to be, or cannot be."""

MOST_COMPILED = 8
"""The maximum number of compilations once a step fits."""
MOST_UNTIL_ONE_FITS = 12
MOST_GIVEN_UP = 3
"""The search goes on at most this often after a step that does not fit with other kernels."""
SIDE_BY_SIDE = 2


@dataclass(frozen=True)
class Ended:
    """Why a search ended, and what it left.

    Attributes:
      by: `gain` if no proposal that may fit is worth a compilation, else `compilations` or `time`.
      left: the proposals that were still worth a compilation, the most promising first.
    """

    by: str
    left: tuple[StepCandidate, ...] = ()


def search(
    known: Known,
    compile_them: Compile,
    generators: Iterable[Generator] = tuple(GENERATORS.values()),
    compile_otherwise: CompileOtherwise = lambda tried: None,
) -> Ended:
    """Compile the most promising proposals and learn from each, until the step to choose fits with other kernels too.

    `known.best` is then the fastest step that fits, if any does.
    """
    generators = tuple(generators)
    for _ in range(MOST_GIVEN_UP + 1):
        ended = _search(known, compile_them, generators)
        if _check_chosen(known, compile_otherwise):
            break
    full = known.named_policy("full")
    if known.best is None and known.in_hand is not None and full is not None and known.fit.known(full) is None:
        # All that was compiled was given up: the step that keeps least may fit.
        known.fit.learn([full], compile_them([full], known.in_hand))
    settle(known, compile_otherwise)
    return ended


def settle(known: Known, compile_otherwise: CompileOtherwise) -> None:
    """Compile steps with other kernels until the step to choose fits with them, or the smallest step does not."""
    while not _check_chosen(known, compile_otherwise):
        pass
    # Nothing fits but for other kernels, as is expected from the steps that were given up: let the smallest show it.
    if known.best is None and known.in_hand is not None and (smallest := known.fit.smallest).compiled.more is None:
        more = compile_otherwise(smallest)
        if more is not None:
            known.fit.learn_more(smallest, more)


def _check_chosen(known: Known, compile_otherwise: CompileOtherwise) -> bool:
    """Compile the step to choose with other kernels; False if it does not fit with them, so that the search has to go on."""
    while known.best is not None:
        chosen, _ = choose_fastest(known)
        more = compile_otherwise(chosen) if chosen.compiled.more is None else None
        if more is None:
            return True
        known.fit.learn_more(chosen, more)
        if more > known.fit.budget - chosen.compiled.device_bytes:
            return False
    return True


def _search(known: Known, compile_them: Compile, generators: Iterable[Generator]) -> Ended:
    """Compile proposals two at a time, those of the highest scores: chance to fit times expected gain (`Known`)."""
    begin = len(known.fit.tried)
    while chosen := most_promising(known, proposals(known, generators)):
        most = MOST_COMPILED if known.in_hand is not None else MOST_UNTIL_ONE_FITS
        chosen = chosen[: max(0, most - (len(known.fit.tried) - begin))]
        if not chosen:
            return Ended("compilations", left(known, generators))
        answers = compile_them(chosen, known.in_hand)
        if not answers:
            return Ended("time", left(known, generators))
        known.fit.learn(chosen, answers)
    return Ended("gain")


def proposals(known: Known, generators: Iterable[Generator]) -> list[StepCandidate]:
    """What all generators propose and is not compiled, each program once."""
    proposed = dict.fromkeys(candidate for propose in generators for candidate in propose(known))
    return [candidate for candidate in proposed if known.fit.known(candidate) is None]


def left(known: Known, generators: Iterable[Generator]) -> tuple[StepCandidate, ...]:
    """The proposals that are worth a compilation, the most promising first."""
    best = None if known.in_hand is None else known.in_hand.candidate
    scored = [(known.chance(step) * known.gain(step, best), step) for step in proposals(known, generators)]
    return tuple(step for score, step in sorted(scored, key=lambda pair: -pair[0]) if score and _is_worth(known, step, best))


def most_promising(known: Known, candidates: Iterable[StepCandidate]) -> list[StepCandidate]:
    """At most two candidates that are worth a compilation: the one of the highest score, and the one that adds most to it."""
    best = None if known.best is None else known.best.candidate
    worth = [(known.chance(step), step) for step in candidates if _is_worth(known, step, best)]
    scores = [(chance * known.gain(step, best), chance, step) for chance, step in worth if chance]
    if not scores:
        return []
    least = _LEAST_SCORE * known.worth
    # Of two that promise the same, a step without checkpoints has fewer ways to disappoint.
    _, fits, first = max(scores, key=lambda scored: (round(scored[0] / known.worth, 1), not scored[2].checkpoints))
    others = [
        # If the first fits, the second has to be faster than it; if not, faster than the best step so far.
        (chance * (fits * known.gain(step, first) + (1 - fits) * known.gain(step, best)), step)
        for _, chance, step in scores
        if step is not first
    ]
    score, second = max(others, key=lambda scored: scored[0], default=(0.0, first))
    if known.scanned and not known.fit.compiled and known.fit.is_cut(first):
        # What cutting a scan costs or saves is known once one of the first two steps is not cut.
        uncut = (scored for scored in others if scored[0] >= least and not known.fit.is_cut(scored[1]))
        score, second = max(uncut, key=lambda scored: scored[0], default=(score, second))
    return [first, second][: SIDE_BY_SIDE if score >= least else 1]


_LEAST_SCORE = 0.1
"""Beside the most promising candidate, another is compiled if its score is at least this share of `Known.worth`."""


def _is_worth(known: Known, candidate: StepCandidate, best: StepCandidate | None) -> bool:
    return best is None or known.gain(candidate, best) >= known.worth
