"""`remat-jax plan`: the fastest policy that fits a budget, checked by the compiler."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from remat_jax.cli.output import (
    DEFAULT_TARGET,
    INTERRUPTED,
    Answer,
    Json,
    answering,
    check_files,
    progress,
    writing,
)
from remat_jax.cli.workloads import ArgsOption, MeshOption, TargetOption, WorkloadArgument, load_on_mesh
from remat_jax.hardware import target as target_named
from remat_jax.memory.compile.options import DEFAULT_TIMEOUT
from remat_jax.planning.changes import CHANGES, checked
from remat_jax.planning.check_budget import budget_bytes, host_budget_bytes
from remat_jax.planning.explain import beyond_table, named_table, next_gib, plan_table
from remat_jax.planning.make_plan import plan as make_plan
from remat_jax.planning.page import picture
from remat_jax.planning.plan import Plan


def plan(
    workload: WorkloadArgument,
    budget: Annotated[
        str, typer.Option("--budget", "-b", help="Device memory: 40GiB, '38 GB', bytes, or a share of the target's: 80%, 0.8.")
    ],
    target: TargetOption = DEFAULT_TARGET,
    mesh: MeshOption = None,
    args: ArgsOption = None,
    host_budget: Annotated[str | None, typer.Option(help="Host memory: 64GiB, or 0 for no offload. Default: no limit.")] = None,
    allow: Annotated[
        list[str] | None,
        typer.Option(metavar="CHANGE", help=f"A change beyond the blocks that the plan may make: {', '.join(CHANGES)}."),
    ] = None,
    timeout: Annotated[float, typer.Option(help="Time limit of the whole call in seconds.")] = DEFAULT_TIMEOUT,
    explain: Annotated[bool, typer.Option("--explain", help="Explain for every residual where it is, and why.")] = False,
    save: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the plan as JSON, for Plan.load.")] = None,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write one HTML page with a slider over memory and time.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw memory against time, as SVG.")] = None,
    as_json: Json = False,
) -> None:
    """Find the fastest policy whose compiled training step fits a budget of memory.

    FILE:FUNCTION names a training step (with --args), or a function without arguments that returns a remat_jax.Workload. No GPU
    is needed or used. If nothing fits, the exit status is 3, and the error gives the smallest memory that was reached and its
    largest parts. Ctrl-C ends the search: the best plan so far is shown and saved, and the exit status is 130.
    """
    with answering(as_json) as answer:
        # Check the arguments before the user's file runs, which may take long.
        described = target_named(target)
        device, host, allowed = budget_bytes(budget, described), host_budget_bytes(host_budget), checked(allow or ())
        check_files(save=save, html=html, plot=plot)
        job = load_on_mesh(workload, mesh, described, args)
        is_whole = True
        try:
            with progress() as show_step:
                made = make_plan(job, device, described, host, allow=allowed, timeout=timeout, progress=show_step)
        except KeyboardInterrupt as error:
            if (best := getattr(error, "plan", None)) is None:
                raise
            made, is_whole = best, False
        answer.show(plan_table(made), named_table(made), *filter(None, [beyond_table(made)]), next_gib(made), *made.notes)
        if explain:
            answer.show("", made.explain())
        written = _write(made, save, html, plot, answer)
        if not is_whole and not written:
            answer.remark("Nothing was saved. With --save FILE, Ctrl-C saves the best plan so far.")
        answer.data({**made.to_dict(), **written})
        if not is_whole:
            raise typer.Exit(INTERRUPTED)


def _write(made: Plan, save: Path | None, html: Path | None, plot: Path | None, answer: Answer) -> dict[str, str]:
    written: dict[str, str] = {}
    if save is not None:
        written["saved"] = str(made.save(save))
    if html is not None:
        written["page"] = str(made.to_html(html))
    if plot is not None:
        with writing("plot", plot):
            written["picture"] = picture(made).save(plot)
    for name, path in written.items():
        answer.show(f"{name.capitalize()}: {path}")
    return written
