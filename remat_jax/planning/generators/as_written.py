"""The model as its author wrote it, with its own checkpoints around the blocks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from remat_jax.apply.blocks import AS_WRITTEN
from remat_jax.cost.count import flops
from remat_jax.errors import UnsupportedError
from remat_jax.planning.candidate import Load, StepCandidate
from remat_jax.planning.known import Known
from remat_jax.workload import Workload


def propose(known: Known) -> Iterable[StepCandidate]:
    """The step as written, if policies replace checkpoints of the model's own."""
    return [] if known.as_written is None else [known.as_written]


def as_written(workload: Workload, everything: StepCandidate, full: StepCandidate) -> StepCandidate:
    """The candidate, estimated between a step that keeps everything and one under `full`, by the FLOPs that each recomputes."""
    share = 1.0
    written, of_full = (counted_flops(workload, policy) for policy in ("off", dict.fromkeys(workload.blocks, "full")))
    if written is not None and of_full:
        share = min(1.0, written / of_full)

    def between(kept: float, recomputed: float) -> float:
        return (1 - share) * kept + share * recomputed

    pairs = zip(everything.loads, full.loads, strict=True)
    loads = [
        Load(round(between(first.saved, second.saved)), round(between(first.recomputed, second.recomputed)), 0)
        for first, second in pairs
    ]
    return StepCandidate(
        tuple(replace(kept, checkpointed=False) for kept in everything.kept),
        source="as_written",
        name=AS_WRITTEN,
        loads=tuple(loads),
        seconds=between(everything.seconds, full.seconds),
    )


def counted_flops(workload: Workload, policy: object) -> int | None:
    """The FLOPs that the step recomputes under `policy`; None if a loop of unknown trip count prevents the count."""
    # Under `off`, the model's own checkpoints around its blocks recompute too, so compare with `everything`.
    nothing = dict.fromkeys(workload.blocks, "everything") if workload.replaced_checkpoints else "off"
    counts = []
    for step_policy in (policy, nothing):
        step = workload.step(step_policy)
        try:
            counts.append(flops(step.function, *step.arguments))
        except UnsupportedError:
            return None
    return max(0, counts[0] - counts[1])
