"""Counts of policies as variables: the columns of `counts.solve_counts`, and the programme over some of them."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from remat_jax.solver.policies import BlockPolicy
from remat_jax.solver.problem import Block, Choice, HostLink, Stack
from tests.solver_oracles.candidates import candidates, measures
from tests.solver_oracles.milp import Model, Solution, unit_beside


@dataclass(frozen=True)
class Run:
    """Blocks of one kind, and the policies that they may follow, in the order in which they would come.

    Attributes:
        block: with how many there are of it.
        policies: the one that needs most while it runs first, of those that need the same the one that saves least.
        measures: of each policy, as `candidates.measures` gives them.
        complete: whether these are all policies that could be best.
    """

    block: Block
    policies: tuple[BlockPolicy, ...]
    measures: tuple[tuple[float, float, float, float], ...]
    complete: bool

    @classmethod
    def of(cls, block: Block, link: HostLink | None) -> Run:
        """The run of a block and all of its candidates."""
        return cls.with_policies(block, link, *candidates(block, link))

    @classmethod
    def with_policies(cls, block: Block, link: HostLink | None, policies: Collection[BlockPolicy], complete: bool) -> Run:
        """The run of a block restricted to these policies."""
        ordered = sorted(policies, key=lambda policy: (-policy.transient_bytes, policy.saved_bytes, -policy.host_bytes))
        return cls(block, tuple(ordered), tuple(measures(policy, link) for policy in ordered), complete)


Column = tuple[int, int]
"""A run, and one of its policies."""


class Programme:
    """Counts of columns as variables. The memory constraint of a run is that of its last block, and of `guarded` columns.

    A run whose last block fits may still not fit in an earlier one that needs more while it runs. That takes a binary for
    each policy (is it used?), and hardly ever matters: it is demanded only where an answer was seen to break it.

    ``most_policies`` limits how many different ones a kind of block has. ``budget`` None makes the peak itself the objective.
    ``count_rows``, ``memory_rows`` (by run) and ``host_row`` are the indices of its rows.
    """

    def __init__(
        self,
        stack: Stack,
        runs: Sequence[Run],
        columns: Collection[Column],
        budget: float | None,
        host_budget: float,
        guarded: Collection[Column] = (),
        most_policies: int | None = None,
    ) -> None:
        self.runs, self.columns = runs, sorted(columns)
        self.model = Model()
        unit = unit_beside((need for run in runs for _, need, _, _ in run.measures), stack.fixed_bytes)
        self.peak = self.model.real(cost=1.0, unit=unit) if budget is None else None
        self.variable: dict[Column, int] = {}
        for at, number in self.columns:
            cost = runs[at].measures[number][3] if budget is not None else 0.0
            # Without its own bound, which the sum implies: a bound would take a part of the rows' duals.
            self.variable[at, number] = self.model.integer(math.inf, cost)
        self.count_rows = [self.model.equal(self._ones(at), float(run.block.repeats)) for at, run in enumerate(runs)]
        if most_policies is not None:
            self._limit(most_policies)
        self.memory_rows: dict[int, int] = {}
        if budget is None or math.isfinite(budget):
            allowed = (budget or 0.0) - stack.fixed_bytes
            for at, run in enumerate(runs):
                if run.block.repeats == 1:
                    self.memory_rows[at] = self._demand(self._kept(at) | self._sizes(at, 1), allowed)
            for column in sorted(guarded):
                self._guard(column, allowed)
        host = {index: runs[at].measures[number][2] for (at, number), index in self.variable.items()}
        self.host_row = self.model.at_most(host, host_budget) if math.isfinite(host_budget) and any(host.values()) else None

    def _limit(self, most: int) -> None:
        """A binary for each policy of a kind of block, 1 if it is used. The last block of a kind counts with the others."""
        kinds: dict[str, dict[tuple[Choice, ...], dict[int, float]]] = {}
        for (at, number), index in self.variable.items():
            policies = kinds.setdefault(self.runs[at].block.name, {})
            policies.setdefault(self.runs[at].policies[number].choices, {})[index] = 1.0
        for name, policies in kinds.items():
            repeats = float(sum(run.block.repeats for run in self.runs if run.block.name == name))
            used = [self.model.integer(1) for _ in policies]
            for binary, row in zip(used, policies.values(), strict=True):
                self.model.at_most({**row, binary: -repeats}, 0.0)
            self.model.at_most(dict.fromkeys(used, 1.0), float(most))

    def _ones(self, at: int) -> dict[int, float]:
        return {index: 1.0 for (place, _), index in self.variable.items() if place == at}

    def _sizes(self, at: int, measure: int, until: int | None = None) -> dict[int, float]:
        sizes = self.runs[at].measures
        return {
            index: sizes[number][measure]
            for (place, number), index in self.variable.items()
            if place == at and (until is None or number <= until)
        }

    def _kept(self, at: int) -> dict[int, float]:
        return {index: size for before in range(at) for index, size in self._sizes(before, 0).items()}

    def _demand(self, row: dict[int, float], allowed: float) -> int:
        return self.model.at_most(row if self.peak is None else {**row, self.peak: -1.0}, allowed)

    def _guard(self, column: Column, allowed: float) -> None:
        at, number = column
        if column not in self.variable or self.runs[at].block.repeats == 1:
            return
        used = self.model.integer(1)
        self.model.at_most({self.variable[column]: 1.0, used: -float(self.runs[at].block.repeats)}, 0.0)
        saved, need, _, _ = self.runs[at].measures[number]
        self._demand(self._kept(at) | self._sizes(at, 0, number) | {used: need - saved}, allowed)

    def chosen(self, solution: Solution) -> list[tuple[Column, int]]:
        """The used columns and their counts, in the order of the forward pass."""
        counts = ((column, round(solution.values[self.variable[column]])) for column in self.columns)
        return [(column, count) for column, count in counts if count]
