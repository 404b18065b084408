"""The best step with more residuals saved."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from remat_jax.planning.candidate import FAILED, StepCandidate, one_residual_more, runs
from remat_jax.planning.fit_memory import predicted
from remat_jax.planning.known import Known
from remat_jax.planning.problem import KEEP_ALL


def propose(known: Known) -> Iterable[StepCandidate]:
    """The best step with all further residuals that are predicted to fit, and with one more residual."""
    best = known.best
    if best is None or best.candidate.choices is None:
        return []
    candidates = (*_filled(known, best.candidate), *least_more(known))
    return [replace(candidate, source="more", near=best.candidate) for candidate in candidates]


def _filled(known: Known, best: StepCandidate) -> Iterator[StepCandidate]:
    """`best` with further residuals saved one by one: each time the fastest variant that is predicted to fit."""
    stack, candidate = known.fit.around(known.fit.expected(best)), best
    while within := [more for more in one_more(known, candidate) if predicted(stack, more.loads) <= known.fit.compiled_budget]:
        candidate = min(within, key=lambda more: more.seconds)
    if candidate is not best:
        yield candidate


def least_more(known: Known) -> list[StepCandidate]:
    """At most two variants of the best step that save one more residual: of fewest saved bytes, and of least predicted memory.

    Only variants that gain enough for a compilation count. A variant that is surely over the budget is left out.
    """
    best = known.best
    if best is None or best.candidate.choices is None:
        return []
    stack, worth = known.fit.around(best.compiled.device_bytes), known.worth / known.times.pace
    variants = [replace(step, near=best.candidate) for step in one_more(known, best.candidate)]
    faster = [step for step in variants if step.seconds <= best.candidate.seconds - worth]
    if not faster:
        return []
    fewest = min(faster, key=lambda step: step.saved_bytes)
    smallest = min(faster, key=lambda step: predicted(stack, step.loads))
    return [step for step in dict.fromkeys((fewest, smallest)) if known.fit.known(step) is not None or known.chance(step)]


def is_maximal(known: Known) -> bool:
    """Whether the best step keeps everything, or all variants of `least_more` were compiled, and do not fit or are no faster.

    False if the solver's choices cannot express the best step.
    """
    best = known.best
    if best is None or best.candidate.name in KEEP_ALL or best.candidate.seconds <= 0:
        return True
    if best.candidate.choices is None:
        return False
    tried = [known.fit.known(step) for step in least_more(known)]
    return all(step is not None and step.compiled.device_bytes < FAILED for step in tried)


def one_more(known: Known, candidate: StepCandidate) -> list[StepCandidate]:
    """The variants that save one more residual in one run and are faster than `candidate`; the scans stay the same."""
    assert candidate.choices is not None, "one residual more needs the choices"
    stack = known.fit.guess
    # A cut at the start of each run keeps the run a separate scan, even if its choices become equal to its neighbour's.
    starts = tuple(start for start, _ in runs(stack, candidate.choices, candidate.cuts))
    changed = one_residual_more(stack, candidate.choices, candidate.cuts)
    variants = [known.recut(known.solved.make(choices), starts) for choices in changed]
    return [step for step in variants if step.seconds < candidate.seconds]
