"""`remat-jax measure`: the memory of a training step under one policy or several."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from remat_jax.cli.output import DEFAULT_TARGET, Answer, Json, answering, check_files, progress, writing
from remat_jax.cli.workloads import (
    POLICY_HELP,
    ArgsOption,
    MeshOption,
    TargetOption,
    WorkloadArgument,
    check_policy,
    is_plan,
    load_on_mesh,
    read_policy,
)
from remat_jax.errors import ArgumentError
from remat_jax.hardware import Target
from remat_jax.hardware import target as target_named
from remat_jax.memory import MemoryReport, residuals
from remat_jax.memory.compile.backends import backend_of, limit_bytes
from remat_jax.memory.compile.options import DEFAULT_TIMEOUT
from remat_jax.memory.diff import diff_policies
from remat_jax.memory.hlo.text import COLLECTIVES
from remat_jax.memory.measure import measure_many
from remat_jax.memory.step_time.collectives import executed
from remat_jax.policy import is_off
from remat_jax.report import format_bytes, table
from remat_jax.report.stacked_bars import module_memory_figure

NARROW = ("temp", "kept: host", "kept: device", "host")
"""The columns that a narrow table leaves out, in this order."""

# A progress line shows at most this number of letters of a policy.
_MOST_LETTERS = 60


def measure(
    workload: WorkloadArgument,
    policy: Annotated[
        list[str] | None,
        typer.Option("--policy", "-p", help=f"{POLICY_HELP}; repeat the option for several policies. Default: off and full."),
    ] = None,
    target: TargetOption = DEFAULT_TARGET,
    mesh: MeshOption = None,
    args: ArgsOption = None,
    memory_limit: Annotated[
        str | None,
        typer.Option(
            help="The limit of device memory that XLA works towards: 40GiB, 80%, bytes. GPU and TPU targets only. Default: "
            "XLA's own limit."
        ),
    ] = None,
    timeout: Annotated[float, typer.Option(help="Time limit of all compilations in seconds.")] = DEFAULT_TIMEOUT,
    show_residuals: Annotated[bool, typer.Option("--residuals", help="List the residuals by name.")] = False,
    show_live: Annotated[
        bool, typer.Option("--live", help="List device memory at the step's peak, by module. GPU and TPU targets only.")
    ] = False,
    diff: Annotated[
        tuple[str, str] | None,
        typer.Option(
            metavar="A B", help="List the residuals that differ between policies A and B, and what the difference costs."
        ),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Draw device memory at the step's peak, by module, as SVG (GPU and TPU targets)."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Compile a training step under each policy with the target's own compiler, and measure the memory that the step needs.

    FILE:FUNCTION names a training step (with --args), or a function without arguments that returns a remat_jax.Workload. No GPU
    is needed; with --target attached, each step also runs on this machine's GPU. The tables have no times; --json and --diff
    have them, and for a TPU then compile to the end, which takes minutes.
    """
    with answering(as_json) as answer:
        names = _distinct(policy, diff)
        described = target_named(target)
        limit = limit_bytes(memory_limit, described)
        check_files(plot=plot)
        if (plot is not None or show_live) and not backend_of(described).models_time:
            option = f"plot={str(plot)!r} with target=" if plot is not None else "--live with target "
            raise ArgumentError(
                f"{option}{described.name!r}: memory at the peak is known only for GPUs and TPUs; give one, such as "
                "--target h200"
            )
        only_off = names == ["off"] and not diff
        job = load_on_mesh(workload, mesh, described, args, None if only_off else answer)
        with progress() as show_step:
            show_step(f"{job.name}: tracing, then compiling for {described.name}", 0, len(names))
            policies = {name: read_policy(name, job) for name in names}
            if not diff and not any(map(is_off, policies.values())) and job.replaced_checkpoints:
                policies["off"] = read_policy("off", job)
            tables = [_called(name, residuals(job, policy)) for name, policy in policies.items()] if show_residuals else []
            done = itertools.count(1)

            def compiled(name: str) -> None:
                step = f"compiled {name[:_MOST_LETTERS]} for {described.name}"
                show_step(step, min(next(done), len(policies)), len(policies))

            # The tables have no times, and for a TPU the machine code, from which they follow, takes minutes.
            memory_only = not (as_json or diff)
            options: dict[str, Any] = {"memory_limit": limit, "seek_effect": True, "memory_only": memory_only}
            measured = measure_many(job, [*policies.values()], described, timeout, compiled, **options)
            reports = [_called(name, report) for name, report in zip(policies, measured, strict=True)]
            change = None
            if diff:
                before, after = (read_policy(name, job) for name in diff)
                change = diff_policies(job, before, after, described, timeout, memory_limit=limit)
                change = replace(change, before=_called(diff[0], change.before), after=_called(diff[1], change.after))
        answer.show(*tables, *(report.live_table() for report in reports if show_live))
        _show(answer, described, reports)
        answer.show(*(change.tables() if change else ()))
        picture = _draw(plot, reports, answer) if plot else None
        answer.data(
            {
                "workload": job.name,
                "target": described.name,
                "reports": [report.to_dict() for report in reports],
                **({"residuals": [table.to_dict() for table in tables]} if show_residuals else {}),
                **({"diff": change.to_dict()} if change else {}),
                **({"picture": picture} if picture else {}),
            }
        )


def _distinct(policies: Sequence[str] | None, diff: tuple[str, str] | None) -> list[str]:
    """The distinct policies to measure, including both policies of `--diff`, checked before the user's file runs."""
    names: dict[Any, str] = {}
    for policy in [*(policies or (() if diff else ("off", "full"))), *(diff or ())]:
        names.setdefault(check_policy(policy), policy)
    return list(names.values())


def _called(name: str, report: Any) -> Any:
    """`report`; if `name` is a plan's file, the report shows `name` instead of the plan's policies, which are many lines."""
    return replace(report, policy=name) if is_plan(name) else report


def _draw(plot: Path, reports: Sequence[MemoryReport], answer: Answer) -> str:
    figure = module_memory_figure({report.policy: report.live_bytes_by_module for report in reports}, _title(reports))
    with writing("plot", plot):
        picture = figure.save(plot)
    answer.show(f"Picture: {picture}")
    return picture


def _title(reports: Sequence[MemoryReport]) -> str:
    first = reports[0]
    return f"{first.workload}: one training step compiled for {first.target} (JAX {first.jax_version})"


def _show(answer: Answer, target: Target, reports: Sequence[MemoryReport]) -> None:
    columns = ("policy", "device", "temp", "host", "kept: device", "kept: host", "offload freed")
    rows = [_cells(report) for report in reports]
    answer.show(table(_title(reports), columns, rows, caption=_caption(target, reports), optional=NARROW), *_exchanges(reports))
    policies_by_warning: dict[str, list[str]] = {}
    for report in reports:
        for warning in report.warnings:
            policies_by_warning.setdefault(warning, []).append(report.policy)
    for warning, policies in policies_by_warning.items():
        answer.remark(f"warning: {warning} ({', '.join(policies)})")


def _exchanges(reports: Sequence[MemoryReport]) -> list[Any]:
    """A table of the collectives under each policy; no table for a single device or if collectives are unknown."""
    sent = {report.policy: executed(report.collectives) for report in reports if report.collectives is not None}
    if not sent:
        return []
    kinds = [kind for kind in COLLECTIVES if any(kind in by_kind for by_kind in sent.values())]
    rows = [
        (policy, *(f"{by_kind[kind][0]}: {format_bytes(by_kind[kind][1])}" if kind in by_kind else "" for kind in kinds))
        for policy, by_kind in sent.items()
    ]
    title = "Arrays that one device sends or receives in a step, and their bytes"
    caption = "Where a policy has more collectives than off, its recomputation repeats them." if "off" in sent else None
    return [table(title, ("policy", *kinds), rows, caption=caption)]


def _cells(report: MemoryReport) -> tuple[Any, ...]:
    memory = (report.device_bytes, report.temp_bytes, report.host_bytes)
    kept = (report.residual_device_bytes, report.residual_host_bytes)
    freed = format_bytes(report.receipt.returned_bytes) if report.receipt else ""
    return report.policy, *map(format_bytes, memory + kept), freed


def _caption(target: Target, reports: Sequence[MemoryReport]) -> str:
    memory = target.memory_bytes
    caption = "device = arguments + outputs − aliased + temp. "
    if target.devices > 1:
        caption += f"device and host: memory per device; a host has {target.devices // target.hosts} devices. "
        caption += f"kept: residuals of all {target.devices} devices."
    else:
        caption += "kept: residuals, from the forward to the backward pass."
    if any(report.receipt for report in reports):
        caption += " offload freed: device memory, compared with saving the same residuals on the device."
    if (limit := reports[0].memory_limit) is not None:
        caption += f" Compiled with a memory limit of {format_bytes(limit)}."
    if memory is None:
        return caption
    too_large = [report.policy for report in reports if report.device_bytes > memory]
    fits = f"not enough for {', '.join(too_large)}" if too_large else "enough for all of these"
    return f"{caption} The {target.name} has {format_bytes(memory)}: {fits}."
