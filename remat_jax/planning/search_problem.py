"""What a search starts from: the planning problem, the named policies that apply, and what they cannot do."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from remat_jax.errors import NoEffectError, PolicyError, UnsupportedError
from remat_jax.hardware import Target
from remat_jax.memory.compile.backends import backend_of
from remat_jax.memory.compile.options import DEFAULT_TIMEOUT
from remat_jax.planning.candidate import StepCandidate
from remat_jax.planning.check_budget import argument_bytes
from remat_jax.planning.compile_candidates import first_sentence
from remat_jax.planning.findings import PlanFinding, warning
from remat_jax.planning.fit_memory import Fit
from remat_jax.planning.generators.as_written import as_written
from remat_jax.planning.known import Known
from remat_jax.planning.plan_data import Point
from remat_jax.planning.problem import Described, describe, describe_outside
from remat_jax.planning.solved import Solved
from remat_jax.planning.times import Times
from remat_jax.planning.translate import named_candidate, own_candidate, recut
from remat_jax.policy import NAMED, is_off
from remat_jax.workload import Workload

_MOST_RUNS = 3
"""The maximum number of runs of layers of one kind. Each run of scanned layers becomes a scan of its own."""


@dataclass(frozen=True)
class Problem:
    """What a search starts from.

    Attributes:
      described: the planning problem, in which offload is allowed only where it can run.
      known: what is known before anything is compiled.
      remarks: points for the named policies that are not applicable, each with the reason.
      findings: what a reader of the plan should know of this.
    """

    workload: Workload
    described: Described
    known: Known
    remarks: tuple[Point, ...]
    findings: list[PlanFinding]


def problem(
    workload: Workload,
    budget: int,
    target: Target,
    host_budget: int | None,
    *,
    timeout: float = DEFAULT_TIMEOUT,
    like: Problem | None = None,
) -> Problem:
    """The search problem of a workload.

    Args:
      timeout: for the step that is compiled if the workload has a mesh.
      like: the problem of a workload with the same blocks; then only what is outside the blocks is traced.

    Raises:
      TargetError, UnsupportedError, BlockError: as in `describe`.
    """
    findings = list[PlanFinding]()
    described = describe(workload, target, timeout=timeout) if like is None else describe_outside(like.described, workload)
    if no_offload := _no_link(described, target, host_budget):
        described = replace(described, stack=replace(described.stack, link=None))
    else:
        described, no_offload = _without_refused_offload(described, target, findings)
    named, remarks = _named(workload, described, no_offload)
    known = _known(workload, described, named, budget, target, host_budget)
    return Problem(workload, described, known, remarks, findings)


def _no_link(described: Described, target: Target, host_budget: int | None) -> str:
    """Why nothing may be offloaded, or "" if something may."""
    if not backend_of(target).separate_host_memory:
        return "a CPU has one memory"
    if host_budget == 0:
        return "no host memory is allowed"
    return "" if described.stack.link is not None else f"the target {target.name} has no link to host memory"


def _without_refused_offload(described: Described, target: Target, findings: list[PlanFinding]) -> tuple[Described, str]:
    """`described` without the offload that the compiler refuses or miscompiles; why named policies may not offload."""
    stack, backend = described.stack, backend_of(target)
    refused = [
        backend.refused_offload(scanned=kind.scanned, nested=kind.program.call.nested, devices=target.devices)
        for kind in described.kinds
    ]
    refusal = next(filter(None, refused), None)
    if refusal is None:
        return described, ""
    findings.append(warning("no_offload", refusal.sentence))
    blocks = tuple(block.without_offload() if no else block for block, no in zip(stack.blocks, refused, strict=True))
    link = None if all(refused) else stack.link
    return replace(described, stack=replace(stack, blocks=blocks, link=link)), refusal.reason


def _named(workload: Workload, described: Described, no_offload: str) -> tuple[list[StepCandidate], tuple[Point, ...]]:
    """The applicable named policies as candidates, and the inapplicable named policies as points with a remark."""
    candidates, remarks = [], dict[str, str]()
    for name, policy in NAMED.items():
        if is_off(policy) and workload.replaced_checkpoints:
            continue  # here `off` is the model as written
        if policy.offloads and no_offload:
            remarks[name] = no_offload
            continue
        try:
            candidates.append(named_candidate(described, name))
        except NoEffectError:
            remarks[name] = "no effect on these blocks"
        except (PolicyError, UnsupportedError) as error:
            remarks[name] = first_sentence(error)
    return candidates, tuple(Point(name, None, 0, None, False, remark=remark) for name, remark in remarks.items())


def _known(
    workload: Workload,
    described: Described,
    named: Sequence[StepCandidate],
    budget: int,
    target: Target,
    host_budget: int | None,
) -> Known:
    kinds = described.kinds
    nested = any(kind.program.call.nested for kind in kinds)
    host_bytes = math.inf if host_budget is None else float(host_budget)
    fit = Fit(described.stack, float(budget), host_bytes, argument_bytes(workload))
    cut = (lambda candidate, cuts: candidate) if nested else functools.partial(recut, described)
    written = None
    if workload.replaced_checkpoints:
        everything, full = (named_candidate(described, name) for name in ("everything", "full"))
        written = as_written(workload, everything, full)
    return Known(
        fit,
        Times(fit, described.base_seconds),
        Solved(fit, named, functools.partial(own_candidate, described), 1 if nested else _MOST_RUNS, cut),
        tuple(named),
        cut,
        scanned=any(kind.scanned for kind in kinds),
        devices=target.devices,
        has_times=backend_of(target).models_time,
        as_written=written,
        kinds=kinds,
    )
