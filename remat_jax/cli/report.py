"""`remat-jax report`: one page of a workload's policies, memory, plan, parity and traps."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from remat_jax.cli.output import DEFAULT_TARGET, FAILED, Answer, Json, answering, progress
from remat_jax.cli.parity import parity_report
from remat_jax.cli.workloads import ArgsOption, MeshOption, TargetOption, WorkloadArgument, load_on_mesh
from remat_jax.errors import ArgumentError
from remat_jax.hardware import target as target_named
from remat_jax.memory.compile.devices import check_devices
from remat_jax.memory.compile.options import check_timeout
from remat_jax.overview.gathered import THE_PLAN, Gathered, PolicyFigures
from remat_jax.overview.save import REPORT_TIMEOUT, check_plan, checked_path, checked_policies, gather, write_page
from remat_jax.parity.case import require_torch
from remat_jax.planning.check_budget import budget_bytes
from remat_jax.planning.plan import Plan
from remat_jax.report.tables import format_bytes, format_estimate, table


def report(
    workload: WorkloadArgument,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="Where to write the page.")],
    policy: Annotated[
        list[str] | None,
        typer.Option(
            "--policy",
            "-p",
            help="A name or a text; repeat the option for several policies. Default: the usual named policies.",
        ),
    ] = None,
    target: TargetOption = DEFAULT_TARGET,
    mesh: MeshOption = None,
    args: ArgsOption = None,
    budget: Annotated[
        str | None, typer.Option("--budget", "-b", help="Also plan within this device memory: 40GiB, '38 GB', bytes, 80%, 0.8.")
    ] = None,
    plan: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A plan that remat-jax plan --save wrote, instead of --budget.")
    ] = None,
    parity: Annotated[
        str | None, typer.Option(metavar="FILE:FUNCTION", help="Also compare with PyTorch: a case as for remat-jax parity.")
    ] = None,
    timeout: Annotated[
        float, typer.Option(help="Time limit in seconds, without --parity; half of it for a plan.")
    ] = REPORT_TIMEOUT,
    as_json: Json = False,
) -> None:
    """Write one HTML page of a workload: policies side by side, memory by module, the plan with its frontier, parity, traps.

    FILE:FUNCTION names a training step (with --args), or a function without arguments that returns a remat_jax.Workload. The
    page loads no other file. No GPU is needed; with --target attached, each step also runs on this machine's GPU. Exits 1 if
    the comparison with PyTorch fails or the timeout leaves out the plan, 3 if nothing fits the budget.
    """
    with answering(as_json) as answer:
        # Check the arguments before the user's file runs, which may take long.
        described = target_named(target)
        where, policies = checked_path(output, "output"), checked_policies(policy or None)
        check_timeout(timeout)
        if budget is not None and plan is not None:
            raise ArgumentError(f"budget={budget!r} and plan={str(plan)!r}: give only one of them; a plan has its own budget")
        if plan is not None and not plan.is_file():
            raise ArgumentError(f"plan={str(plan)!r}: no such file; write one with remat-jax plan --save")
        within = budget_bytes(budget, described) if budget is not None else None
        if parity is not None:
            require_torch()
        job = load_on_mesh(workload, mesh, described, args, answer)
        made = Plan.load(plan, job) if plan is not None else within
        check_devices(job, described)
        if isinstance(made, Plan):
            check_plan(made, job, described)
        with progress() as show_step:
            compared = parity_report(parity, show_step) if parity is not None else None
            gathered = gather(job, policies, described, plan=made, parity=compared, timeout=timeout, progress=show_step)
        write_page(where, gathered, "output")
        _show(answer, gathered, where)
        answer.data({"report": str(where), **gathered.to_dict()})
    if (compared is not None and not compared.passed) or THE_PLAN in gathered.left_out:
        raise typer.Exit(FAILED)


def _show(answer: Answer, gathered: Gathered, where: Path) -> None:
    each = ", memory per device" if gathered.target.devices > 1 else ""
    title = f"{gathered.workload.name}: one training step compiled for {gathered.target.name}{each}"
    columns = ("policy", "device", "host", "step", "traps")
    answer.show(table(title, columns, [_cells(gathered, policy) for policy in gathered.policies], optional=("host", "step")))
    for policy in gathered.policies:
        if policy.traps:
            answer.show(f"Traps under {policy.name}: {', '.join(dict.fromkeys(finding.trap for finding in policy.traps))}")
    for name, why in gathered.left_out.items():
        answer.show(f"Left out: {name}: {why}")
    if gathered.parity is not None:
        answer.show(gathered.parity.verdict())
    answer.show(f"Report: {where}")


def _cells(gathered: Gathered, policy: PolicyFigures) -> tuple[Any, ...]:
    sizes = (format_bytes(policy.memory.device_bytes), format_bytes(policy.memory.host_bytes))
    return (
        policy.name,
        *sizes,
        format_estimate(policy.seconds, bool(gathered.assumed_rates)),
        str(len(policy.traps)) if policy.traps or policy.is_searched else "not finished",
    )
