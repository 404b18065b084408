"""`remat-jax measure`: the memory of a training step under one policy or several."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import typer

from remat_jax import compat
from remat_jax.cli.output import Answer, Json, answering, progress
from remat_jax.cli.workloads import load_workload
from remat_jax.hardware import Target
from remat_jax.hardware import target as target_named
from remat_jax.memory import MemoryReport, residuals
from remat_jax.memory.measure import DEFAULT_TIMEOUT, measure_many
from remat_jax.policy import as_policy
from remat_jax.report import format_bytes, table

PLAIN_AND_FULL = ("off", "full")


def measure(
    workload: Annotated[
        str, typer.Argument(metavar="FILE:FUNCTION", help="path/to/file.py:function or package.module:function.")
    ],
    policy: Annotated[
        list[str] | None,
        typer.Option("--policy", "-p", help="A name or a text; once for each of several. off and full unless given."),
    ] = None,
    target: Annotated[str, typer.Option(help="What to compile for; see remat-jax targets.")] = "cpu",
    timeout: Annotated[float, typer.Option(help="Seconds that compiling may take in all.")] = DEFAULT_TIMEOUT,
    show_residuals: Annotated[bool, typer.Option("--residuals", help="List what is kept between the passes, by name.")] = False,
    show_live: Annotated[
        bool, typer.Option("--live", help="List what is on the device where the step needs most, by module. GPU targets.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Say what a training step needs in memory under each policy, as the target's own compiler lays it out.

    FILE:FUNCTION names a function without arguments that returns a remat_jax.Workload. No GPU is needed or used.
    """
    with answering(as_json) as answer:
        asked = list(policy or PLAIN_AND_FULL)
        # What can be wrong in the arguments is said before the user's file runs, which may take long.
        for one in asked:
            as_policy(one)
        described = target_named(target)
        compat.keep_to_cpu_without_gpu()
        job = load_workload(workload)
        with progress() as steps:
            steps.tell(f"{job.name}: tracing, then compiling for {described.name}", 0, len(asked))
            tables = [residuals(job, one) for one in asked] if show_residuals else []
            done: list[str] = []

            def compiled(name: str) -> None:
                done.append(name)
                steps.tell(f"compiled {name} for {described.name}", min(len(done), len(asked)), len(asked))

            reports = measure_many(job, asked, described, timeout, on_done=compiled)
        _show(answer, described, reports, [*tables, *(report.live_table() for report in reports if show_live)])
        answer.data(
            {
                "workload": job.name,
                "target": described.name,
                "reports": [report.to_dict() for report in reports],
                **({"residuals": [one.to_dict() for one in tables]} if show_residuals else {}),
            }
        )


def _show(answer: Answer, target: Target, reports: Sequence[MemoryReport], tables: Sequence[Any]) -> None:
    first = reports[0]
    title = f"{first.workload}: one training step compiled for {first.target} (JAX {first.jax_version})"
    columns = ("policy", "device", "of it temp", "host", "kept: device", "kept: host", "offload gave back")
    answer.show(*tables, table(title, columns, [_cells(report) for report in reports], caption=_caption(target, reports)))
    for warning, policies in _warnings(reports).items():
        answer.remark(f"warning: {warning} ({', '.join(policies)})")


def _cells(report: MemoryReport) -> tuple[Any, ...]:
    returned = report.receipt.returned_bytes if report.receipt else None
    return (
        report.policy,
        *(format_bytes(n) for n in (report.device_bytes, report.temp_bytes, report.host_bytes)),
        format_bytes(report.residual_device_bytes),
        format_bytes(report.residual_host_bytes),
        format_bytes(returned) if report.receipt else "",
    )


def _caption(target: Target, reports: Sequence[MemoryReport]) -> str:
    memory = target.memory_bytes
    said = "device: arguments + outputs − aliased + temp. kept: residuals, from the forward to the backward pass."
    if any(report.receipt for report in reports):
        said += " gave back: against saving on the device what is offloaded."
    if memory is None:
        return said
    too_large = [report.policy for report in reports if report.device_bytes > memory]
    fits = f"not enough for {', '.join(too_large)}" if too_large else "enough for all of these"
    return f"{said} The {target.name} has {format_bytes(memory)}: {fits}."


def _warnings(reports: Sequence[MemoryReport]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for report in reports:
        for warning in report.receipt.warnings if report.receipt else ():
            found.setdefault(warning, []).append(report.policy)
    return found
