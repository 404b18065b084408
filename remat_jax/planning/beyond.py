"""Plans with changes beyond the blocks: those that are allowed, one after the other, and an estimate of the others."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from remat_jax.errors import CompileError, InfeasibleBudget, RematError
from remat_jax.memory.compile.process import NotDoneError
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
      CompileError: the same, and the time for a plan without changes was up before a step fitted.
    """
    made, failure, rows = None, None, list[Beyond]()
    try:
        made = plan_for(workload, 1 / (1 + len(allow)))
    except (InfeasibleBudget, NotDoneError) as error:
        failure = error
    for place, change in enumerate(allow):
        kept, changed, most = () if made is None else made.changes, workload, CHANGES[change].most
        for times in range(1, most + 1):
            row, changed, planned = _tried(plan_for, changed, change, times, 1 / (len(allow) - place + (times < most)), made)
            rows.append(row)
            if planned is not None and (made is None or _is_faster(planned, made)):
                made, workload = replace(planned, changes=(*kept, *times * (change,))), changed
            elif made is not None or row.remark != _NOTHING_FITS:
                break
    made = made or _all_together(plan_for, workload, allow)
    if made is None:
        assert failure is not None, "planning either returns or raises"
        raise failure
    return replace(made, beyond=tuple(rows))


def _tried(
    plan_for: PlanFor, workload: Workload, change: str, times: int, share: float, made: Plan | None
) -> tuple[Beyond, Workload, Plan | None]:
    """What a change gives on top of those that `workload` has, the changed workload, and its plan if one is possible.

    With a plan in hand (`made`), nothing that tracing the changed loss raises is raised.
    """
    try:
        workload = CHANGES[change].changed(workload)
        planned = plan_for(workload, share)
    except InfeasibleBudget:
        return Beyond(change, remark=_NOTHING_FITS, times=times), workload, None
    except Exception as error:
        if made is None and not isinstance(error, RematError):
            raise
        is_late = isinstance(error, CompileError) and made is not None
        remark = "there was no time for it" if is_late else first_sentence(error)
        return Beyond(change, remark=remark, times=times), workload, None
    return Beyond(change, planned.device_bytes, planned.seconds, compiled=True, times=times), workload, planned


def _is_faster(planned: Plan, made: Plan) -> bool:
    """Whether a plan is faster than the one in hand. An estimate is not compared with a compiled time."""
    return planned.timed >= made.timed and planned.seconds < (1 - AS_FAST) * made.seconds


def _all_together(plan_for: PlanFor, workload: Workload, allow: Sequence[str]) -> Plan | None:
    """The plan with every change that the workload can have, each made once; None if there is only one, or nothing fits."""
    changes = []
    for change in allow:
        with contextlib.suppress(RematError):
            workload = CHANGES[change].changed(workload)
            changes.append(change)
    if len(changes) < 2:
        return None
    with contextlib.suppress(InfeasibleBudget, NotDoneError):
        return replace(plan_for(workload, 1.0), changes=tuple(changes))
    return None


_NOTHING_FITS = "nothing fits with it"


@dataclass(frozen=True)
class Predicted:
    """A plan that was not compiled: its device bytes and seconds."""

    device_bytes: int
    seconds: float


def estimated(
    predict: Callable[[Workload, int | None], Predicted | None], workload: Workload, freed: Mapping[str, int]
) -> tuple[Beyond, ...]:
    """What each change would give, by estimates; `freed` are the bytes of the compiled peak that each change frees."""
    rows = []
    for change, size in freed.items():
        try:
            predicted = predict(CHANGES[change].changed(workload), None if CHANGES[change].in_blocks else size)
        except Exception as error:  # the plan is made: whatever tracing the changed loss raises does not lose it
            rows.append(Beyond(change, remark=first_sentence(error)))
            continue
        if predicted is None:
            rows.append(Beyond(change, remark="nothing would fit with it"))
        else:
            rows.append(Beyond(change, predicted.device_bytes, predicted.seconds))
    return tuple(rows)
