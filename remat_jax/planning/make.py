"""`plan`: workload → problem → solver → compiler → refit, until a plan fits and no better plan is left."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from remat_jax import compat
from remat_jax.apply.replaced import replaced_text
from remat_jax.errors import ArgumentError, InfeasibleBudget, PolicyError, UnsupportedError
from remat_jax.hardware import Target
from remat_jax.hardware import target as target_named
from remat_jax.memory.advice import largest_advice
from remat_jax.memory.compile.devices import check_devices, host_shortage
from remat_jax.memory.compile.options import Kernels
from remat_jax.memory.measure import DEFAULT_TIMEOUT, UNTILED, check_timeout
from remat_jax.planning.as_written import as_written, counted_flops
from remat_jax.planning.below_full import grouped_candidates
from remat_jax.planning.budget import budget_bytes, host_budget_bytes
from remat_jax.planning.candidate import StepCandidate, Tried
from remat_jax.planning.compiling import Compiler, Progress, first_sentence, one_line
from remat_jax.planning.fit import Fit
from remat_jax.planning.holders import argument_bytes, check_arguments_fit, infeasible
from remat_jax.planning.last_word import Times, last_word
from remat_jax.planning.model import Model
from remat_jax.planning.outcome import outcome
from remat_jax.planning.plan import Plan
from remat_jax.planning.plan_data import CUT_SHORT, NOT_MAXIMAL
from remat_jax.planning.point import Point
from remat_jax.planning.problem import KEEP_ALL, Described, describe, recompute_flops
from remat_jax.planning.proposals import Proposals
from remat_jax.planning.search import MOST_COMPILED, MOST_RUNS, Search
from remat_jax.planning.translate import named_candidate, own_candidate, policies_of, recut
from remat_jax.policy import NAMED, LayerPolicies, is_off
from remat_jax.warning import silenced, warn
from remat_jax.workload import Workload


def plan(
    workload: Workload,
    budget: Any,
    target: str | Target,
    host_budget: Any = None,
    *,
    timeout: float = DEFAULT_TIMEOUT,
    progress: Progress | None = None,
) -> Plan:
    """The fastest policy of `workload` whose training step, compiled for `target`, fits a budget of memory.

    The planning problem consists of the residuals of each block, their bytes, and the time to recompute them. Its solution, a
    mix of a few policies, is compiled beside the fastest named policy that is predicted to fit. The compiled memory corrects
    the problem, which is solved again. The returned plan was compiled and fits. By the estimate, no named policy that fits is
    faster: named policies that might be faster are compiled, or a note names them. `docs/how/planner.md` has the exact
    guarantees and the mathematics.

    Args:
      workload: a workload with a loss. A finished step does not do, because it takes its gradient inside.
      budget: memory of one device: bytes, a text (`"40GiB"`, `"38 GB"`, `"80%"`), or a share of the target's memory (0.8).
      target: the name of a target (`"h200"`), or a `Target`.
      host_budget: host memory for one device, including the state of an offloaded optimizer: bytes or a text; None for no
        limit, 0 for no offload.
      timeout: seconds for the whole call. At the timeout, the fastest compiled step that fits is returned, with a note.
      progress: called with the current activity and the best step so far, the number of compiled steps, and the most that may
        be compiled.

    On a mesh every figure except `recompute_flops` is of one device. One additional compilation shows how the compiler
    partitions the residuals (`docs/how/planner.md`, "On a mesh").

    Raises:
      InfeasibleBudget: nothing fits. The message states the smallest memory reached and what occupies it.
      PlanningError: a budget or a rate is wrong.
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
    described_target = target if isinstance(target, Target) else target_named(target)
    device, host = budget_bytes(budget, described_target), host_budget_bytes(host_budget, described_target)
    _check(workload, timeout)
    check_devices(workload, described_target)
    check_arguments_fit(workload, device)
    with silenced(), Kernels.temporary() as kernels:
        made = _Making(workload, device, described_target, host, timeout, progress or _silent, kernels).plan()
    warn(note for note in made.notes if not note.startswith(_OF_THE_SEARCH))
    return made


# Notes about the search, and advice. Notes that begin otherwise affect the plan's step and are warnings too.
_OF_THE_SEARCH = ("Not shown", "Left out", "The policy replaces", "Beyond the blocks", "As compiled")


@silenced()
def leanest(
    workload: Workload, budget: int, target: Target, host_budget: int | None, *, timeout: float = DEFAULT_TIMEOUT
) -> tuple[int | None, InfeasibleBudget | None]:
    """The least device bytes reached with one or two compilations, and the error if they exceed the budget.

    None instead of bytes if the step's arguments alone are too large, so that nothing was compiled.
    """
    _check(workload, timeout)
    check_devices(workload, target)
    try:
        check_arguments_fit(workload, budget)
    except InfeasibleBudget as error:
        return None, error
    with Kernels.temporary() as kernels:
        return _Making(workload, budget, target, host_budget, timeout, _silent, kernels).leanest()


def _silent(what: str, done: int, of: int) -> None:
    """The `progress` that reports nothing."""


def _check(workload: Any, timeout: Any) -> None:
    if not isinstance(workload, Workload):
        raise ArgumentError(f"workload={workload!r}: expected a remat_jax.Workload")
    if not workload.has_loss:
        raise UnsupportedError(
            f"workload={workload.name!r} was made from a finished step. The step takes its gradient inside, so its residuals "
            "cannot be seen from outside. Make a Workload of the loss instead."
        )
    check_timeout(timeout)


_NEAR = 1.1
"""The largest memory, relative to the budget, of a step that is compiled again with the budget as XLA's memory limit."""
_TRACED_ERROR = 0.1
"""The relative error of the traced estimate, against compiled times, of a policy far from the compiled ones."""
_FASTER = 0.999
"""The largest compiled time of such a step, relative to the best step without a limit."""


@dataclass
class _Making:
    """The making of one plan."""

    workload: Workload
    budget: int
    target: Target
    host_budget: int | None
    timeout: float
    progress: Progress
    kernels: Kernels

    def __post_init__(self) -> None:
        self.deadline = time.monotonic() + self.timeout
        self.notes: list[str] = []
        self.progress(f"{self.workload.name}: tracing", 0, 1)
        self.described = self._described()
        named, self.remarks = self._named()
        host = math.inf if self.host_budget is None else float(self.host_budget)
        most_runs = 1 if any(kind.program.call.nested for kind in self.described.kinds) else MOST_RUNS
        self.fit = Fit(self.described.stack, float(self.budget), host, argument_bytes(self.workload))
        own, cut = (functools.partial(make, self.described) for make in (own_candidate, recut))
        self.proposals = Proposals(self.fit, named, own, cut, most_runs)
        scanned = most_runs != 1 and any(kind.scanned for kind in self.described.kinds)
        self.search = Search(self.fit, self.proposals, scanned=scanned)
        self.compiler = Compiler(
            self.workload,
            self.described,
            self.target,
            self.timeout,
            self.deadline,
            self.kernels,
            self.progress,
            self.notes,
        )

    def leanest(self) -> tuple[int, InfeasibleBudget | None]:
        fits = self.search.probe(self.compiler.compile)
        return self.fit.smallest.compiled.device_bytes, None if fits else self._infeasible()

    def _infeasible(self) -> InfeasibleBudget:
        return infeasible(self.workload, self.fit.smallest, self.budget, self.host_budget, self.target)

    def plan(self) -> Plan:
        searched, best = self._chosen()
        self.progress("reading the frontier", len(self.fit.tried), len(self.fit.tried))
        policies = policies_of(self.described, best.candidate)
        kept = min((one.seconds for one in self.proposals.named if one.name in KEEP_ALL), default=0.0)
        times = Times(self.fit, self.described.base_seconds, kept)
        self._add_as_written(best, times)
        found = outcome(self.described, self.target, self.proposals, times, searched, best, self.remarks, self._is_late)
        if self._is_late():
            self.notes.append(f"{CUT_SHORT}; after timeout={self.timeout:g} s it has only compiled steps and named policies")
        self._note(searched, best)
        beyond = largest_advice(self.workload, best.compiled.sizes, self.target.devices)
        if beyond and best.candidate.name not in KEEP_ALL:
            self.notes.append(beyond)
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
            compiler_options=best.compiled.sizes.limit_options,
            **found,
        )

    def _chosen(self) -> tuple[Tried, Tried]:
        """The search's best step by the traced estimate, and the plan by the compiled times."""
        try:
            found = self._with_named(self._or_groups(self.search.run(self.compiler.compile)))
            searched: Tried | None = self._with_full(self._with_plan_without_copies(found))
        except InfeasibleBudget:
            searched = None
        limited = self._with_limit(searched)
        first = searched or min(limited, key=lambda one: one.compiled.seconds or math.inf, default=None) or self._in_groups()
        if first is None:
            raise self._infeasible()
        best, notes = last_word(first, [*filter(self.fit.fits, self.fit.tried), *limited])
        self.notes += notes
        if any(best is one for one in limited):
            self.notes.append(
                "The step fits only with the budget as XLA's memory limit: give plan.compiler_options to the jax.jit of the "
                "step"
            )
            return best, best
        return first, best

    def _with_limit(self, best: Tried | None) -> list[Tried]:
        """Steps that are faster than the best when compiled with the budget as XLA's memory limit.

        Under a limit XLA rematerialises by itself. Steps a little over the budget are compiled so, and `off` with unrolled
        layers. XLA can hardly rematerialise in a scan, so scanned steps are compiled with a limit only if nothing fits.
        """
        unrolled = not any(kind.scanned for kind in self.described.kinds)
        if best is not None and not unrolled:
            return []
        over = [one.candidate for one in self.fit.tried if self.budget < one.compiled.device_bytes <= _NEAR * self.budget]
        named = self.proposals.named if unrolled and (best is None or best.candidate.name != "off") else ()
        off = [one for one in named if one.name == "off"]
        asked = [one for one in off if self.fit.least_expected(one) <= _NEAR * self.budget]
        asked += sorted((one for one in over if one.name != "off"), key=lambda one: one.seconds)[:1]
        faster = [one for one in asked if best is None or one.seconds < best.candidate.seconds - self.proposals.worth]
        if not faster or self.target.kind == "cpu" or self.compiler.is_over:
            return []
        answers = self.compiler.compile(faster, best, memory_limit=self.budget)
        found = [Tried(*pair, self.fit.expected(pair[0])) for pair in zip(faster, answers, strict=False)]
        able = [one for one in found if self.fit.fits(one) and one.compiled.seconds]
        if best is None:
            return able
        seconds = best.compiled.seconds or 0.0
        # The estimate does not include XLA's rematerialisation: scale it by the ratio of the compiled times.
        return [self._at_pace(one, best) for one in able if (one.compiled.seconds or math.inf) < _FASTER * seconds]

    def _at_pace(self, tried: Tried, best: Tried) -> Tried:
        base = self.described.base_seconds
        ratio = (tried.compiled.seconds or 0.0) / (best.compiled.seconds or 1.0)
        seconds = max(0.0, ratio * (base + best.candidate.seconds) - base)
        return replace(tried, candidate=replace(tried.candidate, seconds=seconds))

    def _in_groups(self) -> Tried | None:
        """The fastest grouping of the layers that fits, for when single layers' inputs are too large; None if none fits."""
        asked = self._grouped(compiled=True)
        if not asked or self.compiler.is_over:
            return None
        self.fit.learn(asked, self.compiler.compile(asked, None))
        return self.fit.best

    def _or_groups(self, best: Tried) -> Tried:
        """The best step; if it offloads, the fastest grouping of the layers instead if faster, as with a slow link."""
        least = best.candidate.seconds - self.proposals.worth
        asked = self._grouped(compiled=False) if best.candidate.host_bytes else []
        return self._one_more(best, [one for one in asked if one.seconds < least and self.fit.expected(one) <= self.budget])

    def _with_named(self, best: Tried) -> Tried:
        """The best step after compiling the smallest of the named policies that might be faster."""
        return self._one_more(best, self.proposals.unknown(best))

    def _with_plan_without_copies(self, best: Tried) -> Tried:
        """The best step after compiling the fastest plan that offloads nothing, for the last word, if any step offloads.

        Copies may wait for more than is estimated.
        """
        if not any(tried.candidate.host_bytes for tried in self.fit.tried if self.fit.fits(tried)):
            return best
        here = self.proposals.without_copies(self.fit.stack, self.budget)
        return self._one_more(best, [here] if here and self.fit.known(here) is None else [])

    def _with_full(self, best: Tried) -> Tried:
        """The best step after compiling `full`, for the last word, if its traced estimate is near the best step's."""
        if self.target.kind == "cpu" or best.candidate.name in KEEP_ALL:
            return best
        base = self.described.base_seconds
        near = (1 + _TRACED_ERROR) * (base + best.candidate.seconds) - base
        full = [one for one in self.proposals.named if one.name == "full" and self.fit.known(one) is None]
        return self._one_more(best, [one for one in full if one.seconds <= near and self.fit.expected(one) <= self.budget])

    def _one_more(self, best: Tried, asked: Sequence[StepCandidate]) -> Tried:
        """The best step after compiling the first candidate of `asked`, if time is left."""
        if asked and not self.compiler.is_over:
            self.fit.learn(asked[:1], self.compiler.compile(asked[:1], best))
        return self.fit.best or best

    def _grouped(self, *, compiled: bool) -> list[StepCandidate]:
        """Groupings of the layers, predicted from the step under `full`; empty if `compiled` and that step was not compiled."""
        full = next((one for one in self.proposals.named if one.name == "full"), None)
        if full is None or (compiled and self.fit.known(full) is None):
            return []
        return grouped_candidates(self.workload, self.described, full, self.fit.expected(full), self.budget)

    def _is_late(self) -> bool:
        return time.monotonic() > self.deadline

    def _note(self, searched: Tried, best: Tried) -> None:
        """Note what was not shown: about the search's step by the traced estimate, and about the plan's memory."""
        why = "; no compilations were left" if len(self.fit.tried) >= MOST_COMPILED else ""
        unknown = [one.name for one in self.proposals.unknown(searched)]
        if unknown:
            self.notes.append(f"Not shown: whether {' and '.join(unknown)}, faster by the estimate, would fit{why}")
        if self.search.unmoved(searched):
            self.notes.append(f"Not shown: whether the offloaded residuals would fit on the device{why}")
        if not self.proposals.is_maximal(searched):
            self.notes.append(f"{NOT_MAXIMAL}{why}")
        if (short := host_shortage(best.compiled.host_bytes, self.target)) is not None:
            self.notes.append(f"Host memory: {short}, or plan with a host_budget")
        if best.compiled.sizes.untiled:
            self.notes.append(f"{UNTILED[0].upper()}{UNTILED[1:]}")

    def _described(self) -> Described:
        """The problem; without any offload if offload cannot run."""
        found = describe(self.workload, self.target, timeout=max(1.0, self.deadline - time.monotonic()))
        stack = found.stack
        self._no_offload = ""
        if self.target.kind == "cpu" or self.host_budget == 0 or stack.link is None:
            self._no_offload = (
                "a CPU has one memory"
                if self.target.kind == "cpu"
                else "no host memory is allowed"
                if self.host_budget == 0
                else f"the target {self.target.name} has no link to host memory"
            )
            return replace(found, stack=replace(stack, link=None))
        scanned = [kind.scanned for kind in found.kinds]
        if not any(scanned) or not compat.miscompiles_scanned_offload():
            return found
        self._no_offload = f"JAX {jax.__version__} miscompiles offload inside scan"
        self.notes.append(
            f"JAX {jax.__version__} miscompiles offload inside scan for GPUs (openxla/xla#46231), so scanned layers offload "
            "nothing here; use JAX 0.11.1 or later, unroll the layers, or start with "
            "XLA_FLAGS=--xla_disable_hlo_passes=dynamic-slice-annotator"
        )
        blocks = tuple(
            block.without_offload() if inside else block for block, inside in zip(stack.blocks, scanned, strict=True)
        )
        return replace(found, stack=replace(stack, blocks=blocks, link=None if all(scanned) else stack.link))

    def _named(self) -> tuple[list[StepCandidate], list[Point]]:
        """The named policies as candidates, and the inapplicable ones as points with a remark."""
        able, remarks = [], []
        for name, meant in NAMED.items():
            if is_off(meant) and self.workload.replaced_checkpoints:
                continue  # the model as its author wrote it: `as_written` adds it
            if meant.offloads and self._no_offload:
                remarks.append(Point(name, None, 0, None, False, remark=self._no_offload))
                continue
            try:
                able.append(named_candidate(self.described, name))
            except (PolicyError, UnsupportedError) as error:
                remarks.append(Point(name, None, 0, None, False, remark=first_sentence(error)))
        return able, remarks

    def _recompute_flops(self, policies: Mapping[Any, Any]) -> int:
        """The recomputed FLOPs of all blocks; if layers are in groups, of the traced step, or at least those of `full`."""
        if not any(isinstance(policy, LayerPolicies) and policy.groups for policy in policies.values()):
            return recompute_flops(self.described, dict(policies))
        counted = None if self._is_late() else counted_flops(self.workload, dict(policies))
        return recompute_flops(self.described, "full") if counted is None else counted

    def _add_as_written(self, best: Tried, times: Times) -> None:
        """Add the author's own checkpoints to the named policies, and a note that the plan replaces them."""
        if not self.workload.replaced_checkpoints:
            return
        self.notes.append(replaced_text(self.workload.replaced_checkpoints))
        if self._is_late():
            return
        full = next((one for one in self.proposals.named if one.name == "full"), None)
        self.remarks.append(as_written(self.workload, times, full, self.compiler.compile, best))
