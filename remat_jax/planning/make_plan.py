"""`plan` describes a workload as a planning problem, searches, and turns the chosen step into a `Plan`."""

from __future__ import annotations

import contextlib
import functools
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax

from remat_jax.apply.blocks import replaced_text
from remat_jax.errors import ArgumentError, CompileError, InfeasibleBudget
from remat_jax.hardware import Target
from remat_jax.hardware import target as target_named
from remat_jax.memory.advice import SHOWN, Advice, advise, largest, traced_products
from remat_jax.memory.compile.devices import check_devices, host_shortage
from remat_jax.memory.compile.options import DEFAULT_TIMEOUT, Kernels, check_timeout
from remat_jax.memory.compile.process import NotDoneError
from remat_jax.planning.beyond import Predicted, estimated, with_changes
from remat_jax.planning.candidate import StepCandidate, Tried
from remat_jax.planning.changes import CHANGES, checked
from remat_jax.planning.check_budget import budget_bytes, check_arguments_fit, host_budget_bytes, infeasible
from remat_jax.planning.choose_fastest import choose_fastest
from remat_jax.planning.compile_candidates import Compiler, Progress, one_line
from remat_jax.planning.findings import CUT, FITS_WITH_CUBLAS, info, listed, not_shown, option_findings, warning
from remat_jax.planning.fit_memory import predicted, with_shares
from remat_jax.planning.generators.as_written import counted_flops
from remat_jax.planning.loop import Ended, search, settle
from remat_jax.planning.model import Model
from remat_jax.planning.outcome import outcome
from remat_jax.planning.plan import Plan
from remat_jax.planning.plan_data import Beyond
from remat_jax.planning.problem import KEEP_ALL, recompute_flops
from remat_jax.planning.search_problem import Problem, problem
from remat_jax.planning.steps import takes_steps
from remat_jax.planning.translate import policies_of
from remat_jax.planning.without_triton import is_unchecked, kernel_findings, more_without_triton
from remat_jax.policy import LayerPolicies
from remat_jax.report.progress import shown, silent
from remat_jax.report.tables import format_bytes, format_estimate
from remat_jax.warning import silenced, warn
from remat_jax.workload import Workload


@takes_steps
def plan(
    workload: Workload,
    budget: str | float,
    target: str | Target,
    host_budget: str | float | None = None,
    *,
    allow: str | Iterable[str] = (),
    timeout: float = DEFAULT_TIMEOUT,
    progress: Progress | None = None,
) -> Plan:
    """The fastest policy found under which a training step of `workload`, compiled for `target`, fits a memory budget.

    The planning problem consists of each block's residuals, their bytes, and the time to recompute them. Candidates are named
    policies, the solver's mixes of a few policies, the model as written, and others (`planning/generators`). Those that promise
    most are compiled. The compiled memory corrects the predicted memory, and the problem is solved again. The plan is the
    fastest compiled step that fits; on a GPU or TPU target by the times of the compiled schedules. On a GPU it fits with
    Triton's and with cuBLAS's matmuls, or a finding says by how much it does not. `docs/how/planner.md` states the exact
    guarantees. On a mesh, all figures but `recompute_flops` are per device.

    Args:
      workload: a workload of a loss, or of a finished step (`Workload.from_step`) that takes one gradient through its blocks.
        Or the step itself and the tuple of its arguments: `plan(train_step, (state, batch), budget="40GiB", target="h200")`.
      budget: memory per device: bytes, a text (`"40GiB"`, `"38 GB"`, `"80%"`), or a share of the target's memory (0.8).
      target: the name of a target (`"h200"`), or a `Target`.
      host_budget: host memory per device in bytes or as a text, including an offloaded optimizer state. None means no limit;
        0 forbids offload.
      allow: changes beyond the blocks that the plan may make, which leave what the step computes: `"head_in_chunks"`,
        `"micro_batches"`, `"optimizer_on_host"`. Each is kept if it makes the plan faster, or possible. `Plan.beyond` says what
        each gives; for changes that are not allowed it is an estimate. Micro-batches are refused unless the traced loss shows
        that it is a sum or a mean over examples; `"micro_batches=mean"` or `"micro_batches=sum"` declares that it is one.
      timeout: seconds for the whole call. At the timeout, the fastest compiled step that fits is returned, and
        `Plan.cut_short` is true.
      progress: called with the current activity, the number of compiled steps, and the expected total, which may grow. None
        shows a bar if standard error is a terminal.

    Ctrl-C ends the call with a KeyboardInterrupt. Once a step fits, the error's attribute `plan` is the best `Plan` so far.

    Raises:
      InfeasibleBudget: no step fits. The message states the least memory reached and what occupies it.
      PlanningError: a budget or a rate is invalid.
      TargetError, CompileError, UnsupportedError: as in `measure`. CompileError also if the timeout ends before a step fits; it
        states the least memory so far.
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
    begin, planners = time.monotonic(), list[_Planner]()
    target = target if isinstance(target, Target) else target_named(target)
    budget, host = budget_bytes(budget, target), host_budget_bytes(host_budget)
    allowed = checked(allow)
    _check(workload, timeout, target)
    if allowed:
        workload.require_loss(f"allow={allow!r}")
    ends = begin + timeout
    with shown(progress) as say, silenced(), Kernels.temporary() as kernels, _with_best_so_far(workload, planners):

        def plan_of(workload: Workload, share: float) -> Plan:
            check_arguments_fit(workload, budget)
            planners.append(_Planner(workload, budget, target, host, share * (ends - time.monotonic()), say, kernels))
            return planners[-1].plan()

        if allowed:
            made = with_changes(plan_of, workload, allowed)
        else:
            made = plan_of(workload, 1.0)
            made = replace(made, beyond=planners[-1].beyond(made))
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
        return _Planner(workload, budget, target, host_budget, timeout, silent, kernels).leanest()


@contextlib.contextmanager
def _with_best_so_far(workload: Workload, planners: Sequence[_Planner]) -> Iterator[None]:
    """Give a KeyboardInterrupt the best plan so far as its `plan`, and say so in a note."""
    try:
        yield
    except KeyboardInterrupt as error:
        # A planner of a changed workload does not know the changes.
        begun = [each for each in reversed(planners) if each.workload is workload and each.known.in_hand is not None]
        if begun:
            best = begun[0].so_far()
            error.plan = best  # type: ignore[attr-defined]
            named = " and ".join(dict.fromkeys(best.texts.values()))
            error.add_note(
                f"Best plan so far: {named}, {format_estimate(best.seconds, bool(best.assumed_rates))} per step, "
                f"{format_bytes(best.device_bytes)} on the device. To save it: except KeyboardInterrupt as error: "
                'error.plan.save("plan.json"); in an interactive session: sys.last_value.plan.save("plan.json")'
            )
        raise


def _check(workload: object, timeout: float, target: Target) -> None:
    if not isinstance(workload, Workload):
        raise ArgumentError(f"workload={workload!r}: expected a remat_jax.Workload")
    check_timeout(timeout)
    check_devices(workload, target)


@dataclass
class _Planner:
    """Makes one plan."""

    workload: Workload
    budget: int
    target: Target
    host_budget: int | None
    timeout: float
    progress: Progress
    kernels: Kernels
    advice: tuple[Advice, ...] = field(default=(), init=False)

    def __post_init__(self) -> None:
        begin = time.monotonic()
        self.deadline = begin + self.timeout
        self.progress(f"{self.workload.name}: tracing", 0, 1)
        self.problem = self._problem(self.workload)
        self.described, self.known, self.findings = self.problem.described, self.problem.known, self.problem.findings
        self.described_seconds = time.monotonic() - begin
        self.compiler = Compiler(
            self.workload,
            self.described,
            self.target,
            self.timeout,
            self.deadline,
            self.kernels,
            self.progress,
            self.findings,
            lambda candidate, best: self.known.gain(candidate, best) / self.known.seconds(best),
        )

    def _problem(self, workload: Workload, like: Problem | None = None) -> Problem:
        left = max(1.0, self._left())
        return problem(workload, self.budget, self.target, self.host_budget, timeout=left, like=like)

    def leanest(self) -> tuple[int, InfeasibleBudget | None]:
        """The bytes of the smallest step; the error if nothing fits."""
        self.compiler.memory_only = True
        self._compile_least()
        fit = self.known.fit
        return fit.smallest.compiled.device_bytes, None if fit.fitting else self._infeasible()

    def _compile_least(self) -> None:
        """Compile `full`, and the plan of least predicted memory if `full` does not fit."""
        fit = self.known.fit
        for candidate in (self.known.named_policy("full"), self.known.solved.least(fit.stack)):
            if candidate is not None and not fit.fitting and fit.known(candidate) is None:
                fit.learn([candidate], self.compiler.compile_now([candidate], None))

    def _infeasible(self) -> InfeasibleBudget:
        return infeasible(self.workload, self.known.fit.smallest, self.budget, self.host_budget, self.target)

    def _too_late(self) -> NotDoneError:
        begin = f"timeout={self._timeout_text} s was over before a step of {self.workload.name!r} was"
        if not self.known.fit.compiled:
            return NotDoneError(
                f"{begin} compiled. Give a longer timeout, or scan the layers so that there is less to compile."
            )
        least = self.known.fit.smallest
        return NotDoneError(
            f"{begin} found that fits budget={self.budget} ({format_bytes(self.budget)}). The least so far, under "
            f"{least.candidate.title}, needs {format_bytes(least.compiled.device_bytes)}. Give a longer timeout."
        )

    def plan(self) -> Plan:
        """The plan of a whole search."""
        otherwise = functools.cache(functools.partial(more_without_triton, self.compiler))  # a failure, too, is final
        try:
            ended = search(self.known, self.compiler.compile, compile_otherwise=otherwise)
            if self.known.in_hand is None and (ended.by == "time" or not self.known.fit.compiled):
                self._compile_least()
        except CompileError as error:
            if self.known.fit.compiled:
                ended = Ended("time")
            elif isinstance(error, NotDoneError):
                raise self._too_late() from error
            else:
                raise
        if self.known.in_hand is None:
            raise self._infeasible() if ended.by != "time" else self._too_late()
        self._add_as_written(self.known.in_hand)
        settle(self.known, otherwise)
        return self._plan(ended)

    def so_far(self) -> Plan:
        """The plan of what was compiled before an interrupt. Nothing else is compiled, and no further problem is solved."""
        self.deadline = -math.inf
        self.findings[:] = [each for each in self.findings if each.kind not in ("cut_short", "not_shown")]
        return self._plan(Ended("interrupt"))

    def _plan(self, ended: Ended) -> Plan:
        best, preferred = choose_fastest(self.known)
        self.findings += preferred
        self.progress("reading the frontier", len(self.known.fit.tried), len(self.known.fit.tried))
        policies = policies_of(self.described, best.candidate)
        fields = outcome(self.described, self.target, self.known, best, self.problem.remarks, self._is_late)
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
            cut_short=ended.by in ("time", "interrupt") or self._is_late() or best.compiled.unfinished,
            left_out=tuple(candidate.title for candidate in ended.left),
            **fields,
        )

    def _left(self) -> float:
        return self.deadline - time.monotonic()

    @property
    def _timeout_text(self) -> str:
        # A change beyond the blocks has a share of the whole call's time.
        return str(round(self.timeout)) if self.timeout > 10 else f"{round(self.timeout, 1) or self.timeout:.2g}"

    def _is_late(self) -> bool:
        return self._left() < 0

    def _add_as_written(self, best: Tried) -> None:
        """If policies replace the model's checkpoints, compile the model as written too, for comparison."""
        written, fit = self.known.as_written, self.known.fit
        if written is not None and fit.known(written) is None and (answers := self.compiler.compile([written], best)):
            fit.learn([written], answers)

    def _find(self, ended: Ended, best: Tried, fields: Mapping[str, Any]) -> None:
        """Add findings: what was not shown of the plan's step, and what is to be known of its memory."""
        sizes, candidate = best.compiled.sizes, best.candidate
        is_late = ended.by == "time" or self._is_late() or bool(self.compiler.late)
        begin = f"The search ended after timeout={self._timeout_text} s; a longer timeout may find a faster plan" * is_late
        if ended.by == "interrupt":
            begin = "The search was interrupted; a longer search may find a faster plan"
        open_questions = self._open_questions(ended, best, fields)
        self.findings += not_shown(begin, open_questions, "no compilations were left" * (ended.by == "compilations"))
        if sizes.unfinished:
            self.findings.append(info("cut_short", f"The plan's time is an estimate ({sizes.no_time})"))
        if candidate.cuts:
            self.findings.append(info("cut", CUT))
        if self.workload.found is not None:
            self.findings.append(info("blocks", self.workload.found.text))
        if self.workload.replaced_checkpoints and candidate.checkpoints:
            self.findings.append(info("replaced", replaced_text(self.workload.replaced_checkpoints)))
        self.findings += option_findings(candidate.memory_limit is not None, sizes.compiler_options, self.workload.has_loss)
        if (short := host_shortage(best.compiled.host_bytes, self.target)) is not None:
            self.findings.append(warning("host", f"Host memory: {short}, or plan with a host_budget"))
        if sizes.warning is not None:
            self.findings.append(warning("miscompiled", f"{sizes.warning[0].upper()}{sizes.warning[1:]}"))
        self.findings += kernel_findings(self.known, best, self.target)
        if candidate.name not in KEEP_ALL and ended.by != "interrupt" and not self._is_late():
            self.advice = advise(self.workload, sizes, traced_products(self.workload), self.target)
            self.findings += [info("beyond", text) for text in filter(None, [largest(self.advice, sizes)])]

    def _open_questions(self, ended: Ended, best: Tried, fields: Mapping[str, Any]) -> list[str]:
        """What was not shown of the plan's step."""
        untimed = [step.candidate for step in self.known.fit.fitting if step.compiled.unfinished and step is not best]
        left = [*self.compiler.late, *(step for step in ended.left if step.family == "named")]
        questions = [FITS_WITH_CUBLAS] if is_unchecked(best, self.compiler) else []
        for steps, question in ((untimed, "would be faster"), (left, "would fit and be faster")):
            if steps:
                questions.append(f"whether {listed([step.title for step in steps])} {question}")
        if best.candidate.host_bytes and fields["offload_needed"] is None and best.candidate.choices is not None:
            questions.append("whether the offloaded residuals would fit on the device")
        if not fields["is_maximal"]:
            questions.append("that no further residual can be saved in a run of layers")
        return questions

    def beyond(self, made: Plan) -> tuple[Beyond, ...]:
        """What the changes that free much would give, if they were allowed: by estimates, while time is left."""
        if not self.workload.has_loss:
            return ()  # the changes are of a loss
        freed = {advice.what: advice.bytes for advice in self.advice if advice.bytes >= SHOWN * made.device_bytes}
        advised = {name: freed[change.advice] for name, change in CHANGES.items() if change.advice in freed}
        if self._left() < len(advised) * self.described_seconds:
            return ()
        if advised:
            self.progress("estimating changes beyond the blocks", len(made.tried), len(made.tried))
        return estimated(self._predicted, self.workload, advised)

    def _predicted(self, changed: Workload, freed: int | None) -> Predicted | None:
        """The fastest candidate of a changed workload that is predicted to fit, with what this search learnt.

        The change frees `freed` bytes of the compiled peak; if None, what the planning problems differ by. Arguments that it
        moves to the host are copied twice in a step, and no compute hides their copies, because the update comes last.
        """
        other = self._problem(changed, None if freed is None else self.problem).known
        learnt, link = self.known.fit.stack, self.known.fit.guess.link
        moved = self.known.fit.arguments - other.fit.arguments
        copies = 0.0 if link is None else link.exposed_out(moved, 0.0) + link.exposed_in(moved, 0.0)
        if freed is None:
            freed = round(self.known.fit.guess.fixed_bytes - other.fit.guess.fixed_bytes)
        fixed = max(other.fit.arguments, learnt.fixed_bytes - freed)
        stack = replace(with_shares(other.fit.guess, self.known.fit.shares), fixed_bytes=fixed)
        budget = self.known.fit.compiled_budget
        candidates = [other.solved.plan(stack, budget), *other.named]
        fits = [step for step in candidates if step is not None and predicted(stack, step.loads) <= budget]
        if not fits:
            return None
        fastest = min(fits, key=other.times.traced)
        seconds = self.known.times.pace_of(fastest) * other.times.traced(fastest)
        return Predicted(round(predicted(stack, fastest.loads)), seconds + copies)

    def _recompute_flops(self, candidate: StepCandidate, policies: Mapping[Any, Any]) -> int:
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
