"""Collects the rows of a report: every tensor, judged in every dtype and mode."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from remat_jax.parity.report_data import TensorRow
from remat_jax.parity.rule import float64_errors, global_norm, incomparable, judge, norm
from remat_jax.parity.tolerances import TOLERANCES

Tensors = Mapping[str, Any]


class Ledger:
    """Collects verdicts by kind and name."""

    def __init__(self) -> None:
        self._rows: dict[tuple[str, str], TensorRow] = {}

    def rows(self) -> tuple[TensorRow, ...]:
        """All rows, in the order of their first use."""
        return tuple(self._rows.values())

    def row(self, kind: str, name: str, reference: Tensors | None = None) -> TensorRow:
        """The row of a tensor, created at its first use."""
        key = (kind, name)
        if key not in self._rows:
            tensor = reference[name] if reference is not None and name in reference else None
            shape = () if tensor is None else tuple(np.shape(tensor))
            self._rows[key] = TensorRow(kind, name, shape=shape, norm=None if tensor is None else norm(tensor))
        return self._rows[key]

    def exact(self, kind: str, reference: Tensors, candidate: Tensors, mode: str, limit: str = "float64") -> None:
        """Judge the outputs, gradients, … of a Flax run in float64."""
        if not reference and not candidate:
            return
        for name, error in float64_errors(reference, candidate).items():
            row = self.row(kind, name, reference)
            row.errors[mode] = error
            if not error <= TOLERANCES[limit].value:
                row.fail(incomparable(reference, candidate, name, "float64") or f"{error:.1e} off in float64", mode)

    def working(self, kind: str, reference: Tensors, candidate: Tensors, yardstick: Tensors, dtype: str, mode: str) -> None:
        """Judge the tensors of a Flax run in a working dtype by PyTorch's error in that dtype."""
        if not reference and not candidate:
            return
        for verdict in judge(reference, candidate, yardstick, dtype):
            row = self.row(kind, verdict.name, reference)
            row.ratios.setdefault(dtype, {})[mode] = verdict.ratio
            if not verdict.passed:
                row.fail(verdict.problem or f"{verdict.ratio:.1f} times PyTorch's error in {dtype}", mode)

    def plant(self, reference: Tensors, yardstick: Tensors, dtype: str) -> Planted:
        """Judge PyTorch's gradients with every sign flipped, and again doubled: every gradient must fail both times.

        Faults are planted in PyTorch's gradients because flipping a wrong gradient of Flax's could make it right.
        """
        caught: dict[str, dict[str, bool]] = {}
        for fault, factor in FAULTS.items():
            # The dtype stays the same: a changed dtype would fail for a different reason.
            wrong = {name: (np.asarray(x) * np.asarray(x).dtype.type(factor)) for name, x in yardstick.items()}
            caught[fault] = _found(reference, wrong, yardstick, dtype)
        for name in caught["sign"]:
            if ("gradient", name) in self._rows:
                self._rows[("gradient", name)].caught[dtype] = caught["sign"][name] and caught["doubled"][name]
        return Planted(caught, _large(reference, yardstick, dtype))


FAULTS = {"sign": -1, "doubled": 2}


class Planted:
    """Which planted faults were found, and which tensors are so large that missing their fault is an error."""

    def __init__(self, caught: dict[str, dict[str, bool]], large: set[str]) -> None:
        self.caught, self.large = caught, large

    def count(self, fault: str) -> int:
        """The number of tensors whose fault was found."""
        return sum(self.caught[fault].values())

    @property
    def total(self) -> int:
        """The number of tensors."""
        return len(self.caught["sign"])

    @property
    def missed(self) -> list[str]:
        """The tensors with a fault that was not found."""
        return [name for name in self.caught["sign"] if not all(found[name] for found in self.caught.values())]

    @property
    def holds(self) -> bool:
        """Whether there are large tensors and all of their faults were found."""
        return bool(self.large) and not self.large & set(self.missed)


def _found(reference: Tensors, wrong: Tensors, yardstick: Tensors, dtype: str) -> dict[str, bool]:
    if dtype == "float64":
        limit = TOLERANCES["float64"].value
        return {name: not error <= limit for name, error in float64_errors(reference, wrong).items()}
    return {row.name: not row.passed for row in judge(reference, wrong, yardstick, dtype)}


def _large(reference: Tensors, yardstick: Tensors, dtype: str) -> set[str]:
    """The tensors whose norm is more than twice their permitted error: a wrong sign or factor must make them fail."""
    if dtype == "float64":
        limit = TOLERANCES["float64"].value * global_norm(reference)
        return {name for name, x in reference.items() if norm(x) > 2 * limit}
    rows = judge(reference, yardstick, yardstick, dtype)
    return {row.name for row in rows if row.name in reference and norm(reference[row.name]) > 2 * row.bound}
