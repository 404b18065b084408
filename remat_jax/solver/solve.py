"""The fastest plan of a stack within its budgets: policies on the hull, mixed by counts, kind after kind.

The relaxed programme (`hull`) prices memory and bounds every plan from below. At slightly higher prices each block's cheapest
policy makes a plan that fits; from there each kind of block in turn takes the best mix of at most three policies in the room
that the others leave it (`mix`), and then of policies beside those it has, until nothing gets faster. What is promised, and how
near to the bound plans are, is in ``docs/how/planner.md``.
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
"""Different policies among blocks of one kind, at most: layers that are scanned become as many scans."""

_MIXED, _BESIDE = 12, 40
"""Policies that are mixed in all orders, and neighbours of a plan's policies that are tried beside two others."""

_PAIRS = 20_000
"""Mixes of two policies of one kind that are looked at in the beginning: pairs × counts."""

_SWEEPS = 6
"""How often every kind is mixed anew, at most."""

_FASTER = 1e-9
"""By how much a mix must be faster, relatively, to be taken."""

_LEAST = 1e-3
"""How exactly the least memory is looked for where nothing fits, relatively."""


class Solver:
    """Plans for one stack. What it learns of the blocks at one budget serves the others.

    Args:
        stack: the blocks.
        most_policies: how many different policies blocks of one kind may have, 1 to 3.
        known: a solver of a stack that has other bytes and the same residuals.

    Raises:
        PlanningError: ``most_policies`` is not 1, 2 or 3.

    >>> from remat_jax.solver.problem import Block, Residual
    >>> residuals = (Residual("x", 8.0), Residual("up", 32.0, 0.5, parents=("x",)))
    >>> plan = Solver(Stack((Block("layer", residuals, 1.0, 2.0, repeats=30),))).plan(700.0)
    >>> [(one.first, one.count, one.policy.choices[1].value) for one in plan.ranges], plan.peak_bytes
    ([(0, 16, 'recompute'), (16, 14, 'save')], 688.0)
    """

    def __init__(self, stack: Stack, most_policies: int = MOST_POLICIES, known: Solver | None = None) -> None:
        check_count("most_policies", most_policies, most=MOST_POLICIES)
        self.stack, self.most = stack, most_policies
        self._hull: Hull = Hull(stack, None if known is None else known._hull)

    def add(self, policies: Sequence[BlockPolicy]) -> None:
        """Make a policy known, one for every single block in forward order: a plan is no slower than with these."""
        codes = [np.array([_CODES[choice] for choice in one.choices], np.int8) for one in policies]
        place = 0
        for run, block in enumerate(self._hull.runs):
            self._hull.add(run, codes[place])
            place += block.repeats

    def plan(self, budget: float = math.inf, host_budget: float = math.inf) -> StackPlan:
        """The fastest plan that is found within both budgets; ``lower_bound`` says how much faster another could be.

        Raises:
            InfeasibleBudget: nothing that was found fits; the message says the least device memory that was reached.
            PlanningError: a budget is not a positive number of bytes.
        """
        check_budget("budget", budget)
        check_budget("host_budget", host_budget)
        relaxed = self._hull.relaxed(budget, host_budget)
        mixing = _Mixing(self.stack, self._hull, self.most, budget, host_budget, relaxed)
        return stack_plan(self.stack, mixing.policies(), bound=max(0.0, relaxed.bound))

    def bound(self, budget: float = math.inf, host_budget: float = math.inf) -> float:
        """Seconds beyond saving everything that no plan within both budgets is below; `plan` has it as ``lower_bound``.

        Raises:
            PlanningError: a budget is not a positive number of bytes.
        """
        check_budget("budget", budget)
        check_budget("host_budget", host_budget)
        return max(0.0, self._hull.relaxed(budget, host_budget).bound)


def solve(
    stack: Stack, budget: float = math.inf, host_budget: float = math.inf, *, most_policies: int = MOST_POLICIES
) -> StackPlan:
    """`Solver.plan` of one budget."""
    return Solver(stack, most_policies).plan(budget, host_budget)


_CODES = {choice: code for code, choice in enumerate(CHOICES)}


class _Kind:
    """The layers of one kind in the making of a plan: policies, and how many layers in a row follow which of them."""

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
        """Mixes of two of the policies that are worth most at these prices, and of the leanest."""
        order = self._ordered(int(math.sqrt(_PAIRS / self.block.repeats)))
        lean = np.argsort(self.measures[:, NEED] - self.measures[:, SAVED] + self.block.repeats * self.measures[:, SAVED])
        least = [int(lean[0]), *(int(at) for at in lean if self.ends[at])][:2]
        chosen = list(dict.fromkeys([*order, *least, int(self.measures[:, NEED].argmin())]))
        found = mixes_of_two(self.measures, self.ends, self.block.repeats, chosen, self._different, room)
        return thinned(found, found.measures[:, EXTRA] + self.host_price * found.measures[:, HOST])

    @property
    def host_price(self) -> float:
        """Of a byte in host memory, in seconds."""
        return self._prices[-1].host

    def _ordered(self, count: int) -> list[int]:
        """So many policies that are worth most at these prices, and some more such as the last layer may follow."""
        order = np.argsort(self.distance(self.codes), kind="stable")
        ends = [at for at in order if self.ends[at]]
        return list(dict.fromkeys([*map(int, order[:count]), *map(int, ends[: count // 3])]))

    def distance(self, codes: Array) -> Array:
        """How much dearer policies are than the cheapest that is known, wherever among these layers that is least."""
        costs = [(self.table.cost(codes, one), self.table.cost(self.codes, one).min()) for one in self._prices]
        return np.min([cost - least for cost, least in costs], axis=0)

    @property
    def extra_seconds(self) -> float:
        return sum(count * float(self.measures[policy, EXTRA]) for policy, count in self.runs)

    @property
    def totals(self) -> tuple[float, float, float]:
        """Bytes saved, the most that is needed beside what was there before, and bytes on the host."""
        saved = most = host = 0.0
        for policy, count in self.runs:
            one = self.measures[policy]
            saved, host = saved + count * one[SAVED], host + count * one[HOST]
            most = max(most, saved - one[SAVED] + one[NEED])
        return saved, most, host

    def mix(self, room: Room) -> bool:
        """The best mix in a room; whether it is faster than what was there."""
        chosen = list(dict.fromkeys([*(policy for policy, _ in self.runs), *self._ordered(_MIXED)]))
        return self._take(best_mix(self.measures, self.ends, self.block.repeats, room, orders(chosen, self._different)))

    def mix_beside(self, room: Room) -> bool:
        """The same with the neighbours of the policies that are used, each beside two of these."""
        used = list(dict.fromkeys(policy for policy, _ in self.runs))
        beside = np.unique(np.concatenate([self.table.neighbours(self.codes[one]) for one in used]), axis=0)
        beside = beside[np.argsort(self.distance(beside), kind="stable")[:_BESIDE]]
        known = len(self.codes)
        self.codes = np.concatenate([self.codes, beside])
        self._measure()
        new = list(range(known, len(self.codes)))
        triples = orders_beside(used, new, self._different)
        faster = self._take(best_mix(self.measures, self.ends, self.block.repeats, room, triples))
        if not faster:
            self.codes = self.codes[:known]
            self._measure()
        return faster

    @property
    def _different(self) -> int:
        return min(self.most, self.block.repeats)

    def _take(self, found: Mix | None) -> bool:
        if found is None or found.extra_seconds >= self.extra_seconds - _FASTER * abs(self.extra_seconds):
            return False
        self.runs = found.runs
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
        """Of every single block, in forward order."""
        found: list[BlockPolicy] = []
        for kind in self.kinds:
            for policy, count in kind.runs:
                found += [kind.table.policy(kind.codes[policy])] * count
        return found

    def _begin(self) -> None:
        found = self._shared(self.budget)
        if found is None:
            raise infeasible(self.budget, self.host_budget, self._least())
        self._take(*found)

    def _shared(self, budget: float) -> tuple[list[Mixes], list[int]] | None:
        room = budget - self.stack.fixed_bytes
        able = [kind.mixes(room) for kind in self.kinds]
        # What is hidden of copies costs nothing, so that a price of the host's is needed only where it is short.
        chosen = shared(able, room, self.host_budget, self.kinds[-1].host_price) if room > 0 else None
        return None if chosen is None else (able, chosen)

    def _take(self, able: Sequence[Mixes], chosen: Sequence[int]) -> None:
        for kind, mixes, at in zip(self.kinds, able, chosen, strict=True):
            kind.runs = mixes.runs(at, kind.block.repeats)

    def _least(self) -> float | None:
        """The least budget within which something is found; None where the host's is too small for anything."""
        found = self._shared(math.inf)
        if found is None:
            return None
        low, high = max(self.budget, self.stack.fixed_bytes), math.inf
        while found is not None:
            self._take(*found)
            high = self._peak()
            if high - low <= _LEAST * high:
                return high
            while (found := self._shared((low + high) / 2)) is None and high - low > _LEAST * high:
                low = (low + high) / 2
        return high

    def _improve(self) -> None:
        for _ in range(_SWEEPS):
            faster = [kind.mix(self._room(at)) for at, kind in enumerate(self.kinds)]
            faster += [kind.mix_beside(self._room(at)) for at, kind in enumerate(self.kinds)]
            if not any(faster):
                return

    def _room(self, at: int) -> Room:
        """What the other kinds leave to the one at a place."""
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
    """The error that says that nothing fits, and the least device memory that was reached."""
    if least is None:
        return InfeasibleBudget(
            f"host_budget={host_budget!r}: what can only be offloaded does not fit. Allow more host memory."
        )
    host = "" if math.isinf(host_budget) else f" with host_budget={host_budget!r}"
    return InfeasibleBudget(f"budget={budget!r} is not enough: the least that was reached{host} is {least!r} bytes.", least)
