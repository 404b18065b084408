"""`remat-jax doctor`: the known traps in a training step under a policy; or a report of this machine and its packages."""

from __future__ import annotations

from typing import Annotated

import typer

from remat_jax import compat
from remat_jax.cli.output import DEFAULT_TARGET, FAILED, Answer, Json, answering, progress
from remat_jax.cli.workloads import (
    POLICY_HELP,
    WORKLOAD,
    ArgsOption,
    MeshOption,
    check_policy,
    is_plan,
    load_on_mesh,
    read_policy,
)
from remat_jax.diagnosis import environment
from remat_jax.diagnosis.doctor import checked_target, diagnose
from remat_jax.errors import ArgumentError
from remat_jax.hardware import target as target_named
from remat_jax.memory.compile.options import DEFAULT_TIMEOUT, check_timeout


def doctor(
    context: typer.Context,
    workload: Annotated[str | None, WORKLOAD] = None,
    policy: Annotated[str, typer.Option("--policy", "-p", help=f"{POLICY_HELP}; off checks the model as it is.")] = "off",
    target: Annotated[
        str, typer.Option(help="A GPU or TPU to compile for; see remat-jax targets. With none, trace, and compile nothing.")
    ] = DEFAULT_TARGET,
    mesh: MeshOption = None,
    args: ArgsOption = None,
    timeout: Annotated[float, typer.Option(help="Time limit of each compilation in seconds.")] = DEFAULT_TIMEOUT,
    as_json: Json = False,
) -> None:
    """Name the known traps in a training step under a policy: where, what happens, and the remedy.

    FILE:FUNCTION names a training step (with --args), or a function without arguments that returns a remat_jax.Workload. Exits
    1 if a trap is found. No GPU is needed or used. Without FILE:FUNCTION, doctor lists this machine, its packages, and what
    they cannot do. Add this list, as JSON, to a bug report.
    """
    with answering(as_json) as answer:
        if workload is None:
            _show_environment(context, answer)
            return
        # Check the arguments before the user's file runs, which may take long.
        check_policy(policy)
        check_timeout(timeout)
        described = target_named(target) if target != "none" else None
        job = load_on_mesh(workload, mesh, described, args, None if policy == "off" else answer)
        with progress() as show_step:
            show_step(f"{job.name}: tracing" + (f", then compiling for {described.name}" if described else ""), 0, 1)
            named = policy if is_plan(policy) else None
            diagnosis = diagnose(job, read_policy(policy, job), checked_target(job, described, timeout), timeout, name=named)
        answer.show(diagnosis)
        answer.data(diagnosis.to_dict())
    if not diagnosis.ok:
        raise typer.Exit(FAILED)


def _show_environment(context: typer.Context, answer: Answer) -> None:
    # Compare sources, not values: a user may give an option its default value.
    sources = {name: context.get_parameter_source(name) for name in ("policy", "target", "mesh", "timeout")}
    options = [name for name, source in sources.items() if getattr(source, "name", "") == "COMMANDLINE"]
    if options:
        raise ArgumentError(
            f"--{options[0]} {context.params[options[0]]!r} without a workload: give FILE:FUNCTION as well, such as "
            "train.py:job, or leave the option out to list this machine and its packages"
        )
    compat.keep_to_cpu_without_gpu()
    report = environment()
    answer.show(report)
    answer.data(report.to_dict())
