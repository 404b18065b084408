"""`plan` repeats solving, compiling and refitting the memory model, then chooses the fastest compiled step that fits."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
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
from remat_jax.planning.candidate import StepCandidate, Tried
from remat_jax.planning.check_budget import argument_bytes, budget_bytes, check_arguments_fit, host_budget_bytes, infeasible
from remat_jax.planning.choose_fastest import Times, as_written, choose_fastest, counted_flops
from remat_jax.planning.compile_candidates import Compiler, Progress, first_sentence, one_line
from remat_jax.planning.fit_memory import Fit
from remat_jax.planning.model import Model
from remat_jax.planning.outcome import outcome
from remat_jax.planning.plan import Plan
from remat_jax.planning.plan_data import CUT_SHORT, NOT_MAXIMAL, Point
from remat_jax.planning.problem import KEEP_ALL, Described, describe, recompute_flops
from remat_jax.planning.propose_candidates import Proposals, grouped_candidates
from remat_jax.planning.search_plans import MOST_COMPILED, MOST_RUNS, Search
from remat_jax.planning.translate import named_candidate, own_candidate, policies_of, recut
from remat_jax.planning.without_triton import PLANNED_FOR_LESS, fitting_without_triton
from remat_jax.policy import NAMED, LayerPolicies, is_off
from remat_jax.warning import silenced, warn
from remat_jax.workload import Workload

_NEAR = 1.1
"""A step that needs at most this multiple of the budget may be compiled again with the budget as XLA's memory limit."""
_FASTER = 0.999
"""A step compiled with a memory limit is used only if its compiled time is below this multiple of the best step's."""
_TRACED_ERROR = 0.1
"""The assumed relative error of the traced time estimate of an uncompiled policy. A named policy that seems slower than the
best step by up to this share of the step's time may still be compiled."""

# Notes with these beginnings describe the search or give advice. All other notes affect the plan's step and are also warnings.
_OF_THE_SEARCH = ("Not shown", "Left out", "The policy replaces", "Beyond the blocks", "As compiled", PLANNED_FOR_LESS)


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

    The planning problem consists of each block's residuals, their bytes, and the time to recompute them. The solver's mix of a
    few policies is compiled, and so is the fastest named policy predicted to fit. The compiled memory corrects the predicted
    memory, and the problem is solved again. If a named policy may fit, and its traced time estimate is below that of the
    search's best step, it is compiled, or a note names it. On a GPU target, the plan is chosen from the compiled steps by the
    times of their schedules, and fits with Triton's and with cuBLAS's matmuls, or a note says by how much it does not.
    `docs/how/planner.md` states the exact guarantees. On a mesh, all figures but `recompute_flops` are per device.

    Args:
      workload: a workload with a loss, not one made by `Workload.from_step`.
      budget: memory per device: bytes, a text (`"40GiB"`, `"38 GB"`, `"80%"`), or a share of the target's memory (0.8).
      target: the name of a target (`"h200"`), or a `Target`.
      host_budget: host memory per device in bytes or as a text, including an offloaded optimizer state. None means no limit;
        0 forbids offload.
      timeout: seconds for the whole call. At the timeout, the fastest compiled step that fits is returned, with a note.
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
            return planner.plan(), planner.fit.tried

        made = fitting_without_triton(plan_for, workload, device, target, timeout, say, kernels)
    warn(note for note in made.notes if not note.startswith(_OF_THE_SEARCH))
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
    """Makes one plan; `known` are steps that were compiled for another budget."""

    workload: Workload
    budget: int
    target: Target
    host_budget: int | None
    timeout: float
    progress: Progress
    kernels: Kernels
    known: Sequence[Tried] = ()

    def __post_init__(self) -> None:
        self.deadline = time.monotonic() + self.timeout
        self.notes: list[str] = []
        self.search_compiled = 0  # the number of steps that the search compiled, before further steps
        self.progress(f"{self.workload.name}: tracing", 0, 1)
        self.described, no_offload = self._described()
        named, self.remarks = self._named(no_offload)
        kinds = self.described.kinds
        host_budget = math.inf if self.host_budget is None else float(self.host_budget)
        most_runs = 1 if any(kind.program.call.nested for kind in kinds) else MOST_RUNS
        self.fit = Fit(self.described.stack, float(self.budget), host_budget, argument_bytes(self.workload))
        self.fit.tried += self.known
        make_candidate, cut = (functools.partial(make, self.described) for make in (own_candidate, recut))
        self.proposals = Proposals(self.fit, named, make_candidate, cut, most_runs)
        self.search = Search(self.fit, self.proposals, scanned=most_runs != 1 and any(kind.scanned for kind in kinds))
        self.compiler = Compiler(
            self.workload, self.described, self.target, self.timeout, self.deadline, self.kernels, self.progress, self.notes
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
        self.notes.append(f"{no_offload} for GPUs{remedy or ' (maxtext#4990)'}")
        blocks = tuple(block.without_offload() if no else block for block, no in zip(stack.blocks, refused, strict=True))
        link = None if all(refused) else stack.link
        return replace(described, stack=replace(stack, blocks=blocks, link=link)), no_offload

    def _named(self, no_offload: str) -> tuple[list[StepCandidate], list[Point]]:
        """The applicable named policies as candidates, and the inapplicable named policies as points with a remark."""
        candidates, remarks = [], dict[str, str]()
        for name, policy in NAMED.items():
            if is_off(policy) and self.workload.replaced_checkpoints:
                continue  # here `off` is the model as written: `_add_as_written` adds it
            if policy.offloads and no_offload:
                remarks[name] = no_offload
                continue
            try:
                candidates.append(named_candidate(self.described, name))
            except (PolicyError, UnsupportedError) as error:
                remarks[name] = first_sentence(error)
        return candidates, [Point(name, None, 0, None, False, remark=remark) for name, remark in remarks.items()]

    # --- the steps ------------------------------------------------------------------------------------------------------

    def leanest(self) -> tuple[int, InfeasibleBudget | None]:
        fits = self.search.probe(self.compiler.compile)
        return self.fit.smallest.compiled.device_bytes, None if fits else self._infeasible()

    def _infeasible(self) -> InfeasibleBudget:
        return infeasible(self.workload, self.fit.smallest, self.budget, self.host_budget, self.target)

    def _chosen(self) -> tuple[Tried, Tried]:
        """The search's best step, by the traced estimate, and the step of the plan, chosen by compiled times."""
        searched = self.search.run(self.compiler.compile)
        self.search_compiled = len(self.fit.tried) - len(self.known)
        if searched is not None:
            for further in (self._faster_groups, self.proposals.unknown, self._without_copies):
                searched = self._with(further(searched)[:1], searched) or searched
            searched = self._with_near_named(searched)
        limited = self._with_limit(searched)
        first = searched or min(limited, key=lambda step: step.compiled.seconds or math.inf, default=None)
        # If nothing fits, try groups of layers, which save fewer layer inputs. The step under `full` predicts their memory.
        first = first or self._with(self._grouped(compiled=True), None)
        if first is None:
            raise self._infeasible()
        best, notes = choose_fastest(first, [*filter(self.fit.fits, self.fit.tried), *limited])
        self.notes += notes
        if any(best is step for step in limited):
            self.notes.append(
                "The step fits only with the budget as XLA's memory limit: give plan.compiler_options to the jax.jit of the "
                "step"
            )
            return best, best
        return first, best

    def _with(self, candidates: Sequence[StepCandidate], best: Tried | None) -> Tried | None:
        """Compile `candidates` if time is left; returns the best step so far."""
        if candidates and not self.compiler.is_over:
            self.fit.learn(candidates, self.compiler.compile(candidates, best))
        return self.fit.best

    def _faster_groups(self, best: Tried) -> list[StepCandidate]:
        """Groups of layers expected to fit and to be faster than the best step; empty if the best step does not offload."""
        least = best.candidate.seconds - self.proposals.worth
        groups = self._grouped(compiled=False) if best.candidate.host_bytes else []
        return [step for step in groups if step.seconds < least and self.fit.expected(step) <= self.budget]

    def _without_copies(self, best: Tried) -> list[StepCandidate]:
        """The fastest plan without offload; empty if no step that fits offloads. Copies may take longer than estimated."""
        offloads = any(tried.candidate.host_bytes for tried in self.fit.tried if self.fit.fits(tried))
        plan = self.proposals.without_copies(self.fit.stack, self.budget) if offloads else None
        return [plan] if plan is not None and self.fit.known(plan) is None else []

    def _with_near_named(self, best: Tried) -> Tried:
        """The best step after compiling the named policies of `_near_named`, while time is left for another compilation."""
        while (near := self._near_named(best)) and self.compiler.is_time_left:
            best = self._with(near, best) or best
        if near:
            names = " and ".join(step.name for step in near)
            self.notes.append(f"Not shown: whether {names}, nearly as fast by the estimate, would be faster as compiled")
        return best

    def _near_named(self, best: Tried) -> list[StepCandidate]:
        """Named policies that may be faster than the best step by compiled time, although slower by the traced estimate.

        The traced estimate does not know which collectives overlap compute. So on several devices `full` is compiled whenever
        it is expected to fit.
        """
        if self.target.kind == "cpu" or best.candidate.name in KEEP_ALL:
            return []
        slack = _TRACED_ERROR * (self.described.base_seconds + best.candidate.seconds)
        return self.proposals.near_named(best, slack, always=("full",) if self.target.devices > 1 else ())

    def _grouped(self, *, compiled: bool) -> list[StepCandidate]:
        """Groups of layers, predicted from the step under `full`. If `compiled`, empty unless that step was compiled."""
        full = self.proposals.named_policy("full")
        if full is None or (compiled and self.fit.known(full) is None):
            return []
        return grouped_candidates(self.workload, self.described, full, self.fit.expected(full), self.budget)

    def _with_limit(self, best: Tried | None) -> list[Tried]:
        """Steps compiled with the budget as XLA's memory limit, under which XLA rematerialises by itself.

        Only steps that fit and are faster than the best step are returned. Candidates are `off` and the fastest compiled step
        slightly over the budget. XLA hardly rematerialises inside a scan, so scanned layers are compiled with a limit only if
        nothing else fits.
        """
        unrolled = not any(kind.scanned for kind in self.described.kinds)
        if (best is not None and not unrolled) or self.target.kind == "cpu":
            return []
        off = self.proposals.named_policy("off") if unrolled else None
        candidates = [off] if off is not None and self.fit.least_expected(off) <= _NEAR * self.budget else []
        over = [step.candidate for step in self.fit.tried if self.budget < step.compiled.device_bytes <= _NEAR * self.budget]
        candidates += sorted((step for step in over if step.name != "off"), key=lambda step: step.seconds)[:1]
        bound = math.inf if best is None else best.candidate.seconds - self.proposals.worth
        faster = [step for step in candidates if step.seconds < bound]
        if not faster or self.compiler.is_over:
            return []
        answers = self.compiler.compile(faster, best, memory_limit=self.budget)
        limited = [step for step in map(Tried, faster, answers, map(self.fit.expected, faster)) if self.fit.fits(step)]
        if best is None:
            return [step for step in limited if step.compiled.seconds]
        # The traced estimate does not include XLA's rematerialisation: scale it by the ratio of the compiled times.
        most = _FASTER * (best.compiled.seconds or 0.0)
        return [self._at_pace(step, best) for step in limited if step.compiled.seconds and step.compiled.seconds < most]

    def _at_pace(self, tried: Tried, best: Tried) -> Tried:
        base = self.described.base_seconds
        ratio = (tried.compiled.seconds or 0.0) / (best.compiled.seconds or 1.0)
        seconds = max(0.0, ratio * (base + best.candidate.seconds) - base)
        return replace(tried, candidate=replace(tried.candidate, seconds=seconds))

    # --- the plan -------------------------------------------------------------------------------------------------------

    def plan(self) -> Plan:
        searched, best = self._chosen()
        self.progress("reading the frontier", len(self.fit.tried), len(self.fit.tried))
        policies = policies_of(self.described, best.candidate)
        kept = min((step.seconds for step in self.proposals.named if step.name in KEEP_ALL), default=0.0)
        times = Times(self.fit, self.described.base_seconds, kept)
        self._add_as_written(best, times)
        fields = outcome(self.described, self.target, self.proposals, times, searched, best, self.remarks, self._is_late)
        self._note(searched, best)
        return Plan(
            policies=policies,
            recompute_flops=self._recompute_flops(policies),
            workload=one_line(self.workload.name),
            target=self.target.name,
            budget=self.budget,
            host_budget=self.host_budget,
            notes=tuple(dict.fromkeys(self.notes)),
            model=Model.of(self.workload),
            jax_version=jax.__version__,
            compiler_options=best.compiled.sizes.compiler_options,
            **fields,
        )

    def _is_late(self) -> bool:
        return time.monotonic() > self.deadline

    def _note(self, searched: Tried, best: Tried) -> None:
        """Add notes: what compiling did not show about the search's best step, and remarks on the plan's memory."""
        why = "; no compilations were left" if self.search_compiled >= MOST_COMPILED else ""
        sizes = best.compiled.sizes
        if self._is_late():
            self.notes.append(f"{CUT_SHORT}; after timeout={self.timeout:g} s it has only compiled steps and named policies")
        if unknown := [step.name for step in self.proposals.unknown(searched)]:
            self.notes.append(f"Not shown: whether {' and '.join(unknown)}, faster by the estimate, would fit{why}")
        if self.search.unmoved(searched):
            self.notes.append(f"Not shown: whether the offloaded residuals would fit on the device{why}")
        if not self.proposals.is_maximal(searched):
            self.notes.append(f"{NOT_MAXIMAL}{why}")
        if GRAPHS in best.compiled.sizes.compiler_options:
            self.notes.append(
                "The copies in loops overlap compute only with plan.compiler_options: give them to the jax.jit of the step"
            )
        if (short := host_shortage(best.compiled.host_bytes, self.target)) is not None:
            self.notes.append(f"Host memory: {short}, or plan with a host_budget")
        if sizes.warning is not None:
            self.notes.append(f"{sizes.warning[0].upper()}{sizes.warning[1:]}")
        if best.candidate.name not in KEEP_ALL and (beyond := largest_advice(self.workload, sizes, self.target.devices)):
            self.notes.append(beyond)

    def _recompute_flops(self, policies: Mapping[Any, Any]) -> int:
        """The FLOPs that the blocks recompute. With groups of layers, the FLOPs that the traced step recomputes.

        If these cannot be counted, or if time is up, the FLOPs under `full`.
        """
        if not any(isinstance(policy, LayerPolicies) and policy.groups for policy in policies.values()):
            return recompute_flops(self.described, dict(policies))
        counted = None if self._is_late() else counted_flops(self.workload, dict(policies))
        return recompute_flops(self.described, "full") if counted is None else counted

    def _add_as_written(self, best: Tried, times: Times) -> None:
        """If the plan replaces the model's checkpoints, add a note and, if time is left, a point for the model as written."""
        if not self.workload.replaced_checkpoints:
            return
        self.notes.append(replaced_text(self.workload.replaced_checkpoints))
        if not self._is_late():
            full = self.proposals.named_policy("full")
            self.remarks.append(as_written(self.workload, times, full, self.compiler.compile, best))
