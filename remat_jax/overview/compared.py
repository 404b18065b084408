"""Compare policies of a workload: compiled memory, estimated time, and known traps."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax

from remat_jax.diagnosis import doctor
from remat_jax.diagnosis.findings import Diagnosis
from remat_jax.errors import CompileError, PlanningError, PolicyError, TargetError, UnsupportedError
from remat_jax.hardware import Target
from remat_jax.memory import MemoryReport, residuals
from remat_jax.memory.measure import measure_many
from remat_jax.memory.residuals import ResidualTable
from remat_jax.planning import Plan
from remat_jax.planning.problem import Described, describe, extra_seconds, keeping_seconds, recompute_flops
from remat_jax.policy import NAMED, as_block_policy, is_off
from remat_jax.warning import silenced
from remat_jax.workload import Workload

Progress = Callable[[str, int, int], None]
"""Called with the current activity, the number of finished parts, and the number of all parts."""

USUAL = ("off", "full", "dots", "dots_with_no_batch_dims", "offload_inputs", "offload_dot_with_no_batch_dims")
"""The policies compared by default; a CPU has a single memory, so policies that offload are left out there."""

THE_PLAN = "the plan"


@dataclass(frozen=True)
class Compared:
    """A policy with its figures.

    Attributes:
      name: the policy's name on the page.
      memory: the compiled memory.
      kept: the residuals; None if they cannot be read.
      seconds, extra_seconds: the estimated time of a step, and its excess over saving everything; None without an estimate.
      recompute_flops: the recomputed FLOPs of a step; None if unknown.
      diagnosis: the result of the doctor.
    """

    name: str
    memory: MemoryReport
    kept: ResidualTable | None
    seconds: float | None
    extra_seconds: float | None
    recompute_flops: int | None
    diagnosis: Diagnosis


@dataclass
class PolicyComparison:
    """The compared policies, `notes` on missing figures, and the reasons why default policies are `left_out`."""

    policies: list[Compared] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    described: Described | None = None


@silenced()  # the page shows the warnings
def compare(
    workload: Workload, policies: Sequence[Any] | None, target: Target, plan: Plan | None, timeout: float, tell: Progress
) -> PolicyComparison:
    """Compare the policies and the plan; `policies=None` means the default policies that are possible here."""
    comparison, ends = PolicyComparison(), time.monotonic() + timeout
    asked = _usual(workload, target, comparison, tell) if policies is None else list(policies)
    if policies is not None and not any(one == "off" or is_off(one) for one in asked) and workload.replaced_checkpoints:
        asked.append("off")
    everything = [_Asked(policy, required=policies is not None) for policy in asked]
    if plan is not None:
        everything.append(_Asked("off" if plan.is_off else dict(plan.policies), plan=plan))
    comparison.described = _described(workload, target, ends, comparison)
    reports = _measured(workload, everything, target, ends, tell, comparison)
    compiled_for = target if target.kind == "gpu" else None
    for number, (one, memory) in enumerate(reports):
        name = THE_PLAN if one.plan else _new_name(memory.policy, comparison)
        tell(f"looking for traps under {name}", number, len(reports))
        diagnosis = doctor(workload, one.policy, compiled_for, timeout)
        kept = residuals(workload, _with_names(one.policy)) if workload.has_loss else None
        figures = _of_plan(one.plan) if one.plan else _estimated(comparison.described, one.policy, memory)
        comparison.policies.append(Compared(name, memory, kept, *figures, diagnosis))
    comparison.policies[:] = _as_compiled(comparison.policies)
    return comparison


@dataclass(frozen=True)
class _Asked:
    """A policy to measure, whether a failure to measure it ends the report, and the plan that it comes from."""

    policy: Any
    required: bool = True
    plan: Plan | None = None


def _new_name(name: str, comparison: PolicyComparison) -> str:
    """`name`, numbered if another policy has the same name: two of JAX's policy objects may print alike."""
    alike = sum(one.name == name or one.name.startswith(f"{name} (") for one in comparison.policies)
    return f"{name} ({alike + 1})" if alike else name


def _usual(workload: Workload, target: Target, comparison: PolicyComparison, tell: Progress) -> list[Any]:
    """The default policies that have an effect on this workload; the reasons against the others are recorded."""
    able = []
    for name in USUAL:
        if NAMED[name].offloads and target.kind == "cpu":
            comparison.left_out[name] = "a CPU has one memory"
            continue
        tell(f"{workload.name}: tracing under {name}", 0, len(USUAL))
        try:
            step = workload.step(name)
            jax.eval_shape(step.function, *step.arguments)
        except (PolicyError, UnsupportedError) as error:
            comparison.left_out[name] = str(error)
        else:
            able.append(name)
    return able


def _measured(
    workload: Workload, asked: Sequence[_Asked], target: Target, ends: float, tell: Progress, found: PolicyComparison
) -> list[tuple[_Asked, MemoryReport]]:
    """Each policy with its memory; a policy that is not required is left out if it fails to compile."""
    done: list[str] = []

    def compiled(name: str) -> None:
        done.append(name)
        # A plan's policy is too long for a line of progress.
        short = name if len(name) <= 60 else f"{name[:59]}…"
        tell(f"compiled {short} for {target.name}", min(len(done), len(asked)), len(asked))

    def measured(some: Sequence[_Asked]) -> list[tuple[_Asked, MemoryReport]]:
        reports = measure_many(workload, [one.policy for one in some], target, _left(ends), compiled)
        return list(zip(some, reports, strict=True))

    tell(f"{workload.name}: tracing, then compiling for {target.name}", 0, len(asked))
    try:
        return measured(asked)
    except CompileError as error:
        if all(one.required for one in asked):
            raise
        refused = error
    known = []
    for one in asked:
        try:
            if time.monotonic() >= ends:
                raise refused
            known += measured([one])
        except CompileError as error:
            if one.required:
                raise
            found.left_out[str(one.policy)] = str(error).splitlines()[0]
    if not known:
        raise refused
    return known


def _left(ends: float) -> float:
    return max(1.0, ends - time.monotonic())


def _described(workload: Workload, target: Target, ends: float, comparison: PolicyComparison) -> Described | None:
    """The workload as a planning problem, for estimating times; None with a note if it cannot be described."""
    try:
        return describe(workload, target, timeout=_left(ends))
    except (PlanningError, TargetError, UnsupportedError) as error:
        comparison.notes.append(f"No step time is estimated: {error}")
        return None


def _as_compiled(policies: list[Compared]) -> list[Compared]:
    """The same with the times of the compiled schedules, where every one of them is known; over `off`, if it is compared."""
    if any(one.memory.seconds is None for one in policies):
        return policies
    base = next((one.memory.seconds for one in policies if one.name == "off"), None)
    found = []
    for one in policies:
        seconds = one.memory.seconds
        extra = None if base is None or seconds is None else seconds - base
        found.append(replace(one, seconds=seconds, extra_seconds=extra))
    return found


def _estimated(described: Described | None, policy: Any, memory: MemoryReport) -> tuple[float | None, float | None, int | None]:
    """Seconds of a step, the excess over saving everything, and recomputed FLOPs; None if unknown."""
    if described is None or (memory.residual_host_bytes and described.stack.link is None):
        return None, None, None
    by_block = isinstance(policy, Mapping)
    wanted = {block: as_block_policy(one) for block, one in policy.items()} if by_block else as_block_policy(policy)
    try:
        extra = extra_seconds(described, wanted)
        return described.base_seconds + extra, extra - keeping_seconds(described), recompute_flops(described, wanted)
    except PlanningError:
        return None, None, None  # one of JAX's policy objects, unknown before tracing


def _with_names(policy: Any) -> Any:
    """The policy for reading residuals: `off` names no arrays, and `everything` saves the same arrays."""
    if isinstance(policy, Mapping):
        return {block: _with_names(one) for block, one in policy.items()}
    return "everything" if _is_off(policy) else policy


def _is_off(policy: Any) -> bool:
    return not isinstance(policy, Mapping) and is_off(as_block_policy(policy))


def _of_plan(plan: Plan) -> tuple[float, float, int]:
    return plan.seconds, plan.seconds - plan.base_seconds, plan.recompute_flops
