"""Chooses the plan's step from the compiled steps that fit: the fastest, or a simpler one that is as fast."""

from __future__ import annotations

from remat_jax.planning.candidate import StepCandidate, Tried
from remat_jax.planning.findings import PlanFinding, info
from remat_jax.planning.known import Known

AS_FAST = 0.005
"""A simpler step becomes the plan if the fastest step's compiled time is at most this share below its own."""
TIME_ERROR = 0.04
"""The bound on the error of a modelled ratio of two steps' times (`benchmarks/published/cases.py`). A simpler step without
offload becomes the plan if a step that offloads is faster by at most this share, and the rates of the host link are assumed. At
most a sixth of the published steps may exceed a bound."""
_LINK_RATES = {"out_bytes_per_s", "in_bytes_per_s"}


def choose_fastest(known: Known) -> tuple[Tried, list[PlanFinding]]:
    """The step for the plan, and what was preferred at what cost.

    Steps without a compiled time are not chosen, unless no step that fits has one, as on a CPU: then the step of the lowest
    traced estimate is. If no step fits with all kernels, it is `known.in_hand`.
    """
    best, fitting = known.in_hand, [step for step in known.fit.fitting if step.compiled.seconds]
    assert best is not None, "a step fits"
    if not known.times.compiled or not fitting:
        return best, []
    fastest = min(fitting, key=_seconds)
    chosen = min(
        (step for step in fitting if _is_as_good(step, fastest)),
        key=lambda step: (*_complexity(step.candidate), _seconds(step)),
    )
    if chosen is fastest or _seconds(fastest) == _seconds(chosen):
        return chosen, []
    percent = 100 * (1 - _seconds(fastest) / _seconds(chosen))
    why = (
        "whether its copies are hidden depends on assumed rates of the host link"
        if percent > 100 * AS_FAST
        else f"times within {100 * AS_FAST:g} % count as equal"
    )
    text = f"Another compiled step, {fastest.candidate.title}, is {percent:.2g} % faster; {why}, and the plan is simpler"
    return chosen, [info("preferred", text)]


def _is_as_good(simple: Tried, fastest: Tried) -> bool:
    unsure = (
        fastest.candidate.host_bytes > 0 and not simple.candidate.host_bytes and not _LINK_RATES.isdisjoint(_assumed(fastest))
    )
    return _seconds(fastest) >= (1 - (TIME_ERROR if unsure else AS_FAST)) * _seconds(simple)


def _assumed(tried: Tried) -> tuple[str, ...]:
    time = getattr(tried.compiled.sizes, "time", None)
    return () if time is None else time.assumed


def _seconds(tried: Tried) -> float:
    assert tried.compiled.seconds is not None, "only steps with a compiled time are compared"
    return tried.compiled.seconds


def _complexity(candidate: StepCandidate) -> tuple[bool, bool, bool]:
    return candidate.memory_limit is not None, not candidate.name or bool(candidate.groups), candidate.host_bytes > 0
