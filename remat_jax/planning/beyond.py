"""Plans with changes beyond the blocks: those that are allowed, one after the other, and an estimate of the others."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from remat_jax.errors import CompileError, InfeasibleBudget, RematError
from remat_jax.planning.changes import CHANGES
from remat_jax.planning.choose_fastest import AS_FAST
from remat_jax.planning.compile_candidates import first_sentence
from remat_jax.planning.plan import Plan
from remat_jax.planning.plan_data import Beyond
from remat_jax.workload import Workload

PlanFor = Callable[[Workload, float], Plan]
"""Plans a workload, in a share of the time that is left."""


def with_changes(plan_for: PlanFor, workload: Workload, allow: Sequence[str]) -> Plan:
    """The fastest plan with some of the allowed changes.

    Each change is tried on top of those that made the plan faster so far, or made one possible, and is kept if it does; if it
    can be made again, it is tried again. If nothing fits with one of them, all are made together.

    Raises:
      InfeasibleBudget: nothing fits, not even with the changes.
    """
    made, failure, rows = None, None, list[Beyond]()
    try:
        made = plan_for(workload, 1 / (1 + len(allow)))
    except InfeasibleBudget as error:
        failure = error
    together, others = workload, list[str]()
    for place, change in enumerate(allow):
        kept, other = () if made is None else made.changes, workload
        for times in range(1, CHANGES[change].most + 1):
            try:
                other = CHANGES[change].changed(other)
                if made is None and times == 1:
                    together, others = CHANGES[change].changed(together), [*others, change]
                planned = plan_for(other, 1 / (len(allow) - place + (times < CHANGES[change].most)))
            except InfeasibleBudget:
                rows.append(Beyond(change, remark="nothing fits with it", times=times))
                if made is None:
                    continue
                break
            except Exception as error:  # a plan in hand is not lost to a change, whatever tracing the changed loss raises
                if made is None and not isinstance(error, RematError):
                    raise
                is_late = isinstance(error, CompileError) and made is not None
                remark = "there was no time for it" if is_late else first_sentence(error)
                rows.append(Beyond(change, remark=remark, times=times))
                break
            rows.append(Beyond(change, planned.device_bytes, planned.seconds, compiled=True, times=times))
            if made is not None and planned.seconds >= (1 - AS_FAST) * made.seconds:
                break
            made, workload = replace(planned, changes=(*kept, *times * (change,))), other
    if made is None and len(others) > 1:
        made = replace(plan_for(together, 1.0), changes=tuple(others))
    if made is None:
        assert failure is not None, "planning either returns or raises"
        raise failure
    return replace(made, beyond=tuple(rows))


@dataclass(frozen=True)
class Predicted:
    """A plan that was not compiled: its device bytes and seconds."""

    device_bytes: int
    seconds: float


def estimated(
    predict: Callable[[Workload, int], Predicted | None], workload: Workload, freed: Mapping[str, int]
) -> tuple[Beyond, ...]:
    """What each change would give, by estimates; `freed` are the bytes of the compiled peak that each change frees."""
    rows = []
    for change, size in freed.items():
        try:
            predicted = predict(CHANGES[change].changed(workload), size)
        except Exception as error:  # the plan is made: whatever tracing the changed loss raises does not lose it
            rows.append(Beyond(change, remark=first_sentence(error)))
            continue
        if predicted is None:
            rows.append(Beyond(change, remark="nothing would fit with it"))
        else:
            rows.append(Beyond(change, predicted.device_bytes, predicted.seconds))
    return tuple(rows)
