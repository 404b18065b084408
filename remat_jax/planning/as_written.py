"""The step as its author wrote it, for a model with its own checkpoints around the blocks.

For such a model `off` means the author's checkpoints, not a step without checkpoints. A plan lists this step beside the named
policies. `everything` replaces `off` among the named policies, and recomputation is counted relative to `everything`.
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
    """The policy under which the step recomputes nothing.

    This is `everything` if the model has its own checkpoints around the blocks, else `off`.
    """
    return dict.fromkeys(workload.blocks, "everything") if workload.replaced_checkpoints else "off"


def counted_flops(workload: Workload, policy: Any) -> int | None:
    """The FLOPs that the step recomputes under `policy`; None if a loop of unknown length prevents the count."""
    counted = []
    for step_policy in (policy, without_checkpoints(workload)):
        step = workload.step(step_policy)
        try:
            counted.append(flops(step.function, *step.arguments))
        except UnsupportedError:
            return None
    return max(0, counted[0] - counted[1])


def as_written(
    workload: Workload, times: Times, full: StepCandidate | None, compile_: Callable[..., list[Compiled]], best: Any
) -> Point:
    """The memory and time of the step as written, for a model with its own checkpoints around the blocks.

    The time is modelled from the compiled schedule. Without a compiled time, it lies between keeping everything and `full`, by
    the ratio of recomputed operations.
    """
    answer = compile_([StepCandidate(AS_WRITTEN, (), 0.0)], best)
    compiled = answer[0] if answer and answer[0].device_bytes != FAILED else None
    again, of_full = (counted_flops(workload, policy) for policy in ("off", dict.fromkeys(workload.blocks, "full")))
    seconds = compiled.seconds if compiled is not None and times.compiled else None
    timed = seconds is not None
    if not timed and full is not None and again is not None and of_full:
        share = again / of_full
        seconds = times.pace * (times.traced_base + (1 - share) * times.keeping_everything + share * full.seconds)
    device, host = (compiled.device_bytes, compiled.host_bytes) if compiled else (None, 0)
    return Point(AS_WRITTEN, device, host, seconds, compiled is not None, timed=timed)
