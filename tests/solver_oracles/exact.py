"""The fastest plan of a stack: all policies of its blocks by enumeration, and an integer programme over how many follow each.

Blocks of one run are interchangeable. The policy that needs most while it runs comes first, and the policy that saves most
comes last, nearest the loss: then least is kept while it runs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from remat_jax.solver import Block, HostLink, Stack

SAVE, OFFLOAD, RECOMPUTE, UNUSED = range(4)
SAVED, TRANSIENT, HOST, EXTRA = range(4)


@dataclass(frozen=True)
class Exact:
    """The least extra seconds of any plan, up to the solver's gap: a plan that takes them, and a proved bound."""

    extra_seconds: float
    bound: float


def every_policy(block: Block, link: HostLink | None) -> tuple[Any, Any]:
    """The choices of all legal policies; and their saved bytes, transient bytes, host bytes and extra seconds, by row."""
    grid = np.indices((4,) * len(block.residuals), np.int8).reshape(len(block.residuals), -1).T
    at = {residual.name: index for index, residual in enumerate(block.residuals)}
    legal = np.ones(len(grid), bool)
    sums = np.zeros((4, len(grid)))
    for index, residual in enumerate(block.residuals):
        does = [grid[:, index] == choice for choice in range(4)]
        legal &= ~does[SAVE] | residual.may_save
        legal &= ~does[OFFLOAD] | (residual.may_offload and link is not None)
        legal &= ~does[RECOMPUTE] | (residual.seconds is not None)
        legal &= ~does[UNUSED] | (not residual.needed)
        for parent in residual.parents:
            legal &= ~(does[RECOMPUTE] & (grid[:, at[parent]] == UNUSED))
        for choice, row in ((SAVE, 0), (OFFLOAD, 1), (RECOMPUTE, 2)):
            sums[row] += residual.bytes * does[choice]
        sums[3] += (residual.seconds or 0) * does[RECOMPUTE] + residual.kept_seconds * (does[SAVE] | does[OFFLOAD])
    saved, away, again, work = sums[:, legal]
    exposed = np.zeros(len(work))
    if link is not None:
        work = work + 2 * away / link.memory_bytes_per_s
        exposed += np.maximum(0, away / link.out_bytes_per_s - link.hidden_share * block.forward_seconds)
        exposed += np.maximum(0, away / link.in_bytes_per_s - link.hidden_share * (block.backward_seconds + work))
    transient = block.working_bytes + block.recomputed_share * again + block.fetched_share * away
    return grid[legal], np.stack([saved + block.input_bytes, transient, away, work + exposed], axis=1)


def unbeaten(rows: Any) -> Any:
    """The rows that no other row equals or undercuts in every column."""
    left, kept = rows[np.argsort(rows.sum(axis=1), kind="stable")], []
    while len(left):
        kept.append(left[0])
        left = left[(left < left[0]).any(axis=1)]
    return np.stack(kept)


def exact_plan(
    stack: Stack, budget: float = math.inf, host: float = math.inf, *, most_policies: int | None = None, gap: float = 1e-4
) -> Exact | None:
    """The fastest plan in which blocks of one kind have at most `most_policies` policies; None if nothing fits."""
    solved = _Programme(stack, host, most_policies).solve(budget, gap)
    return None if solved is None else Exact(*solved)


def least_peak(stack: Stack, host: float = math.inf) -> float | None:
    """The least device bytes of any plan within the host budget; None if the host budget alone cannot be met."""
    solved = _Programme(stack, host, None).solve(None, 1e-9)
    return None if solved is None else solved[0]


class _Programme:
    """Integers: how many blocks of each run follow each policy.

    A policy that needs much while it runs constrains the memory only if it is used, which takes a binary. Except for a run's
    last block this hardly ever matters, so it is demanded once an answer has broken it.
    """

    def __init__(self, stack: Stack, host: float, most_policies: int | None) -> None:
        self.stack, self.host, self.most = stack, host, most_policies
        self.runs = stack.runs()
        rows = [unbeaten(every_policy(block, stack.link)[1]) for block in self.runs]
        rows = [each[np.lexsort((-each[:, HOST], each[:, SAVED], -each[:, TRANSIENT]))] for each in rows]
        self.rows = np.concatenate(rows)
        self.run_of = np.repeat(np.arange(len(rows)), list(map(len, rows)))
        self.repeats = np.array([block.repeats for block in self.runs])[self.run_of]
        self.need = self.rows[:, SAVED] + self.rows[:, TRANSIENT]
        self.unit = float(self.need.max()) or 1.0

    def solve(self, budget: float | None, gap: float) -> tuple[float, float] | None:
        """Extra seconds within the budget, or the least peak without one; and the solver's bound. None if nothing fits."""
        guarded = np.zeros(len(self.rows), bool)
        while (answer := self._answer(budget, gap, guarded)) is not None:
            counts, objective, bound = answer
            new = (counts > 0) & (self.repeats > 1) & ~guarded
            peak = self._peak(counts)
            if peak <= (objective if budget is None else budget) * (1 + 1e-9) or not new.any():
                return (peak if budget is None else objective), bound
            guarded |= new
        return None

    def _peak(self, counts: Any) -> float:
        kept = self.stack.fixed_bytes + np.cumsum(counts * self.rows[:, SAVED])
        return float(np.max((kept + self.rows[:, TRANSIENT])[counts > 0]))

    def _answer(self, budget: float | None, gap: float, guarded: Any) -> tuple[Any, float, float] | None:
        """The counts, the objective and its bound. Variables: counts, whether each is used, the peak, and `_few_policies`."""
        count, saved = len(self.rows), self.rows[:, SAVED]
        each = np.eye(count)
        constraints = [(self.run_of == run, block.repeats, block.repeats) for run, block in enumerate(self.runs)]
        for at in np.flatnonzero(guarded):
            constraints.append((np.concatenate([each[at], -self.repeats[at] * each[at]]), -np.inf, 0))
        if budget is None or math.isfinite(budget):
            memory = [
                np.append((self.run_of < run) * saved + (self.run_of == run) * self.need, np.zeros(count))
                for run, block in enumerate(self.runs)
                if block.repeats == 1
            ]
            for at in np.flatnonzero(guarded):
                memory.append(np.concatenate([(np.arange(count) <= at) * saved, (self.need - saved)[at] * each[at]]))
            allowed = (0.0 if budget is None else budget * (1 + 1e-12)) - self.stack.fixed_bytes
            constraints += [(np.append(row / self.unit, -(budget is None)), -np.inf, allowed / self.unit) for row in memory]
        away = self.rows[:, HOST]
        if math.isfinite(self.host) and away.any():
            constraints.append((away / away.max(), -np.inf, self.host / away.max()))
        alike = 0 if self.most is None else self._few_policies(constraints)
        variables = 2 * count + 1 + alike
        cost = np.zeros(variables)
        if budget is None:
            cost[2 * count] = self.unit
        else:
            cost[:count] = self.rows[:, EXTRA]
        scale = 1e3 / (float(cost.max()) or 1.0)  # HiGHS also stops at an absolute gap of 1e-6
        upper = np.concatenate([self.repeats, np.ones(count), [np.inf], np.ones(alike)])
        result = milp(
            scale * cost,
            constraints=LinearConstraint(
                csr_array(np.stack([np.pad(row, (0, variables - len(row))) for row, _, _ in constraints])),
                [low for _, low, _ in constraints],
                [high for _, _, high in constraints],
            ),
            integrality=np.arange(variables) != 2 * count,
            bounds=Bounds(0, upper),
            options={"mip_rel_gap": gap},
        )
        if result.x is None:
            assert result.status == 2, result.message
            return None
        return np.round(result.x[:count]), result.fun / scale, result.mip_dual_bound / scale

    def _few_policies(self, constraints: list[Any]) -> int:
        """Demand at most so many policies in each kind of block; policies of equal costs are alike. The number of binaries."""
        kinds = [(self.runs[run].name, *row) for run, row in zip(self.run_of, self.rows.tolist(), strict=True)]
        places = {kind: number for number, kind in enumerate(dict.fromkeys(kinds))}
        first = 2 * len(kinds) + 1
        for at, kind in enumerate(kinds):
            row = np.zeros(first + len(places))
            row[at], row[first + places[kind]] = 1, -self.repeats[at]
            constraints.append((row, -np.inf, 0))
        for name in {name for name, *_ in kinds}:
            row = np.append(np.zeros(first), [name == other for other, *_ in places])
            constraints.append((row, 0, self.most))
        return len(places)
