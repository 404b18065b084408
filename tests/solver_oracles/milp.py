"""A mixed-integer linear programme, built row by row and solved by HiGHS through SciPy."""

from __future__ import annotations

import ctypes
import math
import os
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from remat_jax.errors import SolverError

GAP = 1e-4
"""Default relative gap between a solution and the bound, of the extra time, not of the whole step."""

TIME_LIMIT = 60.0
"""Default time limit of one solution, in seconds."""

ROUNDING = 1e-12
"""The relative excess over a budget that sums in another order may have."""

_BROKEN = 1e-4
"""The allowed violation of rows; HiGHS's own tolerance is 1e-6 for each rounded variable."""

_TIMED_OUT = "Time limit reached"
"""HiGHS's message for a time limit; other limits have other messages."""

_LARGEST_COST = 1e3
"""HiGHS also stops at an absolute gap of 1e-6: costs are scaled so that this is less than any requested relative gap."""


@dataclass(frozen=True)
class Solution:
    """A solution: the variables, the objective, and a lower bound of the objective.

    ``timed_out`` says whether the time limit ended it: then the same programme may have another answer on another day.
    """

    values: tuple[float, ...]
    objective: float
    bound: float
    timed_out: bool = False


@dataclass(frozen=True)
class Relaxation:
    """The least objective with real variables, the reduced costs of variables, and the duals of the rows."""

    objective: float
    reduced_costs: tuple[float, ...]
    prices: tuple[float, ...]


def is_out_of_time(error: SolverError) -> bool:
    """Whether the time limit ended the search before any solution was found."""
    return _TIMED_OUT in str(error)


def unit_beside(sizes: Iterable[float], limit: float) -> float:
    """A unit for a variable that shares rows with ``sizes`` and limits as large as ``limit``: the largest of these.

    >>> unit_beside([3.0, 2.0**30], 2.0**40) == 2.0**30
    True
    """
    return max(max(sizes, default=0.0), 1e-12 * limit) or 1.0


class Model:
    """Variables, rows and an objective to be minimised.

    >>> model = Model()
    >>> x, y = model.integer(3.0, cost=-2.0), model.integer(3.0, cost=-3.0)
    >>> row = model.at_most({x: 1.0, y: 2.0}, 5.0)
    >>> solution = model.solve()
    >>> solution.values, solution.objective
    ((3.0, 1.0), -9.0)
    """

    def __init__(self) -> None:
        self._unit: list[float] = []
        self._upper: list[float] = []
        self._cost: list[float] = []
        self._whole: list[int] = []
        self._rows: list[tuple[Mapping[int, float], float, float]] = []

    def integer(self, most: float, cost: float = 0.0) -> int:
        """Add an integer variable from 0 to ``most``; returns its index."""
        return self._add(most, cost, 1)

    def real(self, most: float = math.inf, cost: float = 0.0, unit: float = 1.0) -> int:
        """Add a variable from 0 to ``most``; returns its index.

        HiGHS sees it in ``unit``. Beside other coefficients of its rows its own must not be too small: of a billion bytes and a
        1 for a variable in bytes, the 1 is dropped.
        """
        return self._add(most / unit, cost * unit, 0, unit)

    def _add(self, most: float, cost: float, whole: int, unit: float = 1.0) -> int:
        self._unit.append(unit)
        self._upper.append(most)
        self._cost.append(cost)
        self._whole.append(whole)
        return len(self._cost) - 1

    def at_most(self, row: Mapping[int, float], most: float) -> int:
        """Add a row whose sum is at most ``most``; returns its index."""
        return self._demand(row, -math.inf, most)

    def equal(self, row: Mapping[int, float], value: float) -> int:
        """Add a row whose sum is ``value``; returns its index."""
        return self._demand(row, value, value)

    def _demand(self, row: Mapping[int, float], low: float, high: float) -> int:
        self._rows.append(({index: coefficient * self._unit[index] for index, coefficient in row.items()}, low, high))
        return len(self._rows) - 1

    @property
    def integers(self) -> int:
        """The number of integer variables."""
        return sum(self._whole)

    def solve(self, gap: float = GAP, time_limit: float = TIME_LIMIT, node_limit: int | None = None) -> Solution | None:
        """The solution, or None if there is none. A limit of nodes ends the search at the same place on every machine.

        Raises:
            SolverError: a limit was reached before any solution was found, or HiGHS failed.
        """
        import numpy as np
        from scipy.optimize import Bounds, milp

        if not self._cost:
            # SciPy refuses a programme without variables: a block without residuals leaves no choice.
            return Solution((), 0.0, 0.0, False) if all(low <= 0 <= high for _, low, high in self._rows) else None
        cost = np.asarray(self._cost)
        scale = _LARGEST_COST / max(np.abs(cost).max(), 1e-300) if cost.any() else 1.0
        with _ONE_AT_A_TIME, _standard_output_left_alone():
            result = milp(
                cost * scale,
                integrality=np.asarray(self._whole),
                bounds=Bounds(0.0, np.asarray(self._upper)),
                constraints=self._constraints(),
                options={"mip_rel_gap": gap, "time_limit": time_limit} | ({"node_limit": node_limit} if node_limit else {}),
            )
        if result.status == 2:
            return None
        if result.x is None:
            nodes = f" and node_limit={node_limit!r}" if node_limit else ""
            raise SolverError(
                f"HiGHS found no solution within time_limit={time_limit!r} seconds{nodes}: {result.message} Allow it more."
            )
        values = np.where(np.asarray(self._whole) == 1, np.round(result.x), result.x)
        self._check(values)
        bound = result.fun if result.mip_dual_bound is None else min(result.mip_dual_bound, result.fun)
        amounts = tuple(map(float, values * np.asarray(self._unit)))
        return Solution(amounts, float(cost @ values), float(bound / scale), _TIMED_OUT in result.message)

    def _check(self, values: Any) -> None:
        """HiGHS has returned "optimal" solutions that violate their own rows (scipy/scipy#24141)."""
        for row, low, high in self._scaled():
            total = sum(coefficient * float(values[index]) for index, coefficient in row.items())
            slack = _BROKEN * max(1.0, abs(total))
            if not low - slack <= total <= high + slack:
                raise SolverError(
                    f"HiGHS gave an answer in which {total!r} is not between {low!r} and {high!r}; try another gap."
                )

    def relaxed(self) -> Relaxation | None:
        """The solution without integrality; None if there is none.

        Raises:
            SolverError: HiGHS failed.
        """
        import numpy as np
        from scipy.optimize import linprog

        rows = self._matrix()
        low, high = (np.asarray([row[side] for row in self._scaled()]) for side in (1, 2))
        same = low == high
        bounds = [(0.0, most if math.isfinite(most) else None) for most in self._upper]
        result = linprog(
            np.asarray(self._cost),
            A_ub=rows[~same],
            b_ub=high[~same],
            A_eq=rows[same],
            b_eq=high[same],
            bounds=bounds,
            method="highs",
        )
        if result.status == 2:
            return None
        if result.status != 0:
            raise SolverError(f"HiGHS could not solve the relaxed programme: {result.message}")
        prices = np.zeros(len(self._rows))
        prices[~same], prices[same] = result.ineqlin.marginals, result.eqlin.marginals
        reduced = np.asarray(self._cost) - rows.T @ prices
        scales = [self._scale(row) for row, _, _ in self._rows]
        return Relaxation(float(result.fun), tuple(map(float, reduced)), tuple(map(float, prices / scales)))

    def _scaled(self) -> list[tuple[Mapping[int, float], float, float]]:
        """Each row divided by its largest coefficient: bytes and seconds are many orders of magnitude apart."""
        rows: list[tuple[Mapping[int, float], float, float]] = []
        for row, low, high in self._rows:
            by = self._scale(row)
            rows.append(({index: coefficient / by for index, coefficient in row.items()}, low / by, high / by))
        return rows

    @staticmethod
    def _scale(row: Mapping[int, float]) -> float:
        return max((abs(coefficient) for coefficient in row.values()), default=0.0) or 1.0

    def _matrix(self) -> Any:
        from scipy.sparse import csr_array

        entries = [
            (number, index, coefficient)
            for number, (row, _, _) in enumerate(self._scaled())
            for index, coefficient in row.items()
        ]
        numbers, indices, values = zip(*entries, strict=True) if entries else ((), (), ())
        return csr_array((values, (numbers, indices)), shape=(len(self._rows), len(self._cost)))

    def _constraints(self) -> Any:
        from scipy.optimize import LinearConstraint

        scaled = self._scaled()
        return LinearConstraint(self._matrix(), [row[1] for row in scaled], [row[2] for row in scaled]) if scaled else ()


_ONE_AT_A_TIME = threading.Lock()
"""Standard output belongs to the whole process: two threads that redirect it could not both restore it."""


_ITS_OWN = b"HighsMipSolverData::"
"""HiGHS prints lines with this beginning whatever its options are (jump-dev/HiGHS.jl#312): hundreds in one plan."""


@contextmanager
def _standard_output_left_alone() -> Iterator[None]:
    """Drop HiGHS's output; other output that is written meanwhile goes to standard error."""
    if sys.stdout is not None:
        sys.stdout.flush()
    with tempfile.TemporaryFile() as file:
        try:
            kept = os.dup(1)
        except OSError:
            # There is no standard output.
            yield
            return
        os.dup2(file.fileno(), 1)
        try:
            yield
        finally:
            # C's buffered output would appear later, in the wrong place.
            ctypes.CDLL(None).fflush(None)
            os.dup2(kept, 1)
            os.close(kept)
            file.seek(0)
            rest = b"".join(line for line in file if not line.startswith(_ITS_OWN))
            with suppress(OSError):
                os.write(2, rest)
