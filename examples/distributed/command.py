"""The command behind `examples/train_anywhere.py`."""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

import jax

import remat_jax as rj
from remat_jax.compat import keep_to_cpu_without_gpu
from remat_jax.errors import ArgumentError, RematError
from remat_jax.hardware import target
from remat_jax.report.tables import format_bytes

from . import console, processes
from .checkpoints import CheckpointError, Checkpoints
from .setting import DTYPES, Setting
from .training import State, Trainer, workload

FAILED, BAD_USAGE = 1, 2


class TrainingError(RematError, RuntimeError):
    """Raised if the training cannot continue."""


def parser() -> argparse.ArgumentParser:
    """The command-line arguments. The arguments for `Setting` have its defaults."""
    made = argparse.ArgumentParser(
        prog="train_anywhere.py",
        description="Train a decoder on the source of Python's standard library, on whatever devices there are. The same "
        "command again goes on from the newest checkpoint, on the same mesh or on another one.",
    )
    _add_setting(made.add_argument_group("what is trained", "training goes on from a checkpoint only with the same values"))
    how = made.add_argument_group("how")
    how.add_argument("--steps", type=int, default=200, help="steps in all, those of earlier runs included (default 200)")
    how.add_argument(
        "--policy", default="full", help="a policy's name or text, or a plan's file ending in .json (default full)"
    )
    how.add_argument("--mesh", help="sizes of the axes data and fsdp, as in data=2,fsdp=4 (default: all devices on fsdp)")
    how.add_argument("--checkpoint", type=Path, metavar="DIR", help="folder of the checkpoints, the same for all processes")
    how.add_argument(
        "--save-every", type=int, default=50, metavar="N", help="save after every N steps (default 50), and at the end"
    )
    how.add_argument("--keep", type=int, default=3, metavar="N", help="how many checkpoints are kept (default 3)")
    how.add_argument("--wait", action="store_true", help="wait until a checkpoint is written before going on")
    how.add_argument("--log-every", type=int, default=10, metavar="N", help="a row of metrics for every N steps (default 10)")
    how.add_argument("--metrics", type=Path, metavar="FILE", help="add a line of JSON for every step to this file")
    several = made.add_argument_group("several processes", "one on each host, all with the same command but for --process-id")
    several.add_argument("--coordinator", metavar="HOST:PORT", help="an address of process 0 that the others reach")
    several.add_argument("--num-processes", type=int, metavar="N")
    several.add_argument("--process-id", type=int, metavar="I", help="0 to N - 1")
    several.add_argument(
        "--distributed", action="store_true", help="let JAX find the other processes: Slurm, Open MPI, Kubernetes, Cloud TPU"
    )
    several.add_argument(
        "--heartbeat", type=int, default=60, metavar="SECONDS", help="end when a process is silent for this long (default 60)"
    )
    return made


def _add_setting(group: Any) -> None:
    default = Setting()
    for name, told in (
        ("layers", "layers of the decoder"),
        ("width", "features that go from layer to layer"),
        ("heads", "heads of the attention"),
        ("length", "bytes in a sequence"),
        ("batch", "sequences in a batch, of all devices together"),
        ("seed", "of the initial parameters and the data"),
    ):
        value = getattr(default, name)
        group.add_argument(f"--{name}", type=int, default=value, help=f"{told} (default {value})")
    group.add_argument("--scan", action="store_true", help="stack the layers and run them in one scan")
    group.add_argument("--dtype", default=default.dtype, help=f"{', '.join(DTYPES)} (default {default.dtype})")
    rate = default.learning_rate
    group.add_argument("--learning-rate", type=float, default=rate, help=f"of AdamW (default {rate})")


def setting_of(options: argparse.Namespace) -> Setting:
    """The setting that the arguments describe."""
    return Setting(**{name: getattr(options, name) for name in Setting.__dataclass_fields__})


def main(arguments: list[str] | None = None) -> int:
    """Train; exit status 0, 1 if the training cannot continue or no checkpoint can be read, 2 for bad usage."""
    options = parser().parse_args(arguments)
    try:
        _check_numbers(options)
        setting = setting_of(options)
        keep_to_cpu_without_gpu()
        if setting.dtype == "float64":
            jax.config.update("jax_enable_x64", True)
        several = (options.coordinator, options.num_processes, options.process_id)
        processes.start(*several, options.distributed, options.heartbeat)
        train(setting, options)
    except RematError as error:
        print(f"error: {error}", file=sys.stderr)
        status = FAILED if isinstance(error, CheckpointError | TrainingError) else BAD_USAGE
        if jax.distributed.is_initialized():
            _leave(status)
        return status
    return 0


def _check_numbers(options: argparse.Namespace) -> None:
    for name in ("steps", "save_every", "keep", "log_every", "heartbeat"):
        if getattr(options, name) < 1:
            raise ArgumentError(f"--{name.replace('_', '-')} {getattr(options, name)}: expected at least 1")


def train(setting: Setting, options: argparse.Namespace) -> State:
    """Train from the newest checkpoint, or from the start, to `options.steps`; returns the state."""
    mesh = processes.make_mesh(None if options.mesh is None else processes.parsed_mesh(options.mesh))
    told = setting.told()
    # All processes must have the same values, because saving waits for every process.
    alike = {name: getattr(options, name) for name in ("steps", "save_every", "keep", "wait")}
    alike |= {"policy": _content(options.policy), "checkpoint": options.checkpoint and str(options.checkpoint)}
    processes.check_same(told | {"mesh": dict(mesh.shape)} | alike)
    console.check_file(options.metrics)
    job = workload(setting, mesh)
    policy, planned, compiler_options = chosen_policy(options.policy, job)
    trainer = Trainer(setting, mesh, job, policy, compiler_options)
    console.tell(
        {
            "devices": f"{jax.device_count()} × {jax.devices()[0].device_kind}, processes: {jax.process_count()}",
            "mesh": processes.written(mesh.shape),
            "model": f"{trainer.parameters:,} parameters, {setting.dtype}",
            "policy": options.policy,
            **planned,
        }
    )
    saving = Checkpoints(options.checkpoint, told, options.keep, options.wait) if options.checkpoint else None
    restored = saving.restore(trainer.structs, console.warn) if saving else None
    if saving and restored and restored[0] >= options.steps:
        console.tell({"done": f"the newest checkpoint is of step {restored[0]}, and --steps is {options.steps}"})
        saving.close()
        return restored[1]
    ending = processes.Ending(restored[0] if restored else 0)
    needed = [format_bytes(size) for size in trainer.compile()]
    first, state = restored or (0, trainer.initial())
    begins = f"at step {first}" + (f", from {options.checkpoint}" if restored else "")
    console.tell({"compiled": f"{needed[0]} on each device, {needed[1]} on its host", "begins": begins})
    try:
        with ending:
            return _run(trainer, state, first, setting, options, saving, ending.is_due)
    except Exception as error:  # the errors of a lost process: in a step, in a collective of orbax, in orbax's writing thread
        if jax.process_count() == 1 or isinstance(error, RematError):
            raise
        _end_alone(error)


def _content(policy: str) -> str:
    """A policy's text, or the text of a plan's file, which each process reads by itself."""
    try:
        return Path(policy).read_text(encoding="utf-8") if policy.endswith(".json") else policy
    except OSError:
        return policy  # refused where it is loaded


def chosen_policy(given: str, job: rj.Workload) -> tuple[Any, dict[str, str], Mapping[str, int]]:
    """The policy for `Workload.step`, the plan's figures, and its compiler options.

    Raises:
      PlanningError: the plan's file cannot be read, or is for another model.
      PolicyError: the text is no policy.
    """
    if not given.endswith(".json"):
        job.with_policy(job.loss, given)  # refuses a malformed text
        return given, {}, {}
    plan = rj.Plan.load(given, job)
    wanted = _devices_of(plan.target)
    if wanted is not None and wanted != job.mesh.size:
        console.warn(
            f"--policy {given} was made for {plan.target}, {wanted} devices, and the mesh has {job.mesh.size}: its figures are "
            "not those of this run; make one for this mesh (remat-jax plan)"
        )
    said = f"{format_bytes(plan.device_bytes)} on each device of {plan.target}, {format_bytes(plan.host_bytes)} on its host"
    return ("off" if plan.is_off else dict(plan.policies)), {"planned": said}, plan.compiler_options


def _devices_of(name: str) -> int | None:
    """The number of devices of a plan's target; None if it is unknown here, as for a target file that is missing."""
    try:
        return target(name).devices
    except RematError:
        return None


def _run(
    trainer: Trainer,
    state: State,
    first: int,
    setting: Setting,
    options: argparse.Namespace,
    saving: Checkpoints | None,
    ends_after: Callable[[int], bool] = lambda step: False,
) -> State:
    tokens = setting.batch * setting.length
    with console.Metrics(first, options.steps, options.log_every, tokens, options.metrics) as metrics:
        for number in range(first, options.steps):
            state, loss = trainer.step(state, number)
            shown = metrics.add(number, loss)
            is_last = number + 1 == options.steps
            is_asked = ends_after(number + 1) and not is_last
            is_due = (number + 1) % options.save_every == 0 or is_last or is_asked
            if saving and is_due and shown is None:
                shown = metrics.flush()
            if shown is not None and not math.isfinite(shown):
                remedy = (
                    "begin in another --checkpoint folder, with a lower --learning-rate or in float32; the newest checkpoint "
                    "may be spoilt as well"
                )
                raise TrainingError(f"the loss of step {number} is {shown}: {remedy}")
            if saving and is_due:
                saving.save(number + 1, state)
            if is_asked:
                _end_as_asked(number + 1, saving)
    if saving:
        saving.close()
    return state


def _end_as_asked(step: int, saving: Checkpoints | None) -> NoReturn:
    """End in all processes together, after everything saved is written."""
    if saving:
        saving.close()
    if jax.distributed.is_initialized():
        jax.distributed.shutdown()
    remedy = "the same command goes on from there" if saving else "nothing is saved without --checkpoint"
    raise TrainingError(f"asked to end (SIGTERM) after {step} steps; {remedy}")


def _end_alone(error: Exception) -> NoReturn:
    """End this process if a shared step fails: most likely another process has died."""
    why = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"
    print(
        f"error: process {jax.process_index()} of {jax.process_count()}: a step failed ({why}), most likely because another "
        "process has ended; the same command again, on any mesh, goes on from the newest checkpoint",
        file=sys.stderr,
    )
    _leave(FAILED)


def _leave(status: int) -> NoReturn:
    """Exit at once: a normal exit of JAX waits for the other processes, which are dead or wait for this process."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
