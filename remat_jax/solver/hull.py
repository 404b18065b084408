"""What memory is worth: the policies on the hull of each block, and a bound that no plan is below, by column generation.

In the relaxed programme layers may be divided: so much of a run follows one policy, so much another. At its optimum every byte
has a price, and a policy that is missing belongs to it exactly if it is cheaper at these prices than those that are there. The
cheapest one is a cut (`table`), so that a round takes milliseconds. When none is cheaper, the value of the relaxed programme
bounds every plan (Gilmore and Gomory, Operations Research 9, 1961).
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from remat_jax.errors import SolverError
from remat_jax.solver.candidates import grow, unbeaten
from remat_jax.solver.problem import Block, Stack
from remat_jax.solver.table import EXTRA, HOST, NEED, SAVED, BlockTable, Prices

Array = Any
"""A NumPy array."""

ROUNDS = 40
"""How often prices are asked anew, at most."""

_NEAR = 1e-4
"""How near to the value of the relaxed programme its bound must come, relatively, for the rounds to end."""

_DEMANDS = 16
"""Blocks of which memory is demanded, as far as kinds share them; of each kind one at least."""

_FEW = 300
"""So many partial policies are carried along while all policies of a block are listed."""

_SEEDS, _TRANSIENT = 13, (0.0, 0.03, 0.3, 1.0)
"""Prices of a saved byte that the policies of a block begin with, and what share of it a transient byte costs."""


@dataclass(frozen=True)
class Relaxed:
    """The optimum of the relaxed programme.

    Attributes:
        bound: extra seconds that no plan is below; minus infinity where none is known.
        prices: of a byte, in seconds, for each run of the stack.
        over: bytes by which even this optimum is over one of the budgets; 0 where it fits.
    """

    bound: float
    prices: tuple[Prices, ...]
    over: float


@dataclass(frozen=True)
class _Optimum:
    """Of the relaxed programme over the policies that are there: its value, and what its rows are worth."""

    value: float
    over: float
    prices: tuple[Prices, ...]
    worth: tuple[float, ...]


class Hull:
    """The policies of a stack's blocks that are cheapest at some price. They grow with every budget that is asked about.

    A run is several equal blocks in a row. The blocks of a kind are several runs, each with its last block as a run of its own:
    memory is demanded of these blocks, and the more there are the higher is the bound.

    >>> from remat_jax.solver.problem import Residual
    >>> residuals = (Residual("x", 8.0), Residual("up", 32.0, 0.5, parents=("x",)))
    >>> hull = Hull(Stack((Block("layer", residuals, 1.0, 2.0, repeats=8),)))
    >>> round(hull.relaxed(200.0, math.inf).bound, 3), len(hull.policies(0))
    (1.875, 2)
    """

    def __init__(self, stack: Stack, known: Hull | None = None) -> None:
        """With `known`, of a stack that has other bytes and the same residuals, begin with its policies."""
        self.stack, self.runs, self.kinds = stack, *_split(stack)
        tables: dict[Block, int] = {}
        self._kind = [tables.setdefault(_nameless(run), len(tables)) for run in self.runs]
        self._tables = [BlockTable(block, stack.link) for block in tables]
        self._codes = [_seeds(table, sum(run.repeats for run in self.runs)) for table in self._tables]
        if known is not None:
            for kind, other in dict.fromkeys(zip(self._kind, known._kind, strict=True)):
                self._extend(kind, known._codes[other])

    def table(self, run: int) -> BlockTable:
        """The block of a run."""
        return self._tables[self._kind[run]]

    def policies(self, run: int) -> Array:
        """The codes of the policies of a run, one row each."""
        return self._codes[self._kind[run]]

    def add(self, run: int, codes: Array) -> bool:
        """Add a policy of a run; False where it is there or not legal in that run."""
        return self._extend(self._kind[run], codes[None])

    def _extend(self, kind: int, codes: Array) -> bool:
        """Add policies of a kind, behind those that are there; False where none is new and legal."""
        before = self._codes[kind]
        together = np.concatenate([before, codes[self._tables[kind].legal(codes)]])
        _, first = np.unique(together, axis=0, return_index=True)
        self._codes[kind] = together[np.sort(first)]
        return len(first) > len(before)

    def relaxed(self, budget: float, host_budget: float) -> Relaxed:
        """The optimum at a budget; the policies that it needs are added."""
        bound = -math.inf
        for _ in range(ROUNDS):
            found = self._optimum(budget, host_budget)
            cheapest: dict[tuple[int, Prices], tuple[Array, float]] = {}
            missing, new = 0.0, False
            for at, (kind, prices) in enumerate(zip(self._kind, found.prices, strict=True)):
                if (kind, prices) not in cheapest:
                    cheapest[kind, prices] = self._tables[kind].cheapest(prices)
                    new |= self.add(at, cheapest[kind, prices][0])
                missing += self.runs[at].repeats * min(0.0, cheapest[kind, prices][1] - found.worth[at])
            bound = max(bound, found.value + missing)
            if not new or found.value - bound <= _NEAR * abs(found.value):
                break
        return Relaxed(bound, found.prices, found.over)

    def _optimum(self, budget: float, host_budget: float) -> _Optimum:
        # A quarter of the time that importing remat_jax takes.
        from scipy.optimize import linprog

        measured = [self.table(at).measures(self.policies(at)) for at in range(len(self.runs))]
        owner = np.repeat(np.arange(len(self.runs)), [len(one) for one in measured])
        columns = np.concatenate(measured)
        ends = [at for at, run in enumerate(self.runs) if run.repeats == 1] if math.isfinite(budget) else []
        unit = columns[:, NEED].max() + self.stack.fixed_bytes or 1.0
        rows = [np.where(owner < at, columns[:, SAVED], np.where(owner == at, columns[:, NEED], 0.0)) / unit for at in ends]
        most = [(budget - self.stack.fixed_bytes) / unit] * len(ends)
        if math.isfinite(host_budget) and columns[:, HOST].any():
            rows.append(columns[:, HOST] / unit)
            most.append(host_budget / unit)
        # What is over the budgets costs more than any plan gains, so that there always is an optimum.
        scale = float(columns[:, EXTRA].max()) or 1.0
        cost = np.append(columns[:, EXTRA] / scale, _OVER * sum(run.repeats for run in self.runs))
        found = linprog(
            cost,
            A_ub=np.column_stack([np.stack(rows), -np.ones(len(rows))]) if rows else None,
            b_ub=np.array(most) if rows else None,
            A_eq=np.column_stack([owner == np.arange(len(self.runs))[:, None], np.zeros(len(self.runs))]).astype(float),
            b_eq=np.array([float(run.repeats) for run in self.runs]),
            method="highs",
        )
        if found.status != 0:
            raise SolverError(f"HiGHS could not solve the relaxed programme: {found.message}")
        worth = np.maximum(0.0, -found.ineqlin.marginals) * scale / unit if rows else np.zeros(0)
        host = float(worth[-1]) if len(rows) > len(ends) else 0.0
        own = dict(zip(ends, map(float, worth), strict=False))
        prices = tuple(
            Prices(sum(price for row, price in own.items() if row >= at), host, own.get(at, 0.0))
            for at in range(len(self.runs))
        )
        return _Optimum(
            float(found.fun) * scale, float(found.x[-1]) * unit, prices, tuple(map(float, found.eqlin.marginals * scale))
        )


_OVER = 1e3
"""What a unit of memory over the budget costs, beside the largest extra time of a block."""


def _split(stack: Stack) -> tuple[list[Block], list[range]]:
    """The runs of a stack, the last block of each being one by itself, and which of them are of which kind."""
    runs: list[Block] = []
    kinds: list[range] = []
    for block in stack.blocks:
        able = block if stack.link is not None else block.without_offload()
        pieces = min(block.repeats, max(1, _DEMANDS // len(stack.blocks)))
        borders = [block.repeats * piece // pieces for piece in range(pieces + 1)]
        first = len(runs)
        for start, stop in itertools.pairwise(borders):
            if stop - start > 1:
                runs.append(replace(able, repeats=stop - start - 1))
            runs.append(replace(able, repeats=1))
        kinds.append(range(first, len(runs)))
    if not stack.offload_last:
        runs[-1] = runs[-1].without_offload()
    return runs, kinds


def _nameless(block: Block) -> Block:
    """The block without names: equal layers have residuals of other names."""
    number = {one.name: str(at) for at, one in enumerate(block.residuals)}
    residuals = (
        replace(one, name=number[one.name], parents=tuple(number[parent] for parent in one.parents)) for one in block.residuals
    )
    return replace(block, name="block", residuals=tuple(residuals), repeats=1)


def _seeds(table: BlockTable, count: int) -> Array:
    """All policies that no other beats, where these are few; else those that are best at some prices."""
    few = grow(table.block, table.link is not None, _FEW)
    if few is None:
        return _swept(table, count)
    codes = np.array(few, np.int8).reshape(len(few), len(table.block.residuals))
    return codes[unbeaten(table.measures(codes))]


def _swept(table: BlockTable, count: int) -> Array:
    """The policies of a block at some prices: saved bytes from free to dearer than any time, and the leanest ones."""
    total = float(table.bytes.sum()) or 1.0
    known = table.seconds[np.isfinite(table.seconds)].sum() + table.block.forward_seconds + table.block.backward_seconds
    scale = float(known or 1.0) / total
    dear = 1e6 * scale
    steps = [scale * 10.0**step for step in np.linspace(-3, 2, _SEEDS)]
    prices = [Prices(), *(Prices(one, 0.0, weight * one) for one in steps for weight in _TRANSIENT)]
    prices += [Prices(dear * weight, 0.0, dear) for weight in (1.0, math.sqrt(count), float(count))]
    if table.link is not None:
        here = BlockTable(table.block, None)
        return np.unique(np.stack([one.cheapest(paid)[0] for paid in prices for one in (table, here)]), axis=0)
    return np.unique(np.stack([table.cheapest(one)[0] for one in prices]), axis=0)
