"""One pair: its comparison, and a comparison for every fault planted in it."""

from __future__ import annotations

import time
import warnings
from dataclasses import dataclass, field
from typing import Any

from parity_tests.pairs import faults, models

QUICK: dict[str, Any] = {"modes": "off", "dtypes": "float64", "memory": False}
"""Faults in float64 need no other dtype or mode."""
WRONG = {"mistral": "model/layers/0/self_attn"}
"""Pairs that differ: the module of PyTorch's that must be named."""


@dataclass(frozen=True)
class Planted:
    """The result of a fault: the pass and the module that must be named, and those that the report names.

    `rules` is "given", the map of the right pair, or "auto". `said` begins with the exchanged names, if there are any.
    """

    name: str
    rules: str
    expected: str
    passed: bool
    named: bool
    said: str
    seconds: float


@dataclass(frozen=True)
class Result:
    """The result of a pair."""

    name: str
    passed: bool
    verdict: str
    said: str
    tensors: int
    lines: int
    proposed: bool
    seconds: float
    planted: list[Planted] = field(default_factory=list)

    @property
    def is_right(self) -> bool:
        """Whether a right pair passes, and a wrong one is found and named."""
        return self.passed if self.name not in WRONG else not self.passed and f": {WRONG[self.name]} (" in self.said


def examine(name: str) -> Result:
    """Compare a pair by the default call, and again with every fault, in float64 alone, with the right map and without."""
    import jax

    jax.config.update("jax_disable_most_optimizations", True)  # machine code that runs once
    warnings.simplefilter("ignore")
    from remat_jax.parity import compare

    with models.old_jax():
        case = models.make(name)
        start = time.perf_counter()
        report = compare(**case)
        seconds = time.perf_counter() - start
        rules = case.get("rules") or report.rules
        with_faults = [
            _planted(fault, {**case, **QUICK, "rules": each})
            for fault in (faults.FAULTS[name]() if name in faults.FAULTS else faults.of_dense_layers(report.rows))
            for each in (rules, "auto")
        ]
    return Result(
        name=name,
        passed=report.passed,
        verdict=report.verdict(),
        said=_said(report.divergences),
        tensors=len(report.rows),
        lines=len(report.rules.splitlines()),
        proposed="rules" not in case,
        seconds=seconds,
        planted=[each for each in with_faults if each],
    )


def _planted(fault: faults.Fault, case: dict[str, Any]) -> Planted | None:
    """The result of a fault; None if the fault is in the rules, and `case` proposes them."""
    from remat_jax.parity import compare

    start, wrong = time.perf_counter(), fault.plant(case)
    is_auto = case["rules"] == "auto"
    if is_auto and wrong["rules"] != "auto":
        return None
    report = compare(**wrong)
    named = {direction: divergence["torch_path"] for direction, divergence in report.divergences.items() if divergence}
    return Planted(
        name=fault.name,
        rules="auto" if is_auto else "given",
        expected=f"{fault.where}: {fault.modules[0] or 'the whole model'}",
        passed=report.passed,
        named=named.keys() == {fault.where} and named[fault.where] in fault.modules,
        said="".join(f"{each} exchanged; " for each in report.crossed) + _said(report.divergences),
        seconds=time.perf_counter() - start,
    )


def _said(divergences: dict[str, Any]) -> str:
    from remat_jax.parity.report_data import divergence_text

    return "; ".join(
        divergence_text(direction, divergence).removeprefix("first difference, ")
        for direction, divergence in divergences.items()
        if divergence
    )
