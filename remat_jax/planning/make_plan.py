"""`plan` describes a workload as a planning problem, searches, and turns the chosen step into a `Plan`."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax

from remat_jax import compat
from remat_jax.apply.blocks import replaced_text
from remat_jax.errors import ArgumentError, InfeasibleBudget, PolicyError, UnsupportedError
from remat_jax.hardware import Target
from remat_jax.hardware import target as target_named
from remat_jax.memory.advice import largest_advice
from remat_jax.memory.compile.devices import check_devices, host_shortage
from remat_jax.memory.compile.options import DEFAULT_TIMEOUT, GRAPHS, Kernels, check_timeout
from remat_jax.planning.candidate import Candidate, Tried
from remat_jax.planning.check_budget import argument_bytes, budget_bytes, check_arguments_fit, host_budget_bytes, infeasible
from remat_jax.planning.choose_fastest import choose_fastest
from remat_jax.planning.compile_candidates import Compiler, Progress, first_sentence, one_line
from remat_jax.planning.findings import Finding, info, warning
from remat_jax.planning.fit_memory import Fit
from remat_jax.planning.generators.as_written import as_written, counted_flops
from remat_jax.planning.known import Known
from remat_jax.planning.loop import Ended, search
from remat_jax.planning.model import Model
from remat_jax.planning.outcome import outcome
from remat_jax.planning.plan import Plan
from remat_jax.planning.plan_data import Point
from remat_jax.planning.problem import KEEP_ALL, Described, describe, keeping_seconds, recompute_flops
from remat_jax.planning.solved import Solved
from remat_jax.planning.times import Times
from remat_jax.planning.translate import named_candidate, own_candidate, policies_of, recut
from remat_jax.planning.without_triton import fitting_without_triton
from remat_jax.policy import NAMED, LayerPolicies, is_off
from remat_jax.warning import silenced, warn
from remat_jax.workload import Workload

_MOST_RUNS = 3
"""The maximum number of runs of layers of one kind. Each run of scanned layers becomes a scan of its own."""


def plan(
    workload: Workload,
    budget: Any,
    target: str | Target,
    host_budget: Any = None,
    *,
    timeout: float = DEFAULT_TIMEOUT,
    progress: Progress | None = None,
) -> Plan:
    """The fastest policy found under which a training step of `workload`, compiled for `target`, fits a memory budget.

    The planning problem consists of each block's residuals, their bytes, and the time to recompute them. Candidates are named
    policies, the solver's mixes of a few policies, the model as written, and others (`planning/generators`). Those that promise
    most are compiled. The compiled memory corrects the predicted memory, and the problem is solved again. The plan is the
    fastest compiled step that fits; on a GPU target by the times of the compiled schedules, and it fits with Triton's and with
    cuBLAS's matmuls, or a finding says by how much it does not. `docs/how/planner.md` states the exact guarantees. On a mesh,
    all figures but `recompute_flops` are per device.

    Args:
      workload: a workload with a loss, not one made by `Workload.from_step`.
      budget: memory per device: bytes, a text (`"40GiB"`, `"38 GB"`, `"80%"`), or a share of the target's memory (0.8).
      target: the name of a target (`"h200"`), or a `Target`.
      host_budget: host memory per device in bytes or as a text, including an offloaded optimizer state. None means no limit;
        0 forbids offload.
      timeout: seconds for the whole call. At the timeout, the fastest compiled step that fits is returned, and
        `Plan.cut_short` is true.
      progress: called with the current activity, the number of compiled steps, and the expected total, which may grow.

    Raises:
      InfeasibleBudget: no step fits. The message states the least memory reached and what occupies it.
      PlanningError: a budget or a rate is invalid.
      TargetError, CompileError, UnsupportedError: as in `measure`.
      BlockError: the loss does not call the blocks.

    >>> import jax, jax.numpy as jnp, flax.linen as nn
    >>> class Block(nn.Module):
    ...     @nn.compact
    ...     def __call__(self, x):
    ...         return x + nn.Dense(64)(nn.gelu(nn.Dense(256)(x)))
    >>> model = nn.Sequential([Block(), Block(), Block()])
    >>> x = jax.ShapeDtypeStruct((512, 64), jnp.float32)
    >>> params = jax.eval_shape(model.init, jax.random.key(0), x)
    >>> job = Workload(lambda p, x: (model.apply(p, x) ** 2).mean(), params, (x,), blocks=Block)
    >>> found = plan(job, "8 MB", "cpu")
    >>> found.device_bytes <= 8_000_000, found.host_bytes
    (True, 0)
    """
    target = target if isinstance(target, Target) else target_named(target)
    device, host = budget_bytes(budget, target), host_budget_bytes(host_budget)
    _check(workload, timeout, target)
    check_arguments_fit(workload, device)
    say = progress or _silent
    with silenced(), Kernels.temporary() as kernels:

        def plan_for(budget: int, timeout: float, known: list[Tried]) -> tuple[Plan, list[Tried]]:
            planner = _Planner(workload, budget, target, host, timeout, say, kernels, known)
            return planner.plan(), planner.known.fit.tried

        made = fitting_without_triton(plan_for, workload, device, target, timeout, say, kernels)
    warn(finding.text for finding in made.findings if finding.severity == "warning")
    return made


@silenced()
def leanest(
    workload: Workload, budget: int, target: Target, host_budget: int | None, *, timeout: float = DEFAULT_TIMEOUT
) -> tuple[int | None, InfeasibleBudget | None]:
    """The least device bytes that one or two compilations reach, and the error if nothing fits.

    The bytes are None if the step's arguments alone exceed the budget.
    """
    _check(workload, timeout, target)
    try:
        check_arguments_fit(workload, budget)
    except InfeasibleBudget as error:
        return None, error
    with Kernels.temporary() as kernels:
        return _Planner(workload, budget, target, host_budget, timeout, _silent, kernels).leanest()


def _silent(activity: str, done: int, of: int) -> None:
    """A `progress` function that does nothing."""


def _check(workload: Any, timeout: Any, target: Target) -> None:
    if not isinstance(workload, Workload):
        raise ArgumentError(f"workload={workload!r}: expected a remat_jax.Workload")
    workload.require_loss()
    check_timeout(timeout)
    check_devices(workload, target)


@dataclass
class _Planner:
    """Makes one plan; `tried` are steps that were compiled for another budget."""

    workload: Workload
    budget: int
    target: Target
    host_budget: int | None
    timeout: float
    progress: Progress
    kernels: Kernels
    tried: Sequence[Tried] = ()
    findings: list[Finding] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self.deadline = time.monotonic() + self.timeout
        self.progress(f"{self.workload.name}: tracing", 0, 1)
        self.described, no_offload = self._described()
        named, self.remarks = self._named(no_offload)
        self.known = self._known(named)
        self.compiler = Compiler(
            self.workload, self.described, self.target, self.timeout, self.deadline, self.kernels, self.progress, self.findings
        )

    def _known(self, named: Sequence[Candidate]) -> Known:
        described, kinds = self.described, self.described.kinds
        host_budget = math.inf if self.host_budget is None else float(self.host_budget)
        nested = any(kind.program.call.nested for kind in kinds)
        fit = Fit(described.stack, float(self.budget), host_budget, argument_bytes(self.workload))
        fit.tried += self.tried
        make = functools.partial(own_candidate, described)
        # The model as written stands for `off`, which is the same program.
        written = None
        if self.workload.replaced_checkpoints:
            everything, full = (named_candidate(described, name) for name in ("everything", "full"))
            written = as_written(self.workload, everything, full)
        return Known(
            fit,
            Times(fit, described.base_seconds, keeping_seconds(described)),
            Solved(fit, named, make, 1 if nested else _MOST_RUNS),
            tuple(named),
            (lambda candidate, cuts: candidate) if nested else functools.partial(recut, described),
            scanned=any(kind.scanned for kind in kinds),
            devices=self.target.devices,
            has_times=self.target.kind != "cpu",
            as_written=written,
            problem=self,
        )

    def _described(self) -> tuple[Described, str]:
        """The planning problem, in which offload is allowed only where it can run.

        Also returns why named policies may not offload, or "" if they may.
        """
        described = describe(self.workload, self.target, timeout=max(1.0, self.deadline - time.monotonic()))
        stack = described.stack
        if self.target.kind == "cpu":
            no_offload = "a CPU has one memory"
        elif self.host_budget == 0:
            no_offload = "no host memory is allowed"
        elif stack.link is None:
            no_offload = f"the target {self.target.name} has no link to host memory"
        else:
            return self._without_refused_offload(described)
        return replace(described, stack=replace(stack, link=None)), no_offload

    def _without_refused_offload(self, described: Described) -> tuple[Described, str]:
        """`described` without offload in scans that XLA cannot compile or miscompiles; a reason if nothing can be offloaded."""
        stack, no_offload, remedy = described.stack, "XLA cannot compile offload in a scan inside another scan", ""
        refused = [kind.program.call.nested for kind in described.kinds]
        if compat.miscompiles_scanned_offload():
            refused = [kind.scanned for kind in described.kinds]
            no_offload = f"JAX {jax.__version__} miscompiles offload inside scan"
            remedy = f" (openxla/xla#46231), so scanned layers offload nothing here; use {compat.SCANNED_OFFLOAD_REMEDY}"
        if not any(refused):
            return described, ""
        self.findings.append(warning("no_offload", f"{no_offload} for GPUs{remedy or ' (maxtext#4990)'}"))
        blocks = tuple(block.without_offload() if no else block for block, no in zip(stack.blocks, refused, strict=True))
        link = None if all(refused) else stack.link
        return replace(described, stack=replace(stack, blocks=blocks, link=link)), no_offload

    def _named(self, no_offload: str) -> tuple[list[Candidate], list[Point]]:
        """The applicable named policies as candidates, and the inapplicable named policies as points with a remark."""
        candidates, remarks = [], dict[str, str]()
        for name, policy in NAMED.items():
            if is_off(policy) and self.workload.replaced_checkpoints:
                continue  # here `off` is the model as written
            if policy.offloads and no_offload:
                remarks[name] = no_offload
                continue
            try:
                candidates.append(named_candidate(self.described, name))
            except (PolicyError, UnsupportedError) as error:
                remarks[name] = first_sentence(error)
        return candidates, [Point(name, None, 0, None, False, remark=remark) for name, remark in remarks.items()]

    def leanest(self) -> tuple[int, InfeasibleBudget | None]:
        """Compile `full`, and the plan of least predicted memory if `full` does not fit."""
        fit = self.known.fit
        for candidate in (self.known.named_policy("full"), self.known.solved.least(fit.stack)):
            if candidate is not None and not fit.fitting and fit.known(candidate) is None:
                fit.learn([candidate], self.compiler.compile([candidate], None))
        return fit.smallest.compiled.device_bytes, None if fit.fitting else self._infeasible()

    def _infeasible(self) -> InfeasibleBudget:
        return infeasible(self.workload, self.known.fit.smallest, self.budget, self.host_budget, self.target)

    def plan(self) -> Plan:
        ended = search(self.known, self.compiler.compile)
        if not self.known.fit.compiled:
            self.leanest()
        if self.known.best is None:
            raise self._infeasible()
        best, preferred = choose_fastest(self.known)
        self.findings += preferred
        self._add_as_written(best)
        self.progress("reading the frontier", len(self.known.fit.tried), len(self.known.fit.tried))
        policies = policies_of(self.described, best.candidate)
        fields = outcome(self.described, self.target, self.known, best, self.remarks, self._is_late)
        self._find(ended, best, fields)
        return Plan(
            policies=policies,
            recompute_flops=self._recompute_flops(best.candidate, policies),
            workload=one_line(self.workload.name),
            target=self.target.name,
            budget=self.budget,
            host_budget=self.host_budget,
            findings=tuple(dict.fromkeys(self.findings)),
            model=Model.of(self.workload),
            jax_version=jax.__version__,
            compiler_options=best.compiled.sizes.compiler_options,
            cut_short=ended.by == "time" or self._is_late(),
            left_out=tuple(candidate.title for candidate in ended.left),
            **fields,
        )

    def _is_late(self) -> bool:
        return time.monotonic() > self.deadline

    def _add_as_written(self, best: Tried) -> None:
        """If policies replace the model's checkpoints, compile the model as written too, for comparison."""
        written, fit = self.known.as_written, self.known.fit
        if written is not None and fit.known(written) is None and (answers := self.compiler.compile([written], best)):
            fit.learn([written], answers)

    def _find(self, ended: Ended, best: Tried, fields: Mapping[str, Any]) -> None:
        """Add findings: what was not shown of the plan's step, and what is to be known of its memory."""
        sizes, candidate = best.compiled.sizes, best.candidate
        why = {"compilations": "; no compilations were left", "time": f"; timeout={self.timeout:g} s was over"}.get(
            ended.by, ""
        )
        if ended.by == "time" or self._is_late():
            text = f"The search ended after timeout={self.timeout:g} s; a longer timeout may find a faster plan"
            self.findings.append(info("cut_short", text))
        if unknown := list(dict.fromkeys(step.name for step in ended.left if step.family == "named")):
            self.findings.append(info("not_shown", f"Not shown: whether {' and '.join(unknown)} would fit and be faster{why}"))
        if candidate.host_bytes and fields["offload_needed"] is None and candidate.choices is not None:
            self.findings.append(info("not_shown", f"Not shown: whether the offloaded residuals would fit on the device{why}"))
        if not fields["is_maximal"]:
            self.findings.append(info("not_shown", f"Not shown: that no further residual can be saved in a run of layers{why}"))
        if self.workload.replaced_checkpoints and candidate.checkpoints:
            self.findings.append(info("replaced", replaced_text(self.workload.replaced_checkpoints)))
        if candidate.memory_limit is not None:
            text = "The step fits only with the budget as XLA's memory limit: give plan.compiler_options to its jax.jit"
            self.findings.append(warning("options", text))
        if GRAPHS in sizes.compiler_options:
            text = "The copies in loops overlap compute only with plan.compiler_options: give them to the jax.jit of the step"
            self.findings.append(warning("options", text))
        if (short := host_shortage(best.compiled.host_bytes, self.target)) is not None:
            self.findings.append(warning("host", f"Host memory: {short}, or plan with a host_budget"))
        if sizes.warning is not None:
            self.findings.append(warning("miscompiled", f"{sizes.warning[0].upper()}{sizes.warning[1:]}"))
        if candidate.name not in KEEP_ALL and (beyond := largest_advice(self.workload, sizes, self.target.devices)):
            self.findings.append(info("beyond", beyond))

    def _recompute_flops(self, candidate: Candidate, policies: Mapping[Any, Any]) -> int:
        """The FLOPs that the blocks recompute. With groups of layers, the FLOPs that the traced step recomputes.

        If these cannot be counted, or if time is up, the FLOPs under `full`.
        """
        if candidate.checkpoints and not any(
            isinstance(policy, LayerPolicies) and policy.groups for policy in policies.values()
        ):
            return recompute_flops(self.described, dict(policies))
        if candidate.checkpoints or self.workload.replaced_checkpoints:
            counted = (
                None if self._is_late() else counted_flops(self.workload, dict(policies) if candidate.checkpoints else "off")
            )
            return recompute_flops(self.described, "full") if counted is None else counted
        return 0
