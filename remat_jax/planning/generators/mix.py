"""The solver's mixes of policies: the fastest at the budget, safer ones, one without cuts, and the one of least memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from remat_jax.planning.candidate import FAILED, StepCandidate
from remat_jax.planning.known import Known
from remat_jax.solver import Stack

_SAFER = (0.0, 1.0, 2.0)
"""Mixes are solved for budgets that are smaller by these multiples of the last prediction's error."""
_AFTER_FAILURE = 0.05
"""If a mix could not be compiled, the solver plans again for a budget smaller by this share."""
_TRIES = 4


def propose(known: Known) -> Iterable[StepCandidate]:
    """Mixes of the fitted stack; all of them predicted to fit, if any mix is."""
    return [replace(candidate, source="mix") for candidate in _proposals(known)]


def _proposals(known: Known) -> Iterator[StepCandidate]:
    fit, stack = known.fit, known.fit.stack
    first = _uncompiled(known, stack, fit.compiled_budget)
    if first is not None:
        yield first
        error = fit.error(first) if fit.compiled else 0.0
        for times in _SAFER[1:] if error else ():
            if (safer := _uncompiled(known, stack, fit.compiled_budget - times * error)) is not None:
                yield safer
    if known.scanned:
        # What cutting a scan costs is predicted less surely, so a mix with one policy per kind is most likely to fit.
        uncut = _uncompiled(known, fit.around(fit.compiled_budget, uncut=True), fit.compiled_budget, most_policies=1)
        if uncut is not None:
            yield uncut
    if not fit.fitting:
        yield from (known.solved.least(stack), known.solved.least(fit.guess))


def _uncompiled(known: Known, stack: Stack, budget: float, most_policies: int | None = None) -> StepCandidate | None:
    """The fastest mix within `budget` that is not compiled; None if the fastest is compiled and fits, or if there is none."""
    for _ in range(_TRIES):
        plan = known.solved.plan(stack, budget, most_policies)
        if plan is None or (tried := known.fit.known(plan)) is None:
            return plan
        if known.fit.fits(tried):
            return None
        over = tried.compiled.device_bytes - known.fit.within(plan)
        budget -= (
            _AFTER_FAILURE * budget if tried.compiled.device_bytes == FAILED else max(over, 1e-3 * known.fit.compiled_budget)
        )
    return None
