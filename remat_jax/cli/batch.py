"""`remat-jax batch`: examples per second for each batch size, each under its fastest plan."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from remat_jax import compat
from remat_jax.cli.output import DEFAULT_TARGET, Json, answering, check_files, progress
from remat_jax.cli.workloads import MeshOption, TargetOption, WorkloadArgument, load_function, with_mesh
from remat_jax.errors import ArgumentError
from remat_jax.hardware import target as target_named
from remat_jax.memory.compile.devices import check_size
from remat_jax.memory.compile.options import DEFAULT_TIMEOUT, check_timeout
from remat_jax.mesh import as_mesh
from remat_jax.planning.batches import batches as plan_batches
from remat_jax.planning.batches import checked_batches
from remat_jax.planning.check_budget import budget_bytes, host_budget_bytes
from remat_jax.workload import Workload


def batch(
    workload: WorkloadArgument,
    budget: Annotated[
        str, typer.Option("--budget", "-b", help="Device memory: 40GiB, '38 GB', bytes, or a share of the target's: 80%, 0.8.")
    ],
    target: TargetOption = DEFAULT_TARGET,
    sizes: Annotated[
        str | None,
        typer.Option("--batches", metavar="N,N,…", help="The batch sizes. Default: 1, 2, 4, … and the largest that fits."),
    ] = None,
    mesh: MeshOption = None,
    host_budget: Annotated[str | None, typer.Option(help="Host memory: 64GiB, or 0 for no offload. Default: no limit.")] = None,
    timeout: Annotated[float, typer.Option(help="Time limit of each batch's plan in seconds.")] = DEFAULT_TIMEOUT,
    save: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the plan of the best batch as JSON, for Plan.load.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Plan each batch size, and find the one with the most examples per second.

    FILE:FUNCTION names a function that takes a batch size and returns a remat_jax.Workload. No GPU is needed or used. If no
    batch fits, the exit status is 3.
    """
    with answering(as_json) as answer:
        # Check the arguments before the user's file runs, which may take long.
        described = target_named(target)
        device, host = budget_bytes(budget, described), host_budget_bytes(host_budget)
        listed = None if sizes is None else _written(sizes)
        check_timeout(timeout)
        check_files(save=save)
        divided = None if mesh is None else as_mesh(mesh)
        if divided is not None:
            check_size(divided, described, f"mesh={mesh!r}")
        compat.keep_to_cpu_without_gpu()
        make = load_function(workload)

        def on_mesh(size: int) -> Workload:
            job = with_mesh(divided, lambda: make(size))
            return job if divided is None else job.on_mesh(divided)

        with progress() as show_step:
            made = plan_batches(on_mesh, device, described, host, batches=listed, timeout=timeout, progress=show_step)
        answer.show(made)
        saved = {}
        if save is not None and made.best.plan is not None:
            saved = {"saved": str(made.best.plan.save(save))}
            answer.show(f"Saved: {saved['saved']}")
        answer.data({**made.to_dict(), **saved})


def _written(text: str) -> list[int]:
    try:
        return checked_batches([int(word) for word in text.split(",")])
    except ValueError:
        raise ArgumentError(f"batches={text!r}: expected batch sizes separated by commas, such as 8,16,32") from None
