"""Candidates to compile: the solver's plans, the plan with least memory, variants of compiled steps, groups of layers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from remat_jax import compat
from remat_jax.errors import InfeasibleBudget
from remat_jax.planning.candidate import (
    FAILED,
    Choices,
    Cuts,
    StepCandidate,
    Tried,
    block_policies,
    choices_together,
    one_residual_more,
    runs,
    singles,
)
from remat_jax.planning.fit_memory import Fit, predicted
from remat_jax.planning.problem import KEEP_ALL, Described
from remat_jax.policy import LayerPolicies, Policy
from remat_jax.solver import Choice, Prices, Solver, Stack, cheapest_policy
from remat_jax.solver.groups import GroupedLayer, Grouping, groupings
from remat_jax.solver.solve import MOST_POLICIES
from remat_jax.workload import Workload

WORTH_COMPILING = 3e-3
"""A plan is worth a compilation if it gains at least this share of the step's time."""

_INSIDE = "full"
"""The policy of each layer of a group during the group's backward pass."""
_MOST_GROUPED = 2
"""The maximum number of groupings to compile."""


class Proposals:
    """Derives candidates from the fitted stack.

    Args:
      fit: the compiled steps, and the stack fitted to them.
      named: the applicable named policies, including `off`.
      own: returns the candidate for given choices of the solver, with its estimated time.
      recut: returns a candidate with its scans cut at the given places; None leaves scans uncut.
      most_runs: the maximum number of policies among layers of one kind; None for the solver's own limit.
    """

    def __init__(
        self,
        fit: Fit,
        named: Sequence[StepCandidate],
        own: Callable[[Choices], StepCandidate],
        recut: Callable[[StepCandidate, Cuts], StepCandidate] | None = None,
        most_runs: int | None = None,
    ) -> None:
        self.fit, self.named, self.own = fit, tuple(named), own
        self._recut = recut if most_runs != 1 else None
        self._most_runs = min(most_runs or MOST_POLICIES, MOST_POLICIES)
        self.worth = WORTH_COMPILING * fit.guess.base_seconds
        self._solvers: dict[tuple[Stack, int], Solver] = {}

    def named_policy(self, name: str) -> StepCandidate | None:
        """The candidate of a named policy; None if the policy is not applicable."""
        return next((candidate for candidate in self.named if candidate.name == name), None)

    def solve(self, stack: Stack, budget: float, *, most_runs: int | None = None) -> StepCandidate | None:
        """The solver's fastest plan within `budget`, with at most `most_runs` policies per kind; None if nothing fits."""
        plan = self._solved_within(stack, budget, self.fit.host_left, most_runs)
        if plan is None or not plan.host_bytes:
            return plan
        # The solver adds up the costs of single residuals. Priced as a whole (`own`), a plan without copies may be faster.
        uncopied = self.without_copies(stack, budget, most_runs)
        return plan if uncopied is None or plan.seconds <= uncopied.seconds else uncopied

    def without_copies(self, stack: Stack, budget: float, most_runs: int | None = None) -> StepCandidate | None:
        """The solver's fastest plan within `budget` that offloads nothing; None if nothing fits."""
        return self._solved_within(stack, budget, 0.0, most_runs)

    def _solved_within(self, stack: Stack, budget: float, host_budget: float, most_runs: int | None) -> StepCandidate | None:
        try:
            plan = self._solver(stack, most_runs or self._most_runs).plan(budget, host_budget)
        except InfeasibleBudget:
            least = self.least(stack)
            return least if predicted(stack, least.loads) <= budget and least.host_bytes <= host_budget else None
        return self.own(choices_together(stack, plan))

    def _solver(self, stack: Stack, most_runs: int) -> Solver:
        """The cached solver of a fitted stack; a new solver starts from the previous solver's policies."""
        if (stack, most_runs) not in self._solvers:
            previous = next(reversed(self._solvers.values()), None)
            solver = self._solvers[stack, most_runs] = Solver(stack, most_runs, previous)
            for candidate in self.named if previous is None else ():
                if candidate.like is not None:
                    solver.add(block_policies(stack, candidate.like))
        return self._solvers[stack, most_runs]

    def bound(self) -> float:
        """A lower bound, by the fitted stack, on `StackPlan.extra_seconds` of any plan within both budgets."""
        return self._solver(self.fit.stack, self._most_runs).bound(self.fit.budget, self.fit.host_left)

    def frontier(self, stack: Stack, points: int, is_over: Callable[[], bool]) -> list[StepCandidate]:
        """The plan of least memory, and the solver's plans at `points` larger budgets; stops when `is_over` returns True."""
        if is_over():
            return []
        least = self.least(stack)
        low = predicted(stack, least.loads)
        high = max([low, *(predicted(stack, step.loads) for step in self.named if step.name in KEEP_ALL)])
        budgets = [low + (high - low) * count / points for count in range(1, points + 1)]
        return [least, *filter(None, (self.solve(stack, budget) for budget in budgets if not is_over()))]

    def least(self, stack: Stack) -> StepCandidate:
        """The plan with the least predicted memory among a few heuristic plans."""
        count = len(singles(stack))
        # A saved byte occupies memory in every later block. The weight of saved bytes that gives the least memory depends on
        # the fitted shares (`recomputed_share`, `fetched_share`): try several weights.
        offloads = (False,) if stack.link is None else (True,) if math.isinf(self.fit.host_budget) else (True, False)
        weights = dict.fromkeys((1.0, math.sqrt(count), float(count)))
        plans = [self._lean(stack, weight, offload=offload) for weight in weights for offload in offloads]
        within = [plan for plan in plans if plan.host_bytes <= self.fit.host_left]
        return min(within or plans, key=lambda plan: (predicted(stack, plan.loads), plan.seconds))

    def _lean(self, stack: Stack, weight: float, *, offload: bool) -> StepCandidate:
        choices: list[tuple[Choice, ...]] = []
        prices = Prices(saved=weight, transient=1.0)
        for block in stack.blocks:
            allowed = block if offload else block.without_offload()
            choices += [cheapest_policy(allowed, stack.link, prices).choices] * block.repeats
        if not stack.offload_last and self._most_runs != 1:
            choices[-1] = cheapest_policy(stack.positions()[-1], stack.link, replace(prices, saved=1.0)).choices
        return self.own(tuple(choices))

    def faster_named(self, best: Tried | None) -> list[StepCandidate]:
        """The uncompiled named policies within the host budget that are estimated to be faster than `best`, if given."""
        bound = math.inf if best is None else best.candidate.seconds
        return [step for step in self._uncompiled() if step.seconds < bound and not math.isclose(step.seconds, bound)]

    def near_named(self, best: Tried, slack: float, *, always: Sequence[str] = ()) -> list[StepCandidate]:
        """At most two uncompiled named policies that are expected to fit: `full`, and the fastest of the others.

        By the traced estimate, each is at most `slack` seconds slower than `best`. Policies named in `always` may be slower by
        any time.
        """
        near = [
            step
            for step in self._uncompiled()
            if (step.seconds <= best.candidate.seconds + slack or step.name in always)
            and self.fit.expected(step) <= self.fit.budget
        ]
        others = [step for step in near if step.name != "full"]
        fastest = min(others, key=lambda step: step.seconds, default=None)
        return [step for step in near if step.name == "full" or step is fastest]

    def _uncompiled(self) -> list[StepCandidate]:
        """The named policies within the host budget that were not compiled."""
        return [step for step in self.named if self.fit.known(step) is None and step.host_bytes <= self.fit.host_left]

    def unknown(self, best: Tried) -> list[StepCandidate]:
        """The named policies of `faster_named` that may fit (`Fit.may_fit`), the least predicted memory first."""
        stack = self.fit.stack
        return sorted(filter(self.fit.may_fit, self.faster_named(best)), key=lambda step: predicted(stack, step.loads))

    def is_maximal(self, best: Tried) -> bool:
        """Whether `best` keeps everything, or all variants of `least_more` (at most two) were compiled and do not fit.

        False if `best` has no choices (`effective_choices`).
        """
        if best.candidate.seconds <= 0 or best.candidate.name in KEEP_ALL:
            return True
        if best.candidate.effective_choices is None:
            return False
        tried = [self.fit.known(step) for step in self.least_more(best)]
        return all(step is not None and step.compiled.device_bytes < FAILED and not self.fit.fits(step) for step in tried)

    def least_more(self, best: Tried) -> list[StepCandidate]:
        """At most two variants of `best` that save one more residual: the smallest by saved bytes and by predicted memory.

        Only variants that gain at least `worth` seconds count. An uncompiled variant that is surely over the budget is left
        out (`Fit.is_surely_over`).
        """
        stack, worth = self.fit.around(best.compiled.device_bytes), best.candidate.seconds - self.worth
        faster = [step for step in self.one_more(best.candidate) if step.seconds <= worth]
        if not faster:
            return []
        fewest = min(faster, key=lambda step: sum(load.saved for load in step.loads))
        smallest = min(faster, key=lambda step: predicted(stack, step.loads))
        variants = [fewest] if fewest.is_same(smallest) else [fewest, smallest]
        return [step for step in variants if self.fit.known(step) is not None or not self.fit.is_surely_over(step, stack)]

    def one_more(self, candidate: StepCandidate) -> list[StepCandidate]:
        """The variants that save one more residual in one run and are faster than `candidate`; the scans stay the same."""
        stack, choices = self.fit.guess, candidate.effective_choices
        assert choices is not None, "one residual more needs the choices"
        # A cut at the start of each run keeps the run a separate scan, even if its choices become equal to its neighbour's.
        starts = tuple(start for start, _ in runs(stack, choices, candidate.cuts))
        variants = [self._cut(self.own(more), starts) for more in one_residual_more(stack, choices, candidate.cuts)]
        return [step for step in variants if step.seconds < candidate.seconds]

    def without_host(self, candidate: StepCandidate) -> StepCandidate | None:
        """The candidate with its offloaded residuals saved.

        None if the candidate offloads nothing or has no choices, or if an offloaded residual may not be saved.
        """
        choices = candidate.effective_choices
        if not candidate.host_bytes or choices is None:
            return None
        for block, actions in zip(singles(self.fit.guess), choices, strict=True):
            pairs = zip(block.residuals, actions, strict=True)
            if any(action is Choice.OFFLOAD and not residual.may_save for residual, action in pairs):
                return None
        saved = tuple(tuple(Choice.SAVE if action is Choice.OFFLOAD else action for action in actions) for actions in choices)
        return self._cut(self.own(saved), candidate.cuts)

    def _cut(self, candidate: StepCandidate, cuts: Cuts) -> StepCandidate:
        return candidate if self._recut is None else self._recut(candidate, cuts)


def grouped_candidates(
    workload: Workload, described: Described, full: StepCandidate, full_bytes: int, budget: int
) -> list[StepCandidate]:
    """The fastest grouping of the layers that is predicted to fit, and the grouping with the least memory.

    If none is predicted to fit, only the grouping with the least memory is returned. Layers in a group share one checkpoint.
    This helps if the inputs of all layers do not fit. The memory is predicted from `full_bytes`, the device bytes of the step
    under `full`. Empty if that step could not be compiled, if there are several kinds of blocks, or if calls are in nested
    scans or alternate in one scan.
    """
    (kind, *others), (block, *_) = described.kinds, described.stack.blocks
    if others or kind.program.call.nested or kind.program.call.stride != 1 or full_bytes >= FAILED:
        return []
    layers, load = block.repeats, full.loads[0]
    gradients = compat.tree_bytes(workload.params) / layers
    layer = GroupedLayer(load.saved, 0.0, block.forward_seconds, full.seconds / layers, gradients if kind.scanned else 0.0)
    # Except for the layers' inputs, groups need the same memory as `full`.
    fixed = max(0.0, full_bytes - layers * load.saved)
    fitting = groupings(layers, layer, float(budget), fixed_bytes=fixed, scanned=kind.scanned)
    chosen = [*fitting[:1], *fitting[-1:]] or groupings(layers, layer, fixed_bytes=fixed, scanned=kind.scanned)[-1:]
    return [_grouped(full, grouping) for grouping in dict.fromkeys(chosen)][:_MOST_GROUPED]


def _grouped(full: StepCandidate, grouping: Grouping) -> StepCandidate:
    policies = LayerPolicies.of([Policy.parse(_INSIDE)] * grouping.layers, groups=grouping.groups)
    # A group saves one input. Its bytes are divided equally among the layers of the group.
    kept = round(full.loads[0].saved * len(grouping.groups) / grouping.grouped)
    loads = tuple(replace(load, saved=kept) for load in full.loads[: grouping.grouped]) + full.loads[grouping.grouped :]
    return StepCandidate(
        name=str(policies),
        loads=loads,
        seconds=grouping.extra_seconds,
        inside=_INSIDE,
        grouped=grouping.grouped,
        expected_bytes=round(grouping.peak_bytes),
    )
