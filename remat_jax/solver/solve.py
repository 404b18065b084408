"""The fastest plan of a stack within its budgets: policies on the hull, mixed by counts, kind after kind.

The linear relaxation (`hull`) prices memory and bounds every plan from below. A dynamic programme over the kinds (`shares`)
makes a first plan that fits. Then each kind of block in turn takes the best mix of at most three policies in the memory left by
the other kinds (`mix`), and tries neighbours of its policies, until no kind gets faster. ``docs/how/planner.md`` states the
guarantees and the gaps to the bound. `planning.propose_candidates` calls `Solver.plan`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from remat_jax.errors import InfeasibleBudget
from remat_jax.solver.checks import check_budget, check_count
from remat_jax.solver.hull import Hull, Relaxed
from remat_jax.solver.mix import Mix, Room, best_mix, orders, orders_beside
from remat_jax.solver.policies import BlockPolicy, StackPlan, stack_plan
from remat_jax.solver.problem import Block, Stack
from remat_jax.solver.shares import Mixes, mixes_of_two, shared, thinned
from remat_jax.solver.table import CHOICES, EXTRA, HOST, NEED, SAVED, Prices

Array = Any
"""A NumPy array."""

MOST_POLICIES = 3
"""The most different policies among blocks of one kind. Scanned layers become one scan for each."""

_MIXED, _BESIDE = 12, 40
"""The most policies mixed in every order, and the most neighbours of a plan's policies, each tried with two of these."""

_PAIRS = 20_000
"""The most mixes of two policies of one kind for the first plan: pairs × counts."""

_SWEEPS = 6
"""The most sweeps over the kinds."""

_FASTER = 1e-9
"""The least relative gain for which a mix is taken."""

_LEAST = 1e-3
"""The relative accuracy of the least memory that an infeasible budget's error reports."""


class Solver:
    """Plans for one stack. Policies found for one budget are reused for the next.

    Args:
        stack: the blocks.
        most_policies: the most different policies of blocks of one kind, 1 to 3.
        known: another solver for the same residuals with other bytes; its policies are the first candidates.

    Raises:
        PlanningError: ``most_policies`` is not 1, 2 or 3.

    >>> from remat_jax.solver.problem import Block, ResidualCosts
    >>> residuals = (ResidualCosts("x", 8.0), ResidualCosts("up", 32.0, 0.5, parents=("x",)))
    >>> plan = Solver(Stack((Block("layer", residuals, 1.0, 2.0, repeats=30),))).plan(700.0)
    >>> [(one.first, one.count, one.policy.choices[1].value) for one in plan.ranges], plan.peak_bytes
    ([(0, 16, 'recompute'), (16, 14, 'save')], 688.0)
    """

    def __init__(self, stack: Stack, most_policies: int = MOST_POLICIES, known: Solver | None = None) -> None:
        check_count("most_policies", most_policies, most=MOST_POLICIES)
        self.stack, self.most = stack, most_policies
        self._hull: Hull = Hull(stack, None if known is None else known._hull)

    def add(self, policies: Sequence[BlockPolicy]) -> None:
        """Add the policies of a plan, one for each single block in forward order. A later plan is no
        slower than this plan, wherever this plan fits.
        """
        codes = [np.array([_CODES[choice] for choice in policy.choices], np.int8) for policy in policies]
        place = 0
        for run, block in enumerate(self._hull.runs):
            self._hull.add(run, codes[place])
            place += block.repeats

    def plan(self, budget: float = math.inf, host_budget: float = math.inf) -> StackPlan:
        """The fastest plan found within both budgets; ``lower_bound`` bounds the seconds of every plan.

        Raises:
            InfeasibleBudget: no plan was found that fits; the message has the least device memory that was reached.
            PlanningError: a budget is not a positive number of bytes.
        """
        check_budget("budget", budget)
        check_budget("host_budget", host_budget)
        relaxed = self._hull.relaxed(budget, host_budget)
        mixing = _Mixing(self.stack, self._hull, self.most, budget, host_budget, relaxed)
        return stack_plan(self.stack, mixing.policies(), bound=max(0.0, relaxed.bound))

    def bound(self, budget: float = math.inf, host_budget: float = math.inf) -> float:
        """A lower bound on the seconds, beyond saving everything, of any plan within both budgets (``lower_bound`` of `plan`).

        Raises:
            PlanningError: a budget is not a positive number of bytes.
        """
        check_budget("budget", budget)
        check_budget("host_budget", host_budget)
        return max(0.0, self._hull.relaxed(budget, host_budget).bound)


def solve(
    stack: Stack, budget: float = math.inf, host_budget: float = math.inf, *, most_policies: int = MOST_POLICIES
) -> StackPlan:
    """`Solver.plan` for one budget."""
    return Solver(stack, most_policies).plan(budget, host_budget)


_CODES = {choice: code for code, choice in enumerate(CHOICES)}


class _Kind:
    """The layers of one kind while a plan is made: their possible policies, and the runs (policy, count) so far."""

    def __init__(self, hull: Hull, block: Block, runs: range, prices: Sequence[Prices], most: int) -> None:
        self.block, self.most = block, most
        self._prices = list(dict.fromkeys(prices[run] for run in runs))
        self.table, self._last = hull.table(runs[0]), hull.table(runs[-1])
        self.codes = np.unique(np.concatenate([hull.policies(runs[0]), hull.policies(runs[-1])]), axis=0)
        self.codes = self.codes[self.table.legal(self.codes)]
        self.runs: tuple[tuple[int, int], ...] = ()
        self._measure()

    def _measure(self) -> None:
        self.measures, self.ends = self.table.measures(self.codes), self._last.legal(self.codes)

    def mixes(self, room: float) -> Mixes:
        """Mixes of two among the cheapest policies at these prices and the leanest policies."""
        order = self._ordered(int(math.sqrt(_PAIRS / self.block.repeats)))
        lean = np.argsort(self.measures[:, NEED] - self.measures[:, SAVED] + self.block.repeats * self.measures[:, SAVED])
        least = [int(lean[0]), *(int(at) for at in lean if self.ends[at])][:2]
        chosen = list(dict.fromkeys([*order, *least, int(self.measures[:, NEED].argmin())]))
        pairs = mixes_of_two(self.measures, self.ends, self.block.repeats, chosen, self._different, room)
        return thinned(pairs, pairs.measures[:, EXTRA] + self.host_price * pairs.measures[:, HOST])

    @property
    def host_price(self) -> float:
        """The price of a byte in host memory, in seconds."""
        return self._prices[-1].host

    def _ordered(self, count: int) -> list[int]:
        """The ``count`` cheapest policies at these prices, and some more that are legal for the last layer."""
        order = np.argsort(self.distance(self.codes), kind="stable")
        ends = [at for at in order if self.ends[at]]
        return list(dict.fromkeys([*map(int, order[:count]), *map(int, ends[: count // 3])]))

    def distance(self, codes: Array) -> Array:
        """For each policy, its cost above the cheapest policy so far, at the layer prices where this difference is least."""
        costs = [(self.table.cost(codes, price), self.table.cost(self.codes, price).min()) for price in self._prices]
        return np.min([cost - least for cost, least in costs], axis=0)

    @property
    def extra_seconds(self) -> float:
        return sum(count * float(self.measures[policy, EXTRA]) for policy, count in self.runs)

    @property
    def totals(self) -> tuple[float, float, float]:
        """The bytes these layers save, their peak above the bytes saved before them, and their bytes on the host."""
        saved = most = host = 0.0
        for policy, count in self.runs:
            measures = self.measures[policy]
            saved, host = saved + count * measures[SAVED], host + count * measures[HOST]
            most = max(most, saved - measures[SAVED] + measures[NEED])
        return saved, most, host

    def mix(self, room: Room) -> bool:
        """Take the best mix that fits in the room; whether it is faster than the current one."""
        chosen = list(dict.fromkeys([*(policy for policy, _ in self.runs), *self._ordered(_MIXED)]))
        return self._take(best_mix(self.measures, self.ends, self.block.repeats, room, orders(chosen, self._different)))

    def mix_beside(self, room: Room) -> bool:
        """Take the best mix of one neighbour and two current policies; whether it is faster."""
        used = list(dict.fromkeys(policy for policy, _ in self.runs))
        neighbours = np.unique(np.concatenate([self.table.neighbours(self.codes[policy]) for policy in used]), axis=0)
        neighbours = neighbours[np.argsort(self.distance(neighbours), kind="stable")[:_BESIDE]]
        before = len(self.codes)
        self.codes = np.concatenate([self.codes, neighbours])
        self._measure()
        new = list(range(before, len(self.codes)))
        triples = orders_beside(used, new, self._different)
        faster = self._take(best_mix(self.measures, self.ends, self.block.repeats, room, triples))
        if not faster:
            self.codes = self.codes[:before]
            self._measure()
        return faster

    @property
    def _different(self) -> int:
        return min(self.most, self.block.repeats)

    def _take(self, mix: Mix | None) -> bool:
        if mix is None or mix.extra_seconds >= self.extra_seconds - _FASTER * abs(self.extra_seconds):
            return False
        self.runs = mix.runs
        return True


class _Mixing:
    """One plan in the making."""

    def __init__(self, stack: Stack, hull: Hull, most: int, budget: float, host_budget: float, relaxed: Relaxed) -> None:
        self.stack, self.budget, self.host_budget = stack, budget, host_budget
        pairs = zip(stack.blocks, hull.kinds, strict=True)
        self.kinds = [_Kind(hull, block, runs, relaxed.prices, most) for block, runs in pairs]
        self._begin()
        self._improve()

    def policies(self) -> list[BlockPolicy]:
        """The policy of every single block, in forward order."""
        by_block: list[BlockPolicy] = []
        for kind in self.kinds:
            for policy, count in kind.runs:
                by_block += [kind.table.policy(kind.codes[policy])] * count
        return by_block

    def _begin(self) -> None:
        first_mixes = self._shared(self.budget)
        if first_mixes is None:
            raise infeasible(self.budget, self.host_budget, self._least())
        self._take(*first_mixes)

    def _shared(self, budget: float) -> tuple[list[Mixes], list[int]] | None:
        room = budget - self.stack.fixed_bytes
        mixes = [kind.mixes(room) for kind in self.kinds]
        # Hidden copies cost nothing, so host memory has a price only if it is scarce.
        chosen = shared(mixes, room, self.host_budget, self.kinds[-1].host_price) if room > 0 else None
        return None if chosen is None else (mixes, chosen)

    def _take(self, able: Sequence[Mixes], chosen: Sequence[int]) -> None:
        for kind, mixes, at in zip(self.kinds, able, chosen, strict=True):
            kind.runs = mixes.runs(at, kind.block.repeats)

    def _least(self) -> float | None:
        """The least budget for which a plan is found; None if no plan fits the host budget."""
        chosen = self._shared(math.inf)
        if chosen is None:
            return None
        low, high = max(self.budget, self.stack.fixed_bytes), math.inf
        while chosen is not None:
            self._take(*chosen)
            high = self._peak()
            if high - low <= _LEAST * high:
                return high
            while (chosen := self._shared((low + high) / 2)) is None and high - low > _LEAST * high:
                low = (low + high) / 2
        return high

    def _improve(self) -> None:
        for _ in range(_SWEEPS):
            faster = [kind.mix(self._room(at)) for at, kind in enumerate(self.kinds)]
            faster += [kind.mix_beside(self._room(at)) for at, kind in enumerate(self.kinds)]
            if not any(faster):
                return

    def _room(self, at: int) -> Room:
        """The memory that the other kinds leave to the kind at an index."""
        totals = [kind.totals for kind in self.kinds]
        behind = kept = 0.0
        for saved, need, _ in totals[at + 1 :]:
            behind, kept = max(behind, kept + need), kept + saved
        before = self.stack.fixed_bytes + sum(saved for saved, _, _ in totals[:at])
        host = self.host_budget - sum(host for place, (_, _, host) in enumerate(totals) if place != at)
        return Room(self.budget, before, behind, host)

    def _peak(self) -> float:
        kept = peak = self.stack.fixed_bytes
        for saved, need, _ in (kind.totals for kind in self.kinds):
            peak, kept = max(peak, kept + need), kept + saved
        return peak


def infeasible(budget: float, host_budget: float, least: float | None) -> InfeasibleBudget:
    """The error for a budget that no plan fits, with the least device memory that was reached."""
    if least is None:
        return InfeasibleBudget(
            f"host_budget={host_budget!r}: the residuals that can only be offloaded do not fit. Allow more host memory."
        )
    host = "" if math.isinf(host_budget) else f" with host_budget={host_budget!r}"
    return InfeasibleBudget(f"budget={budget!r} is not enough: the least reached{host} is {least!r} bytes.", least)
