"""Compares policies of a workload by compiled memory, estimated time and known traps, with a plan and a parity report."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import jax

from remat_jax.diagnosis.doctor import diagnose
from remat_jax.diagnosis.findings import Diagnosis, Finding
from remat_jax.errors import BlockError, CompileError, PlanningError, PolicyError, RematError, TargetError, UnsupportedError
from remat_jax.hardware import Target
from remat_jax.memory import MemoryReport, residuals
from remat_jax.memory.compile.backends import backend_of
from remat_jax.memory.compile.process import NotDoneError
from remat_jax.memory.measure import measure_many, numbered, policy_text
from remat_jax.memory.residuals import ResidualTable
from remat_jax.parity.report import ParityReport
from remat_jax.planning import Plan
from remat_jax.planning.outcome import assumed_rates
from remat_jax.planning.problem import KEEP_ALL, Described, describe, extra_seconds, keeping_seconds, recompute_flops
from remat_jax.policy import NAMED, as_block_policy, is_off
from remat_jax.warning import silenced
from remat_jax.workload import Workload

Progress = Callable[[str, int, int], None]
"""A function that is called with the current activity, the number of finished parts, and the number of all parts."""

USUAL = ("off", "full", "dots", "dots_with_no_batch_dims", "offload_inputs", "offload_dot_with_no_batch_dims")
"""The policies compared by default. Policies that offload are left out for a CPU, which has a single memory."""

THE_PLAN = "the plan"
_BYTES = ("device_bytes", "temp_bytes", "host_bytes", "residual_device_bytes", "residual_host_bytes", "measured_peak_bytes")


@dataclass(frozen=True)
class PolicyFigures:
    """A policy with its figures.

    Attributes:
      name: the policy's name on the page.
      kept: the residuals with their actions; None if they cannot be read.
      seconds, extra_seconds: the estimated time of a step, and its excess over saving everything; None if unknown.
      timed: whether `seconds` come from the compiled schedule; otherwise they are the traced estimate.
      assumed_rates: the names of the assumed rates that `seconds` use.
      recompute_flops: the recomputed FLOPs of a step; None if unknown.
      diagnosis: the traps; None if no time was left to look for them.
    """

    name: str
    memory: MemoryReport
    kept: ResidualTable | None
    seconds: float | None
    extra_seconds: float | None
    recompute_flops: int | None
    diagnosis: Diagnosis | None
    timed: bool = False
    assumed_rates: tuple[str, ...] = ()

    @property
    def traps(self) -> tuple[Finding, ...]:
        """The traps that were found."""
        return () if self.diagnosis is None else self.diagnosis.findings

    @property
    def is_searched(self) -> bool:
        """Whether the search for traps was finished."""
        return self.diagnosis is not None and not self.diagnosis.cut_short

    @property
    def is_sound(self) -> bool:
        """False if the compiler is known to miscompile the policy."""
        return self.memory.receipt is None or not self.memory.receipt.miscompiled

    def to_dict(self) -> dict[str, Any]:
        """The figures as plain data for JSON."""
        return {
            "policy": self.name,
            **{name: getattr(self.memory, name) for name in _BYTES},
            "receipt": asdict(self.memory.receipt) if self.memory.receipt else None,
            "seconds": self.seconds,
            "extra_seconds": self.extra_seconds,
            "timed": self.timed,
            "recompute_flops": self.recompute_flops,
            "findings": [asdict(finding) for finding in self.traps] if self.diagnosis is not None else None,
        }


@dataclass
class Gathered:
    """The content of a page; `plan` and `parity` are None if not given.

    Attributes:
      plan: after `gather`, with the figures of the compared policies (`plan_as_compiled`).
      policies: the compared policies; if there is a plan, its policy is the last.
      left_out: name of each default policy that is not compared, and of a plan that was not found in time → the reason.
      notes: remarks on missing figures.
      described: the workload as a planning problem; None if no times are estimated.
    """

    workload: Workload
    target: Target
    plan: Plan | None = None
    parity: ParityReport | None = None
    policies: list[PolicyFigures] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    described: Described | None = None

    @property
    def limit(self) -> tuple[str, int] | None:
        """The name and bytes of the device memory into which policies must fit; None if unknown."""
        if self.plan is not None:
            return "the budget", self.plan.budget
        size, name = self.target.memory_bytes, self.target.name
        whose = f"one device of {name}" if self.target.devices > 1 else name
        return (f"the memory of {whose}", size) if size is not None else None

    @property
    def host_budget(self) -> int | None:
        """The plan's budget of host memory."""
        return self.plan.host_budget if self.plan is not None else None

    def fits(self, policy: PolicyFigures) -> bool:
        """Whether a policy is within `limit` and `host_budget`."""
        within = self.limit is None or policy.memory.device_bytes <= self.limit[1]
        return within and (self.host_budget is None or policy.memory.host_bytes <= self.host_budget)

    @property
    def base_seconds(self) -> float | None:
        """The seconds of a compiled step that keeps all residuals; None if there is none, or if times are not compiled."""
        times = [policy.seconds for policy in self.policies if policy.timed and policy.name in KEEP_ALL]
        return min(filter(None, times), default=None)

    @property
    def assumed_rates(self) -> frozenset[str]:
        """The assumed rates that any time uses. If there are any, all times are ranges, so that they can be compared."""
        plan = self.plan.assumed_rates if self.plan is not None else ()
        return frozenset(plan).union(*(policy.assumed_rates for policy in self.policies))

    @property
    def has_comparable_times(self) -> bool:
        """Whether the plan's times and the policies' times are estimated for the same step with the same rates."""
        plan, described = self.plan, self.described
        if plan is None or described is None:
            return True
        planned = [policy for policy in self.policies if policy.name == THE_PLAN]
        if plan.timed and planned:
            now, then = planned[0].memory.seconds, plan.seconds
        else:
            now, then = described.base_seconds + keeping_seconds(described), plan.base_seconds
        return now is not None and abs(now - then) <= 1e-6 * then

    def to_dict(self) -> dict[str, Any]:
        """The figures as plain data for JSON."""
        return {
            "workload": self.workload.name,
            "target": self.target.name,
            "policies": [policy.to_dict() for policy in self.policies],
            "left_out": dict(self.left_out),
            "notes": list(self.notes),
            "plan": self.plan.to_dict() if self.plan else None,
            "parity": {"passed": self.parity.passed, "verdict": self.parity.verdict()} if self.parity else None,
        }


@silenced()  # the page repeats the warnings
def add_policies(gathered: Gathered, policies: Sequence[Any] | None, timeout: float, tell: Progress) -> None:
    """Compare the policies and the plan; `policies=None` means the default policies that have an effect here."""
    workload, target, plan, ends = gathered.workload, gathered.target, gathered.plan, time.monotonic() + timeout
    modelled = target if backend_of(target).models_time else None
    if policies is None:
        asked = [_Asked(policy, required=False) for policy in _usual(gathered, tell)]
    else:
        asked = [_Asked(policy) for policy in policies]
        if not any(map(_is_off, policies)) and workload.replaced_checkpoints:
            asked.append(_Asked("off"))
    if plan is not None:
        asked.append(_Asked("off" if plan.is_off else dict(plan.policies), plan=plan))
    try:
        gathered.described = describe(workload, target, timeout=_left(ends))
    except (BlockError, PlanningError, TargetError, UnsupportedError) as error:
        gathered.notes.append(f"No step time is estimated: {error}")
    reports = _measured(gathered, asked, ends, tell)
    for number, (entry, memory) in enumerate(reports):
        name = THE_PLAN if entry.plan else numbered(memory.policy, [policy.name for policy in gathered.policies])
        tell(f"looking for traps under {name}", number, len(reports))
        diagnosis = kept = None
        if time.monotonic() < ends:
            diagnosis = diagnose(workload, entry.policy, modelled, timeout, report=memory, ends=ends)
        with contextlib.suppress(*(() if workload.has_loss else (RematError,))):  # several gradients, or none
            kept = residuals(workload, _with_names(entry.policy)) if time.monotonic() < ends else None
        figures = _estimated(gathered.described, entry, memory)
        timed = entry.plan is not None and entry.plan.timed
        assumed = entry.plan.assumed_rates if entry.plan is not None else assumed_rates(None, target)
        gathered.policies.append(PolicyFigures(name, memory, kept, *figures, diagnosis, timed, assumed))
    if late := [policy.name for policy in gathered.policies if not policy.is_searched]:
        gathered.notes.append(
            f"The search for traps under {', '.join(late)} was not finished: the timeout was over; a longer one finishes it"
        )
    _as_compiled(gathered)


@dataclass(frozen=True)
class _Asked:
    """A policy to measure, and the `plan` that it comes from. If `required`, a failure to measure it ends the report."""

    policy: Any
    required: bool = True
    plan: Plan | None = None


def _usual(gathered: Gathered, tell: Progress) -> list[str]:
    """The default policies that have an effect on this workload; `left_out` gets the reasons for the other policies."""
    workload, able = gathered.workload, []
    for name in USUAL:
        if NAMED[name].offloads and not backend_of(gathered.target).separate_host_memory:
            gathered.left_out[name] = "a CPU has one memory"
            continue
        tell(f"{workload.name}: tracing under {name}", 0, len(USUAL))
        try:
            step = workload.step(name)
            jax.eval_shape(step.function, *step.arguments)
        except (PolicyError, UnsupportedError) as error:
            gathered.left_out[name] = str(error)
        else:
            able.append(name)
    return able


def _measured(gathered: Gathered, asked: Sequence[_Asked], ends: float, tell: Progress) -> list[tuple[_Asked, MemoryReport]]:
    """Each policy with its memory; a policy that is not required is left out if it fails to compile."""
    workload, target = gathered.workload, gathered.target
    compiled: list[str] = []

    def on_done(name: str) -> None:
        # A plan's policy is too long for a line of progress.
        short = name if len(name) <= 60 else f"{name[:59]}…"
        compiled.append(name)
        tell(f"compiled {short} for {target.name}", min(len(compiled), len(asked)), len(asked))

    def measured(entries: Sequence[_Asked]) -> list[tuple[_Asked, MemoryReport]]:
        reports = measure_many(workload, [entry.policy for entry in entries], target, _left(ends), on_done)
        return list(zip(entries, reports, strict=True))

    tell(f"{workload.name}: tracing, then compiling for {target.name}", 0, len(asked))
    in_turn = sorted(asked, key=lambda entry: not entry.required)  # what may not be left out is compiled first
    try:
        reports = measured(in_turn)
    except CompileError as error:
        if all(entry.required for entry in asked):
            raise
        refused, reports = error, []
    for entry in in_turn if not reports else ():
        try:
            if time.monotonic() >= ends and policy_text(entry.policy) not in compiled:
                raise refused
            reports += measured([entry])  # if it was compiled before, from the cache
        except CompileError as error:
            if entry.required:
                raise
            late = isinstance(error, NotDoneError)
            gathered.left_out[str(entry.policy)] = (
                "the timeout was over before it was compiled" if late else str(error).splitlines()[0]
            )
    if not reports:
        raise refused
    return sorted(reports, key=lambda pair: asked.index(pair[0]))


def _left(ends: float) -> float:
    return max(1.0, ends - time.monotonic())


def _as_compiled(gathered: Gathered) -> None:
    """If every compiled schedule's time is known, give the policies these times, and the excess over a step that keeps all.

    A step that the compiler refused because it does not fit, or did not finish in time, has no time.
    """
    policies = gathered.policies
    without = (policy.memory for policy in policies if policy.memory.seconds is None)
    if not all(memory.refused or memory.unfinished for memory in without):
        return
    gathered.policies = [
        replace(
            policy,
            seconds=policy.memory.seconds,
            timed=policy.memory.seconds is not None,
            assumed_rates=policy.memory.assumed_rates,
        )
        for policy in policies
    ]
    base = gathered.base_seconds
    if base is None and gathered.plan is not None and gathered.plan.timed and gathered.has_comparable_times:
        base = gathered.plan.base_seconds
    gathered.policies = [
        replace(policy, extra_seconds=None if base is None or policy.seconds is None else policy.seconds - base)
        for policy in gathered.policies
    ]


def _estimated(
    described: Described | None, entry: _Asked, memory: MemoryReport
) -> tuple[float | None, float | None, int | None]:
    """(seconds of a step, their excess over saving everything, recomputed FLOPs); each is None if unknown."""
    plan, policy = entry.plan, entry.policy
    if plan is not None:
        return plan.seconds, plan.seconds - plan.base_seconds, plan.recompute_flops
    if described is None or (memory.residual_host_bytes and described.stack.link is None):
        return None, None, None
    try:
        extra = extra_seconds(described, policy)
        return described.base_seconds + extra, extra - keeping_seconds(described), recompute_flops(described, policy)
    except PlanningError:
        return None, None, None  # the effect of a JAX policy object is unknown before tracing


def _with_names(policy: Any) -> Any:
    """`policy` with `everything` in place of `off`: `everything` saves the same arrays and gives them names."""
    if isinstance(policy, Mapping):
        return {block: _with_names(of_block) for block, of_block in policy.items()}
    return "everything" if _is_off(policy) else policy


def _is_off(policy: Any) -> bool:
    return not isinstance(policy, Mapping) and is_off(as_block_policy(policy))
