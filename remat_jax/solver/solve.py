"""The fastest plan found for a stack within its memory budgets, and a lower bound on the time of every plan.

`hull` solves the linear relaxation by column generation (Gilmore and Gomory, Operations Research 9, 1961), with a minimum s-t
cut per block (`table`; Picard, Management Science 22, 1976). The relaxation gives the lower bound and the prices of memory, its
dual values. `mix.shared` then finds a first plan by a dynamic program for a multiple-choice knapsack (Kellerer, Pferschy and
Pisinger, *Knapsack Problems*, 2004, chapter 11). `mix.best_mix` improves one kind of block at a time, in the memory that the
other kinds leave, until no kind gets faster. ``docs/how/planner.md`` states the guarantees and the gaps to the lower bound.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from remat_jax.errors import InfeasibleBudget
from remat_jax.solver.hull import Hull
from remat_jax.solver.mix import (
    Room,
    Runs,
    best_mix,
    cuts_help,
    first_mixes,
    joined,
    orders,
    orders_beside,
    runs_of,
    shared,
    totals,
)
from remat_jax.solver.policies import BlockPolicy, StackPlan, stack_plan
from remat_jax.solver.problem import Block, Stack, check_budget, check_count
from remat_jax.solver.table import CHOICES, EXTRA, HOST, NEED, SAVED, Array, Prices

MOST_POLICIES = 3
"""The maximum number of policies among blocks of one kind. Scanned layers become one scan per policy."""
_MIXED, _BESIDE = 12, 40
"""How many of the cheapest policies are mixed in every order, and how many neighbours (`BlockTable.neighbours`) are tried."""
_PAIRS = 20_000
"""About how many mixes of two policies the first plan considers for each kind: pairs of policies × layer counts."""
_SWEEPS = 6
"""The maximum number of sweeps over the kinds."""
_FASTER = 1e-9
"""The relative gain in seconds that a new mix must exceed to replace the current mix."""
_LEAST = 1e-3
"""The relative accuracy of the least peak memory that an `InfeasibleBudget` error states."""


class Solver:
    """Plans one stack for any number of budgets. Policies found for one budget are reused for the next.

    Args:
        stack: the blocks, the link to host memory, and the fixed bytes.
        most_policies: the maximum number of policies among blocks of one kind, from 1 to 3.
        earlier: a solver of a stack with the same residuals in other sizes; its policies are candidates from the start.

    >>> from remat_jax.solver.problem import Block, ResidualCosts
    >>> residuals = (ResidualCosts("x", 8.0), ResidualCosts("up", 32.0, 0.5, parents=("x",)))
    >>> plan = Solver(Stack((Block("layer", residuals, 1.0, 2.0, repeats=30),))).plan(700.0)
    >>> [policy.choices[1].value for policy in plan.policies].count("save"), plan.peak_bytes
    (14, 688.0)
    """

    def __init__(self, stack: Stack, most_policies: int = MOST_POLICIES, earlier: Solver | None = None) -> None:
        check_count("most_policies", most_policies, most=MOST_POLICIES)
        self.stack, self._most_policies = stack, most_policies
        self._hull: Hull = Hull(stack, None if earlier is None else earlier._hull)

    def add(self, policies: Sequence[BlockPolicy]) -> None:
        """Add a plan's policies as candidates for every later plan; ``policies`` has one per block, in forward order."""
        first = 0
        for run, block in enumerate(self._hull.runs):
            codes = [CHOICES.index(choice) for choice in policies[first].choices]
            self._hull.add(run, np.array(codes, np.int8))
            first += block.repeats

    def plan(self, budget: float = math.inf, host_budget: float = math.inf) -> StackPlan:
        """The fastest plan found within both budgets (in bytes); raises `InfeasibleBudget` if it finds no plan that fits."""
        bound, prices = self._relaxed(budget, host_budget)
        policies, cuts = self._mixed(budget, host_budget, prices)
        return stack_plan(self.stack, policies, bound=bound, cuts=cuts)

    def bound(self, budget: float = math.inf, host_budget: float = math.inf) -> float:
        """A lower bound on `StackPlan.extra_seconds` of every plan within both budgets (in bytes)."""
        return self._relaxed(budget, host_budget)[0]

    def _relaxed(self, budget: float, host_budget: float) -> tuple[float, list[tuple[Prices, ...]]]:
        check_budget("budget", budget)
        check_budget("host_budget", host_budget)
        bound, prices = self._hull.relaxed(budget, host_budget)
        return max(0.0, bound), prices

    def _mixed(
        self, budget: float, host_budget: float, prices: Sequence[Sequence[Prices]]
    ) -> tuple[list[BlockPolicy], tuple[int, ...]]:
        """The policy of each block, and where scans are cut (`StackPlan.cuts`)."""
        pairs = zip(self.stack.blocks, self._hull.kinds, strict=True)
        kinds = [_Kind(self._hull, block, runs, prices, self._most_policies) for block, runs in pairs]
        whole = Room(budget, before=self.stack.fixed_bytes, host=host_budget)
        if not _share(kinds, budget, whole):
            raise _infeasible(budget, host_budget, _least(kinds, whole))
        for _ in range(_SWEEPS):
            faster = [kind.mix(_room(kinds, at, whole)) for at, kind in enumerate(kinds)]
            faster += [kind.mix_beside(_room(kinds, at, whole)) for at, kind in enumerate(kinds)]
            if not any(faster):
                break
        for at, kind in enumerate(kinds):
            kind.runs = joined(kind.block, kind.measures, _room(kinds, at, whole), kind.runs)
        runs = [(kind.table.policy(kind.codes[policy]), count) for kind in kinds for policy, count in kind.runs]
        ends = itertools.accumulate(count for _, count in runs)
        neighbours = zip(itertools.pairwise(policy for policy, _ in runs), ends, strict=False)
        cuts = tuple(end for (one, other), end in neighbours if one == other and one.block.late_bytes)
        return [policy for policy, count in runs for _ in range(count)], cuts


def solve(
    stack: Stack, budget: float = math.inf, host_budget: float = math.inf, *, most_policies: int = MOST_POLICIES
) -> StackPlan:
    """The fastest plan found for one stack and one pair of budgets (in bytes). See `Solver`."""
    return Solver(stack, most_policies).plan(budget, host_budget)


class _Kind:
    """One kind of block during the search: its candidate policies and its current mix."""

    def __init__(self, hull: Hull, block: Block, runs: Sequence[int], prices: Sequence[Sequence[Prices]], most: int) -> None:
        self.block, self.layers, self._most = block, block.repeats, min(most, block.repeats)
        self._cuts = cuts_help(block, most)
        self._prices = list(dict.fromkeys(of_runs[run] for of_runs in prices for run in runs))
        self.host_price = prices[0][runs[-1]].host
        self.table, self._last = hull.table(runs[0]), hull.table(runs[-1])
        codes = np.unique(np.concatenate([hull.policies(runs[0]), hull.policies(runs[-1])]), axis=0)
        self.runs: Runs = ()
        self._set_policies(codes[self.table.legal(codes)])

    def _set_policies(self, codes: Array) -> None:
        self.codes, self.measures, self.ends = codes, self.table.measures(codes), self._last.legal(codes)

    def mixes(self, room: Room) -> Array:
        """Mixes for the first plan (`first_mixes`). The policies are the cheapest ones and those that need least memory.

        If host memory is limited, the cheapest policies that offload nothing, or least, are among them.
        """
        order = self._ordered(int(math.sqrt(_PAIRS / self.layers)))
        lean = np.argsort(self.measures[:, NEED] - self.measures[:, SAVED] + self.layers * self.measures[:, SAVED])
        least = [int(lean[0]), *(int(at) for at in lean if self.ends[at])][:2]
        if math.isfinite(room.host):
            fewest = self.measures[:, HOST].argsort(kind="stable")
            least += [int(fewest[0]), *(int(at) for at in lean if self.measures[at, HOST] <= self.measures[fewest[0], HOST])][
                :3
            ]
        least = list(dict.fromkeys([*least, int(self.measures[:, NEED].argmin())]))
        chosen = list(dict.fromkeys([*order, *least]))
        return first_mixes(
            self.block, self.measures, self.ends, chosen, least, self._most, room, self.host_price, cuts=self._cuts
        )

    def _ordered(self, count: int) -> list[int]:
        """Indices of the ``count`` cheapest policies, and of the ``count // 3`` cheapest that are legal for the last layer."""
        order = np.argsort(self._distance(self.codes), kind="stable")
        ends = [at for at in order if self.ends[at]]
        return list(dict.fromkeys([*map(int, order[:count]), *map(int, ends[: count // 3])]))

    def _distance(self, codes: Array) -> Array:
        """The cost of each policy minus the cost of the cheapest candidate, shape (policies,).

        The relaxation has prices for each run of this kind's blocks (`Stack.runs`). The result is the least difference
        over these prices.
        """
        costs = [(self.table.cost(codes, price), self.table.cost(self.codes, price).min()) for price in self._prices]
        return np.min([cost - least for cost, least in costs], axis=0)

    @property
    def totals(self) -> tuple[float, float, float]:
        """`totals` of the current mix."""
        return totals(self.block, self.measures, self.runs)

    def mix(self, room: Room) -> bool:
        """Replace the current mix if the best mix that fits in ``room`` is faster; returns whether the mix was replaced."""
        chosen = list(dict.fromkeys([*(policy for policy, _ in self.runs), *self._ordered(_MIXED)]))
        return self._take_best(room, orders(chosen, self._most))

    def mix_beside(self, room: Room) -> bool:
        """Like `mix`, for mixes of one neighbour (`BlockTable.neighbours`) and at most two current policies."""
        used, codes = list(dict.fromkeys(policy for policy, _ in self.runs)), self.codes
        neighbours = np.unique(np.concatenate([self.table.neighbours(codes[policy]) for policy in used]), axis=0)
        neighbours = neighbours[np.argsort(self._distance(neighbours), kind="stable")[:_BESIDE]]
        self._set_policies(np.concatenate([codes, neighbours]))
        faster = self._take_best(room, orders_beside(used, range(len(codes), len(self.codes)), self._most))
        if not faster:
            self._set_policies(codes)
        return faster

    def _take_best(self, room: Room, triples: Array) -> bool:
        mix = best_mix(self.block, self.measures, self.ends, room, triples, cuts=self._cuts)
        seconds = sum(count * float(self.measures[policy, EXTRA]) for policy, count in self.runs)
        if mix is None or mix[0] >= seconds - _FASTER * abs(seconds):
            return False
        self.runs = mix[1]
        return True


def _share(kinds: Sequence[_Kind], budget: float, whole: Room) -> bool:
    """Set each kind's mix by the dynamic program; returns False if it finds no combination within the budgets."""
    room = budget - whole.before
    # The late bytes of earlier kinds are free while a kind runs backward.
    late = itertools.accumulate((kind.layers * kind.block.late_bytes for kind in kinds), initial=0.0)
    rooms = [replace(whole, budget=budget, before=whole.before - free) for free in late]
    mixes = [kind.mixes(room_of) for kind, room_of in zip(kinds, rooms, strict=False)]
    # The price of host memory is the relaxation's dual value of the host budget. It is 0 unless this budget is scarce, because
    # host bytes cost nothing: only exposed copies take time.
    chosen = shared(mixes, room, whole.host, kinds[-1].host_price) if room > 0 else None
    if chosen is None:
        return False
    for kind, mix in zip(kinds, chosen, strict=True):
        kind.runs = runs_of(mix)
    return True


def _least(kinds: Sequence[_Kind], whole: Room) -> float | None:
    """The least device budget for which a plan is found, by bisection; None if no plan fits the host budget."""
    if not _share(kinds, math.inf, whole):
        return None
    low, high = max(whole.budget, whole.before), _peak(kinds, whole)
    while high - low > _LEAST * high:
        while not _share(kinds, (low + high) / 2, whole):
            if high - low <= _LEAST * high:
                return high
            low = (low + high) / 2
        high = _peak(kinds, whole)
    return high


def _peak(kinds: Sequence[_Kind], whole: Room) -> float:
    kept = peak = whole.before
    for saved, need, _ in (kind.totals for kind in kinds):
        peak, kept = max(peak, kept + need), kept + saved
    return float(peak)


def _room(kinds: Sequence[_Kind], at: int, whole: Room) -> Room:
    """The memory that the other kinds leave to kind number ``at``."""
    totals = [kind.totals for kind in kinds]
    behind = kept = 0.0
    for saved, need, _ in totals[at + 1 :]:
        behind, kept = max(behind, kept + need), kept + saved
    before = whole.before + sum(saved for saved, _, _ in totals[:at])
    host = whole.host - sum(host for place, (_, _, host) in enumerate(totals) if place != at)
    return Room(whole.budget, before, behind, host)


def _infeasible(budget: float, host_budget: float, least: float | None) -> InfeasibleBudget:
    """The error for a budget that no plan fits, with the least peak memory found."""
    if least is None:
        return InfeasibleBudget(
            f"host_budget={host_budget!r}: the residuals that can only be offloaded do not fit. Allow more host memory."
        )
    host = "" if math.isinf(host_budget) else f" with host_budget={host_budget!r}"
    return InfeasibleBudget(f"budget={budget!r} is too small: the least peak memory found{host} is {least!r} bytes.", least)
