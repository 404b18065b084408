"""The step as the model's author wrote it, where the model has checkpoints of its own around the blocks.

There `off` is not a step without checkpoints: it is the author's policy. Plans hold it beside the named policies;
`everything` takes the place of `off` among these, and is what computing again is counted against.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from remat_jax.apply.replaced import AS_WRITTEN
from remat_jax.cost.count import flops
from remat_jax.errors import UnsupportedError
from remat_jax.planning.candidate import FAILED, Compiled, StepCandidate
from remat_jax.planning.last_word import Times
from remat_jax.planning.point import Point
from remat_jax.workload import Workload


def without_checkpoints(workload: Workload) -> Any:
    """The policy under which the step computes nothing again.

    Of a model with checkpoints of its own around the blocks these give way to `everything`; of another it is `off`.
    """
    return dict.fromkeys(workload.blocks, "everything") if workload.replaced_checkpoints else "off"


def counted_flops(workload: Workload, policy: Any) -> int | None:
    """What the step computes again under `policy`; None where a loop of unknown length keeps it from being counted."""
    counted = []
    for one in (policy, without_checkpoints(workload)):
        step = workload.step(one)
        try:
            counted.append(flops(step.function, *step.arguments))
        except UnsupportedError:
            return None
    return max(0, counted[0] - counted[1])


def as_written(
    workload: Workload, times: Times, full: StepCandidate | None, compile_: Callable[..., list[Compiled]], best: Any
) -> Point:
    """What the step of a model with checkpoints of its own around the blocks takes as written.

    Its time is that of its compiled schedule; else that of `full`, in proportion to the operations that are computed again.
    """
    answer = compile_([StepCandidate(AS_WRITTEN, (), 0.0)], best)
    compiled = answer[0] if answer and answer[0].device_bytes != FAILED else None
    again, of_full = (counted_flops(workload, policy) for policy in ("off", dict.fromkeys(workload.blocks, "full")))
    seconds = compiled.seconds if compiled is not None and times.compiled else None
    timed = seconds is not None
    if not timed and full is not None and again is not None and of_full:
        seconds = times.pace * (times.traced_base + full.seconds * again / of_full)
    device, host = (compiled.device_bytes, compiled.host_bytes) if compiled else (None, 0)
    return Point(AS_WRITTEN, device, host, seconds, compiled is not None, timed=timed)
