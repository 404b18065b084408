"""`remat-jax blocks`: what in a training step could be its blocks, with bytes."""

from __future__ import annotations

from remat_jax.cli.output import Json, answering, progress
from remat_jax.cli.workloads import ArgsOption, WorkloadArgument, find_blocks, load_on_mesh


def blocks(workload: WorkloadArgument, args: ArgsOption = None, as_json: Json = False) -> None:
    """List what in a training step is repeated and could be its blocks: module classes, its own checkpoints, its scans.

    FILE:FUNCTION names a training step (with --args), or a function without arguments that returns a remat_jax.Workload.
    Nothing is compiled. The blocks marked as taken are those of measure, plan, doctor and report, unless the workload names its
    own.
    """
    with answering(as_json) as answer:
        job = load_on_mesh(workload, None, None, args)
        with progress() as show_step:
            show_step(f"{job.name}: tracing", 0, 1)
            found = find_blocks(workload, job)
        answer.show(found)
        answer.data(found.to_dict())
