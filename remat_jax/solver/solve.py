"""The fastest plan of a stack within its budgets: policies on the hull, mixed by counts, kind after kind.

The linear relaxation (`hull`) prices memory and bounds every plan from below. A dynamic programme over the kinds (`shares`)
makes a first plan that fits. Then each kind of block in turn takes the best mix of at most three policies in the memory left by
the other kinds (`mix`), and tries neighbours of its policies, until no kind gets faster. ``docs/how/planner.md`` states the
guarantees and the gaps to the bound. `planning.propose_candidates` calls `Solver.plan`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from remat_jax.errors import InfeasibleBudget
from remat_jax.solver.hull import Hull
from remat_jax.solver.mix import Room, Runs, best_mix, orders, orders_beside
from remat_jax.solver.policies import BlockPolicy, StackPlan, stack_plan
from remat_jax.solver.problem import Block, Stack, check_budget, check_count
from remat_jax.solver.shares import mixes_of_two, runs_of, shared
from remat_jax.solver.table import CHOICES, EXTRA, HOST, NEED, SAVED, Array, Prices

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
        earlier: another solver for the same residuals with other bytes; its policies are the first candidates.

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
        """Add the policies of a plan, one for each single block in forward order.

        A later plan is no slower than this plan, wherever this plan fits.
        """
        first = 0
        for run, block in enumerate(self._hull.runs):
            codes = [CHOICES.index(choice) for choice in policies[first].choices]
            self._hull.add(run, np.array(codes, np.int8))
            first += block.repeats

    def plan(self, budget: float = math.inf, host_budget: float = math.inf) -> StackPlan:
        """The fastest plan found within both budgets, in bytes; `InfeasibleBudget` if no plan was found that fits."""
        bound, prices = self._relaxed(budget, host_budget)
        return stack_plan(self.stack, self._mixed(budget, host_budget, prices), bound=bound)

    def bound(self, budget: float = math.inf, host_budget: float = math.inf) -> float:
        """A lower bound on the seconds, beyond saving everything, of any plan within both budgets."""
        return self._relaxed(budget, host_budget)[0]

    def _relaxed(self, budget: float, host_budget: float) -> tuple[float, tuple[Prices, ...]]:
        check_budget("budget", budget)
        check_budget("host_budget", host_budget)
        bound, prices = self._hull.relaxed(budget, host_budget)
        return max(0.0, bound), prices

    def _mixed(self, budget: float, host_budget: float, prices: Sequence[Prices]) -> list[BlockPolicy]:
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
        runs = [(kind.table.policy(kind.codes[policy]), count) for kind in kinds for policy, count in kind.runs]
        return [policy for policy, count in runs for _ in range(count)]


def solve(
    stack: Stack, budget: float = math.inf, host_budget: float = math.inf, *, most_policies: int = MOST_POLICIES
) -> StackPlan:
    """`Solver.plan` for one budget."""
    return Solver(stack, most_policies).plan(budget, host_budget)


class _Kind:
    """The layers of one kind while a plan is made: their possible policies, and the mix so far."""

    def __init__(self, hull: Hull, block: Block, runs: Sequence[int], prices: Sequence[Prices], most: int) -> None:
        self.layers, self._most = block.repeats, min(most, block.repeats)
        self._prices = list(dict.fromkeys(prices[run] for run in runs))
        self.host_price = self._prices[-1].host
        self.table, self._last = hull.table(runs[0]), hull.table(runs[-1])
        codes = np.unique(np.concatenate([hull.policies(runs[0]), hull.policies(runs[-1])]), axis=0)
        self.runs: Runs = ()
        self._set_policies(codes[self.table.legal(codes)])

    def _set_policies(self, codes: Array) -> None:
        self.codes, self.measures, self.ends = codes, self.table.measures(codes), self._last.legal(codes)

    def mixes(self, room: float) -> Array:
        """Mixes of two among the cheapest policies at these prices and the leanest policies."""
        order = self._ordered(int(math.sqrt(_PAIRS / self.layers)))
        lean = np.argsort(self.measures[:, NEED] - self.measures[:, SAVED] + self.layers * self.measures[:, SAVED])
        least = [int(lean[0]), *(int(at) for at in lean if self.ends[at])][:2]
        chosen = list(dict.fromkeys([*order, *least, int(self.measures[:, NEED].argmin())]))
        return mixes_of_two(self.measures, self.ends, self.layers, chosen, self._most, room, self.host_price)

    def _ordered(self, count: int) -> list[int]:
        """The ``count`` cheapest policies at these prices, and some more that are legal for the last layer."""
        order = np.argsort(self._distance(self.codes), kind="stable")
        ends = [at for at in order if self.ends[at]]
        return list(dict.fromkeys([*map(int, order[:count]), *map(int, ends[: count // 3])]))

    def _distance(self, codes: Array) -> Array:
        """For each policy, its cost above the cheapest policy so far, at the layer prices where this difference is least."""
        costs = [(self.table.cost(codes, price), self.table.cost(self.codes, price).min()) for price in self._prices]
        return np.min([cost - least for cost, least in costs], axis=0)

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
        return self._take_best(room, orders(chosen, self._most))

    def mix_beside(self, room: Room) -> bool:
        """Take the best mix of one neighbour and two current policies; whether it is faster."""
        used, codes = list(dict.fromkeys(policy for policy, _ in self.runs)), self.codes
        neighbours = np.unique(np.concatenate([self.table.neighbours(codes[policy]) for policy in used]), axis=0)
        neighbours = neighbours[np.argsort(self._distance(neighbours), kind="stable")[:_BESIDE]]
        self._set_policies(np.concatenate([codes, neighbours]))
        faster = self._take_best(room, orders_beside(used, range(len(codes), len(self.codes)), self._most))
        if not faster:
            self._set_policies(codes)
        return faster

    def _take_best(self, room: Room, triples: Array) -> bool:
        mix = best_mix(self.measures, self.ends, self.layers, room, triples)
        seconds = sum(count * float(self.measures[policy, EXTRA]) for policy, count in self.runs)
        if mix is None or mix[0] >= seconds - _FASTER * abs(seconds):
            return False
        self.runs = mix[1]
        return True


def _share(kinds: Sequence[_Kind], budget: float, whole: Room) -> bool:
    """Give each kind a mix, so that all kinds fit the budget; False if no combination was found that fits."""
    room = budget - whole.before
    mixes = [kind.mixes(room) for kind in kinds]
    # Hidden copies cost nothing, so host memory has a price only if it is scarce.
    chosen = shared(mixes, room, whole.host, kinds[-1].host_price) if room > 0 else None
    if chosen is None:
        return False
    for kind, mix in zip(kinds, chosen, strict=True):
        kind.runs = runs_of(mix, kind.layers)
    return True


def _least(kinds: Sequence[_Kind], whole: Room) -> float | None:
    """The least budget for which a plan is found; None if no plan fits the host budget."""
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
    return peak


def _room(kinds: Sequence[_Kind], at: int, whole: Room) -> Room:
    """The memory that the other kinds leave to the kind at an index."""
    totals = [kind.totals for kind in kinds]
    behind = kept = 0.0
    for saved, need, _ in totals[at + 1 :]:
        behind, kept = max(behind, kept + need), kept + saved
    before = whole.before + sum(saved for saved, _, _ in totals[:at])
    host = whole.host - sum(host for place, (_, _, host) in enumerate(totals) if place != at)
    return Room(whole.budget, before, behind, host)


def _infeasible(budget: float, host_budget: float, least: float | None) -> InfeasibleBudget:
    """The error for a budget that no plan fits, with the least device memory that was reached."""
    if least is None:
        return InfeasibleBudget(
            f"host_budget={host_budget!r}: the residuals that can only be offloaded do not fit. Allow more host memory."
        )
    host = "" if math.isinf(host_budget) else f" with host_budget={host_budget!r}"
    return InfeasibleBudget(f"budget={budget!r} is not enough: the least reached{host} is {least!r} bytes.", least)
