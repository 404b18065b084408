"""The linear relaxation by column generation: prices of memory, and a lower bound on the extra seconds of every plan.

The relaxation lets a run of equal layers use several policies in fractions. Its dual values are prices of memory. A policy that
is not yet a column improves the relaxation only if it is cheaper at these prices than the columns. A minimum s-t cut finds the
cheapest policy (`table`) in milliseconds. If no policy is cheaper, the value of the relaxation is a lower bound on every plan
(Gilmore and Gomory, Operations Research 9, 1961). Otherwise the value plus the reduced costs is a Lagrangian bound.

If a block has few Pareto-optimal policies, all of them are columns from the start. `grow` enumerates them residual by residual
and prunes dominated partial policies.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from remat_jax.errors import SolverError
from remat_jax.solver.problem import Block, Choice, Stack
from remat_jax.solver.table import (
    CHOICES,
    EXTRA,
    HOST,
    NEED,
    OFFLOAD,
    RECOMPUTE,
    SAVE,
    SAVED,
    UNUSED,
    Array,
    BlockTable,
    Prices,
)

ROUNDS = 40
"""The maximum number of iterations of column generation."""
_NEAR = 1e-4
"""Column generation ends at this relative gap between the relaxation's value and the lower bound."""
_DEMANDS = 16
"""The total number of parts (`Stack.runs`), divided equally among the kinds; each kind has at least one part."""
_FEW = 300
"""The Pareto-optimal policies of a block are enumerated residual by residual (`grow`). If more than this many partial policies
are left after pruning, the cheapest policies at a range of prices are used instead (`_swept`)."""
_SEEDS, _TRANSIENT = 13, (0.0, 0.03, 0.3, 1.0)
"""If a block's policies are not enumerated, column generation starts with the cheapest policies at `_SEEDS` prices of a saved
byte. Each price is combined with several prices of a transient byte: the price times each number in `_TRANSIENT`."""
_LATE_SHARES = (0.5, 0.0)
"""The shares of the late bytes for which scanned layers have further prices."""
_OVER = 1e3
"""An excess of one `unit` of memory over a budget (`_optimum`) costs this number × the number of blocks × the largest extra
seconds of a policy."""


class Hull:
    """For each block of a stack, the policies that are cheapest at some prices. Each new budget may add policies.

    `Stack.runs` splits each kind into runs and makes the last block of each run a run of its own. Only runs of one block have a
    memory constraint; more constraints give a higher lower bound. `kinds` has the indices of each kind's runs.

    >>> from remat_jax.solver.problem import ResidualCosts
    >>> residuals = (ResidualCosts("x", 8.0), ResidualCosts("up", 32.0, 0.5, parents=("x",)))
    >>> hull = Hull(Stack((Block("layer", residuals, 1.0, 2.0, repeats=8),)))
    >>> round(hull.relaxed(200.0, math.inf)[0], 3), len(hull.policies(0))
    (1.875, 2)
    """

    def __init__(self, stack: Stack, earlier: Hull | None = None) -> None:
        """Start with `_seeds`, and with the policies of ``earlier``, whose stack has the same residuals in other sizes."""
        self.stack, self.runs = stack, stack.runs(max(1, _DEMANDS // len(stack.blocks)))
        self.kinds = [[at for at, run in enumerate(self.runs) if run.name == block.name] for block in stack.blocks]
        tables: dict[Block, int] = {}
        self._kind = [tables.setdefault(_nameless(run), len(tables)) for run in self.runs]
        self._tables = [BlockTable(block, stack.link) for block in tables]
        self._codes = [_seeds(table, sum(run.repeats for run in self.runs)) for table in self._tables]
        if earlier is not None:
            for kind, other in dict.fromkeys(zip(self._kind, earlier._kind, strict=True)):
                self._extend(kind, earlier._codes[other])

    def table(self, run: int) -> BlockTable:
        """The table of a run's block."""
        return self._tables[self._kind[run]]

    def policies(self, run: int) -> Array:
        """The codes of a run's policies, shape (policies, residuals)."""
        return self._codes[self._kind[run]]

    def add(self, run: int, codes: Array) -> bool:
        """Add a policy, shape (residuals,), to a run; returns False if the run already has it or it is not legal there."""
        return self._extend(self._kind[run], codes[None])

    def _extend(self, kind: int, codes: Array) -> bool:
        """Append policies, shape (policies, residuals), to a table's policies; returns False if none is new and legal."""
        before = self._codes[kind]
        joined = np.concatenate([before, codes[self._tables[kind].legal(codes)]])
        _, first = np.unique(joined, axis=0, return_index=True)
        self._codes[kind] = joined[np.sort(first)]
        return len(first) > len(before)

    def relaxed(self, budget: float, host_budget: float) -> tuple[float, list[tuple[Prices, ...]]]:
        """A lower bound on every plan's extra seconds, and each run's prices; adds the policies that the optimum needs.

        The bound lets every layer be a scan of its own. If layers have late bytes, scans need more memory than that, but less
        than if all late bytes were allocated from the start: there are prices of both, and of a case between them.
        """
        bound, prices = self._relaxed(budget, host_budget, 1.0)
        if not any(block.late_bytes for block in self.stack.blocks):
            return bound, [prices]
        return bound, [prices, *(self._relaxed(budget, host_budget, share)[1] for share in _LATE_SHARES)]

    def _relaxed(self, budget: float, host_budget: float, late: float) -> tuple[float, tuple[Prices, ...]]:
        """The bound and the prices if the share ``late`` of the late bytes is allocated late."""
        bound = -math.inf
        for _ in range(ROUNDS):
            value, prices, worth = self._optimum(budget, host_budget, late)
            cheapest: dict[tuple[int, Prices], tuple[Array, float]] = {}
            missing, new = 0.0, False
            for run, at_prices in enumerate(zip(self._kind, prices, strict=True)):
                if at_prices not in cheapest:
                    cheapest[at_prices] = self.table(run).cheapest(prices[run])
                    new |= self.add(run, cheapest[at_prices][0])
                missing += self.runs[run].repeats * min(0.0, cheapest[at_prices][1] - worth[run])
            bound = max(bound, value + missing)
            if not new or value - bound <= _NEAR * abs(value):
                break
        return bound, prices

    def _optimum(self, budget: float, host_budget: float, late: float) -> tuple[float, tuple[Prices, ...], tuple[float, ...]]:
        """The relaxation over the current policies: its value, each run's prices, and each run's dual value per block.

        The dual values are of the policies' costs at these prices (`BlockTable.cost`), which do not count late bytes.
        """
        # Imported here: SciPy takes a quarter of remat_jax's import time.
        from scipy.optimize import linprog

        measured = [self.table(run).measures(self.policies(run)) for run in range(len(self.runs))]
        runs = np.arange(len(self.runs))
        owner = np.repeat(runs, [len(measures) for measures in measured])
        columns = np.concatenate(measured)
        ends = [at for at, run in enumerate(self.runs) if run.repeats == 1] if math.isfinite(budget) else []
        unit = columns[:, NEED].max() + self.stack.fixed_bytes or 1.0
        rows = [np.where(owner < at, columns[:, SAVED], np.where(owner == at, columns[:, NEED], 0.0)) / unit for at in ends]
        # All late bytes of earlier layers are free, whichever policies these have.
        free = np.cumsum([0.0, *(late * run.repeats * run.late_bytes for run in self.runs)])
        limits = [(budget - self.stack.fixed_bytes + free[at]) / unit for at in ends]
        if math.isfinite(host_budget) and columns[:, HOST].any():
            rows.append(columns[:, HOST] / unit)
            limits.append(host_budget / unit)
        # The last column is the excess over the budgets, at a high cost (`_OVER`), so the linear program is always feasible.
        scale = float(columns[:, EXTRA].max()) or 1.0
        solution = linprog(
            np.append(columns[:, EXTRA] / scale, _OVER * sum(run.repeats for run in self.runs)),
            A_ub=np.column_stack([np.stack(rows), -np.ones(len(rows))]) if rows else None,
            b_ub=np.array(limits) if rows else None,
            A_eq=np.column_stack([owner == runs[:, None], np.zeros(len(runs))]).astype(float),
            b_eq=np.array([float(run.repeats) for run in self.runs]),
            method="highs",
        )
        if solution.status != 0:
            raise SolverError(f"HiGHS could not solve the relaxed programme: {solution.message}")
        worth = np.maximum(0.0, -solution.ineqlin.marginals) * scale / unit if rows else np.zeros(0)
        host = float(worth[-1]) if len(rows) > len(ends) else 0.0
        transient_prices = dict(zip(ends, map(float, worth), strict=False))
        prices = tuple(
            Prices(sum(price for end, price in transient_prices.items() if end >= at), host, transient_prices.get(at, 0.0))
            for at in range(len(self.runs))
        )
        return float(solution.fun) * scale, prices, tuple(map(float, solution.eqlin.marginals * scale))


def _nameless(block: Block) -> Block:
    """The block with numbers as names, so that blocks that differ only in names are equal."""
    pairs = zip(block.residuals, block.parents, strict=True)
    residuals = tuple(
        replace(residual, name=str(at), parents=tuple(map(str, parents))) for at, (residual, parents) in enumerate(pairs)
    )
    return replace(block, name="block", residuals=residuals, repeats=1)


def _seeds(table: BlockTable, count: int) -> Array:
    """All Pareto-optimal policies of a block if they are few; otherwise the cheapest policies at a range of prices."""
    codes = grow(table.block, table.link is not None, _FEW)
    return _swept(table, count) if codes is None else codes[unbeaten(table.measures(codes))]


def _swept(table: BlockTable, count: int) -> Array:
    """The cheapest policies of a block at a range of prices.

    The prices of a saved byte are 0, and 0.001 to 100 times `scale` (the block's total seconds per byte). The other
    prices (`dear`) are so high that almost only memory counts.
    """
    recompute_seconds = table.seconds[table.allowed[:, RECOMPUTE]].sum()
    total_seconds = recompute_seconds + table.block.forward_seconds + table.block.backward_seconds
    scale = float(total_seconds or 1.0) / (float(table.bytes.sum()) or 1.0)
    dear = 1e6 * scale
    steps = [scale * 10.0**step for step in np.linspace(-3, 2, _SEEDS)]
    prices = [Prices(), *(Prices(saved, 0.0, weight * saved) for saved in steps for weight in _TRANSIENT)]
    prices += [Prices(dear * weight, 0.0, dear) for weight in (1.0, math.sqrt(count), float(count))]
    tables = [table] if table.link is None else [table, BlockTable(table.block, None)]
    return np.unique(np.stack([each.cheapest(price)[0] for price in prices for each in tables]), axis=0)


def unbeaten(points: Array) -> list[int]:
    """The indices of the Pareto-optimal rows of ``points``, in lexicographic order; of equal rows, only the first.

    >>> unbeaten(np.array([[2.0, 1.0], [1.0, 2.0], [2.0, 2.0], [1.0, 2.0]]))
    [1, 0]
    """
    remaining = np.lexsort(tuple(points.T[::-1]))
    optimal = []
    while remaining.size:
        # In lexicographic order, no later row dominates the first row, unless it is equal.
        first = remaining[0]
        optimal.append(int(first))
        remaining = remaining[(points[remaining] < points[first]).any(axis=1)]
    return optimal


def grow(block: Block, offloads: bool, most: int) -> Array | None:
    """The codes of all Pareto-optimal policies, shape (policies, residuals); None if there are over ``most`` partial policies.

    The objectives are: bytes saved, bytes that the block needs during its own backward pass, bytes in host memory, and extra
    seconds. Each objective is monotone in four sums over the residuals: bytes saved, needed and offloaded, and seconds of
    keeping and recomputing. So a partial policy is pruned if another partial policy is no larger in any sum, and if both
    leave the same parents of undecided residuals unused.

    >>> from remat_jax.solver.problem import ResidualCosts
    >>> block = Block("layer", (ResidualCosts("x", 8.0), ResidualCosts("up", 32.0, 0.5, parents=("x",))), 1.0, 2.0)
    >>> sorted(grow(block, offloads=False, most=100).tolist())  # of x and up: 0 saved, 2 recomputed
    [[0, 0], [0, 2]]
    """
    open_until = _last_uses(block)
    codes = np.zeros((1, len(block.residuals)), np.int8)
    # Columns: bytes saved, bytes needed during the backward pass, bytes offloaded, seconds of keeping and recomputing.
    sums = np.zeros((1, 4))
    for step, index in enumerate(block.order):
        choices = [choice for choice in block.residuals[index].choices if offloads or choice is not Choice.OFFLOAD]
        grown = [_choose(block, index, CHOICES.index(choice), codes, sums) for choice in choices]
        codes, sums = (np.concatenate(parts) for parts in zip(*grown, strict=True))
        visible = [residual for residual in block.order[: step + 1] if open_until[residual] > step]
        kept = _unbeaten_in_groups(codes[:, visible] == UNUSED, sums)
        if len(kept) > most:
            return None
        codes, sums = codes[kept], sums[kept]
    return codes


def _choose(block: Block, index: int, code: int, codes: Array, sums: Array) -> tuple[Array, Array]:
    """The partial policies and sums after one more choice; a policy that would recompute from an unused parent is dropped."""
    if code == RECOMPUTE:
        legal = (codes[:, list(block.parents[index])] != UNUSED).all(axis=1)
        codes, sums = codes[legal], sums[legal]
    codes = codes.copy()
    codes[:, index] = code
    residual = block.residuals[index]
    fetched, recomputed = block.fetched_share * residual.bytes, block.recomputed_share * residual.bytes
    added = {
        SAVE: (residual.bytes, residual.bytes, 0.0, residual.kept_seconds),
        OFFLOAD: (0.0, fetched, residual.bytes, residual.kept_seconds),
        RECOMPUTE: (0.0, recomputed, 0.0, residual.seconds or 0.0),
        UNUSED: (0.0, 0.0, 0.0, 0.0),
    }
    return codes, sums + added[code]


def _last_uses(block: Block) -> list[int]:
    """For each residual, the index in `Block.order` of its last child; -1 if it has no child or the backward pass reads it."""
    last_use = [-1] * len(block.residuals)
    for step, index in enumerate(block.order):
        for parent in block.parents[index]:
            if not block.residuals[parent].needed:
                last_use[parent] = step
    return last_use


def _unbeaten_in_groups(flags: Array, sums: Array) -> list[int]:
    """The indices of the rows of ``sums`` that are Pareto-optimal among the rows with equal ``flags``."""
    _, groups = np.unique(flags, axis=0, return_inverse=True)
    optimal: list[int] = []
    for group in range(int(groups.max()) + 1):
        rows = np.flatnonzero(groups.ravel() == group)
        optimal += [int(rows[index]) for index in unbeaten(sums[rows])]
    return optimal
