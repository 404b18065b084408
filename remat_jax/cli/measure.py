"""`remat-jax measure`: the memory of a training step under one policy or several."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from remat_jax import compat
from remat_jax.cli.output import Answer, Json, answering, check_picture, progress
from remat_jax.cli.workloads import TAKEN, MeshOption, check_policy, checked_mesh, is_plan, load_on_mesh, read_policy
from remat_jax.errors import ArgumentError
from remat_jax.hardware import Target
from remat_jax.hardware import target as target_named
from remat_jax.memory import MemoryReport, residuals
from remat_jax.memory.compile.options import limit_bytes
from remat_jax.memory.diff import PolicyDiff, compare_policies
from remat_jax.memory.hlo.collectives import executed
from remat_jax.memory.hlo.text import COLLECTIVES
from remat_jax.memory.measure import DEFAULT_TIMEOUT, measure_many
from remat_jax.policy import is_off
from remat_jax.report import format_bytes, table
from remat_jax.report.stacked import module_memory_figure
from remat_jax.workload import Workload

PLAIN_AND_FULL = ("off", "full")
MOST_LETTERS = 60
"""The most letters of a policy in a progress line."""


def measure(
    workload: Annotated[
        str, typer.Argument(metavar="FILE:FUNCTION", help="path/to/file.py:function or package.module:function.")
    ],
    policy: Annotated[
        list[str] | None,
        typer.Option("--policy", "-p", help=f"{TAKEN}; repeat the option for several policies. Default: off and full."),
    ] = None,
    target: Annotated[str, typer.Option(help="The target to compile for; see remat-jax targets.")] = "cpu",
    mesh: MeshOption = None,
    memory_limit: Annotated[
        str | None,
        typer.Option(
            help=(
                "The limit of device memory that XLA works towards: 40GiB, 80%, bytes. GPU targets only. Default: XLA's own "
                "limit."
            )
        ),
    ] = None,
    timeout: Annotated[float, typer.Option(help="Time limit of all compilations in seconds.")] = DEFAULT_TIMEOUT,
    show_residuals: Annotated[bool, typer.Option("--residuals", help="List the residuals by name.")] = False,
    show_live: Annotated[
        bool, typer.Option("--live", help="List device memory at the step's peak, by module. GPU targets only.")
    ] = False,
    diff: Annotated[
        tuple[str, str] | None,
        typer.Option(
            metavar="A B", help=("List the residuals that differ between policies A and B, and what the difference costs.")
        ),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Draw device memory at the step's peak, by module, as SVG. GPU targets only."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure the memory of a training step under each policy, as the target's own compiler lays it out.

    FILE:FUNCTION names a function without arguments that returns a remat_jax.Workload. No GPU is needed; with --target
    attached, each step also runs on this machine's GPU.
    """
    with answering(as_json) as answer:
        asked = _asked(policy, diff)
        described = target_named(target)
        limit = limit_bytes(memory_limit, described)
        if show_live and described.kind != "gpu":
            raise ArgumentError(
                f"--live with target {described.name!r}: memory at the peak is known only for GPU targets; give one, such as "
                "--target h200"
            )
        _check_picture(plot, described)
        divided = checked_mesh(mesh, described)
        compat.keep_to_cpu_without_gpu()
        job = load_on_mesh(workload, divided)
        with progress() as steps:
            steps.tell(f"{job.name}: tracing, then compiling for {described.name}", 0, len(asked))
            policies = {name: read_policy(name, job) for name in asked}
            if not diff and not any(map(is_off, policies.values())) and job.replaced_checkpoints:
                policies["off"] = read_policy("off", job)
            tables = [_called(name, residuals(job, policy)) for name, policy in policies.items()] if show_residuals else []
            done: list[str] = []

            def compiled(name: str) -> None:
                done.append(name)
                steps.tell(f"compiled {name[:MOST_LETTERS]} for {described.name}", min(len(done), len(policies)), len(policies))

            asked_for = list(policies.values())
            measured = measure_many(job, asked_for, described, timeout, on_done=compiled, memory_limit=limit)
            reports = [_called(name, report) for name, report in zip(policies, measured, strict=True)]
            change = _difference(job, diff, described, timeout, limit) if diff else None
        _show(answer, described, reports, [*tables, *(report.live_table() for report in reports if show_live)])
        answer.show(*(change.tables() if change else ()))
        picture = _draw(plot, reports, answer) if plot else None
        answer.data(
            {
                "workload": job.name,
                "target": described.name,
                "reports": [report.to_dict() for report in reports],
                **({"residuals": [each.to_dict() for each in tables]} if show_residuals else {}),
                **({"diff": change.to_dict()} if change else {}),
                **({"picture": picture} if picture else {}),
            }
        )


def _asked(policies: Sequence[str] | None, diff: tuple[str, str] | None) -> list[str]:
    """The distinct policies to measure, including those of `--diff`, checked before the user's file runs."""
    asked: dict[Any, str] = {}
    for policy in [*(policies or (() if diff else PLAIN_AND_FULL)), *(diff or ())]:
        asked.setdefault(check_policy(policy), policy)
    return list(asked.values())


def _difference(job: Workload, diff: tuple[str, str], target: Target, timeout: float, limit: int | None) -> PolicyDiff:
    before, after = (read_policy(name, job) for name in diff)
    change = compare_policies(job, before, after, target, timeout, memory_limit=limit)
    return replace(change, before=_called(diff[0], change.before), after=_called(diff[1], change.after))


def _called(name: str, report: Any) -> Any:
    """`report` with the policy `name` if that is a plan's file: the texts of a plan's policies are many lines."""
    return replace(report, policy=name) if is_plan(name) else report


def _check_picture(plot: Path | None, target: Target) -> None:
    """Check that a picture can be drawn, before minutes of compiling."""
    if plot is None:
        return
    check_picture(plot)
    if target.kind != "gpu":
        raise ArgumentError(
            f"plot={str(plot)!r} with target={target.name!r}: memory at the peak is known only for GPU targets; give one, "
            "such as --target h200"
        )


def _draw(plot: Path, reports: Sequence[MemoryReport], answer: Answer) -> str:
    first = reports[0]
    title = f"{first.workload}: one training step compiled for {first.target} (JAX {first.jax_version})"
    figure = module_memory_figure({report.policy: report.live_bytes_by_module for report in reports}, title)
    try:
        picture = figure.save(plot)
    except OSError as error:
        raise ArgumentError(f"plot={str(plot)!r} cannot be written ({error}); give another file") from None
    answer.show(f"Picture: {picture}")
    return picture


def _show(answer: Answer, target: Target, reports: Sequence[MemoryReport], tables: Sequence[Any]) -> None:
    first = reports[0]
    title = f"{first.workload}: one training step compiled for {first.target} (JAX {first.jax_version})"
    columns = ("policy", "device", "temp", "host", "kept: device", "kept: host", "offload freed")
    answer.show(*tables, table(title, columns, [_cells(report) for report in reports], caption=_caption(target, reports)))
    answer.show(*_exchanges(reports))
    for warning, policies in _warnings(reports).items():
        answer.remark(f"warning: {warning} ({', '.join(policies)})")


def _exchanges(reports: Sequence[MemoryReport]) -> list[Any]:
    """The collectives under each policy as a table; no table for a single device or if they are unknown."""
    sent = {report.policy: executed(report.collectives) for report in reports if report.collectives is not None}
    if not sent:
        return []
    kinds = [kind for kind in COLLECTIVES if any(kind in by_kind for by_kind in sent.values())]
    rows = [
        (policy, *(f"{by_kind[kind][0]}: {format_bytes(by_kind[kind][1])}" if kind in by_kind else "" for kind in kinds))
        for policy, by_kind in sent.items()
    ]
    caption = "The difference to off is what the devices send again under a policy." if "off" in sent else None
    return [
        table("Arrays that one device sends or receives in a step, and their bytes", ("policy", *kinds), rows, caption=caption)
    ]


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
    caption = "device = arguments + outputs − aliased + temp. kept: residuals, from the forward to the backward pass."
    if target.devices > 1:
        caption = (
            "device = arguments + outputs − aliased + temp. device and host: memory per device; a host has "
            f"{target.devices // target.hosts} devices. kept: residuals of all {target.devices} devices."
        )
    if any(report.receipt for report in reports):
        caption += " offload freed: device memory, compared with saving the same residuals on the device."
    if (limit := reports[0].memory_limit) is not None:
        caption += f" Compiled with a memory limit of {format_bytes(limit)}."
    if memory is None:
        return caption
    too_large = [report.policy for report in reports if report.device_bytes > memory]
    fits = f"not enough for {', '.join(too_large)}" if too_large else "enough for all of these"
    return f"{caption} The {target.name} has {format_bytes(memory)}: {fits}."


def _warnings(reports: Sequence[MemoryReport]) -> dict[str, list[str]]:
    policies_by_warning: dict[str, list[str]] = {}
    for report in reports:
        for warning in report.warnings:
            policies_by_warning.setdefault(warning, []).append(report.policy)
    return policies_by_warning
