"""Steps compiled with the budget as XLA's memory limit, under which XLA rematerialises by itself."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from remat_jax.planning.candidate import StepCandidate
from remat_jax.planning.known import Known

_NEAR = 1.1
"""A step that needs at most this multiple of the budget may be compiled again with the budget as XLA's memory limit."""


def propose(known: Known) -> Iterable[StepCandidate]:
    """`off` and the fastest compiled step slightly over the budget, with the limit.

    XLA hardly rematerialises inside a scan, so scanned layers are compiled with a limit only if nothing else fits. Nothing is
    proposed while no step is compiled, or on a CPU.
    """
    fit = known.fit
    if not known.has_times or not fit.compiled or (known.scanned and fit.fitting):
        return []
    off = None if known.scanned else known.named_policy("off")
    near = [off] if off is not None and fit.expected(off) <= _NEAR * fit.budget else []
    over = [step.candidate for step in fit.compiled if fit.compiled_budget < step.compiled.device_bytes <= _NEAR * fit.budget]
    near += sorted((step for step in over if step.memory_limit is None), key=lambda step: step.seconds)[:1]
    # With less, XLA might recompute for a step that fits as it is.
    chosen = [step for step in dict.fromkeys(near) if (tried := fit.known(step)) is None or not fit.fits(tried)]
    limits = [(step, round(fit.within(replace(step, memory_limit=0)))) for step in chosen]
    return [
        replace(step, memory_limit=limit, source="memory_limit", expected_bytes=limit)
        for step, limit in limits
        if limit > fit.arguments
    ]
