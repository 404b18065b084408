"""Steps without offload, beside steps that offload: copies may take longer than estimated."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from remat_jax.planning.candidate import StepCandidate, singles
from remat_jax.planning.known import Known
from remat_jax.solver import Choice


def propose(known: Known) -> Iterable[StepCandidate]:
    """If a step that fits offloads: the best step with its offloads saved, and the fastest mix that offloads nothing."""
    best = known.best
    if best is None or not any(step.candidate.host_bytes for step in known.fit.fitting):
        return []
    candidates = [
        left_on_device(known, best.candidate),
        known.solved.without_copies(known.fit.stack, known.fit.compiled_budget),
    ]
    return [replace(candidate, source="without_host") for candidate in candidates if candidate is not None]


def left_on_device(known: Known, candidate: StepCandidate) -> StepCandidate | None:
    """The candidate with its offloaded residuals saved.

    None if it offloads nothing, if no choices express it, or if an offloaded residual may not be saved.
    """
    choices = candidate.choices
    if not candidate.host_bytes or choices is None:
        return None
    for block, actions in zip(singles(known.fit.guess), choices, strict=True):
        pairs = zip(block.residuals, actions, strict=True)
        if any(action is Choice.OFFLOAD and not residual.may_save for residual, action in pairs):
            return None
    saved = tuple(tuple(Choice.SAVE if action is Choice.OFFLOAD else action for action in actions) for actions in choices)
    return replace(known.recut(known.solved.make(saved), candidate.cuts), near=candidate)


def offload_needed(known: Known, candidate: StepCandidate) -> bool | None:
    """Whether a step that offloads does not fit with the same residuals on the device; None if that was not shown."""
    here = left_on_device(known, candidate)
    if here is None:
        return None
    if (tried := known.fit.known(here)) is not None:
        return not known.fit.fits(tried)
    return True if not known.fit.may_fit(here) else None
