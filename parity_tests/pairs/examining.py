"""One pair: its comparison, and a comparison for every fault planted in it."""

from __future__ import annotations

import contextlib
import gc
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from parity_tests.pairs import faults, models
from remat_jax.errors import RematError, described

QUICK: dict[str, Any] = {"modes": "off", "dtypes": "float64", "memory": False}
"""Faults in float64 need no other dtype or mode."""
WRONG = {"mistral": "model/layers/0/self_attn"}
"""Pairs that differ: the module of PyTorch's that must be named."""


@dataclass(frozen=True)
class Planted:
    """The result of a fault: the pass and the module that must be named, and those that the report names.

    `rules` is "given", the map of the right pair, or "auto". `said` begins with what is unusual in a proposed map.
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
    """The result of a pair, with its weight map and its weights. `planted` is None until faults are planted."""

    name: str
    passed: bool
    verdict: str
    said: str
    tensors: int
    rules: str
    weights: list[faults.Weight]
    proposed: bool
    seconds: float
    planted: list[Planted] | None = None

    @property
    def is_right(self) -> bool:
        """Whether a right pair passes, and a wrong one is found and named."""
        return self.passed if self.name not in WRONG else not self.passed and f": {WRONG[self.name]} (" in self.said


def examine(name: str) -> Result:
    """Compare a pair by the default call."""
    with _comparisons() as compare:
        case = models.make(name)
        start = time.perf_counter()
        try:
            report = compare(**case)
        except RematError as error:
            seconds = time.perf_counter() - start
            return Result(name, False, "stopped", described(error), 0, "", [], True, seconds, [])
        return Result(
            name=name,
            passed=report.passed,
            verdict=report.verdict(),
            said=_said(report.divergences),
            tensors=len(report.rows),
            rules=report.rules,
            weights=[faults.Weight(row.name, row.flax, row.shape) for row in report.rows if row.kind == "gradient"],
            proposed="rules" not in case,
            seconds=time.perf_counter() - start,
        )


def plant(result: Result) -> Result:
    """Compare a pair with every fault, in float64 alone, with the right map and without."""
    with _comparisons() as compare:
        case = models.make(result.name)
        kernels = [faults.Weight(*weight) for weight in result.weights]
        planted = [
            _planted(compare, fault, {**case, **QUICK, "rules": rules})
            for fault in faults.faults_of(result.name, kernels)
            for rules in (case.get("rules") or result.rules, "auto")
        ]
    return replace(result, planted=planted)


@contextlib.contextmanager
def _comparisons() -> Iterator[Any]:
    """`compare`, with compilers that are quick and without warnings."""
    import jax

    if not gc.get_freeze_count():
        gc.freeze()  # the imports
    jax.config.update("jax_disable_most_optimizations", True)  # machine code that runs once
    warnings.simplefilter("ignore")
    from remat_jax.parity import compare

    with models.old_jax():
        yield compare


def _planted(compare: Callable[..., Any], fault: faults.Fault, case: dict[str, Any]) -> Planted:
    start, is_auto = time.perf_counter(), case["rules"] == "auto"
    rules = "auto" if is_auto else "given"
    expected = f"{fault.where}: {fault.modules[0] or 'the whole model'}"
    try:
        report = compare(**fault.plant(case))
    except RematError as error:
        seconds = time.perf_counter() - start
        return Planted(fault.name, rules, expected, passed=False, named=False, said=described(error), seconds=seconds)
    # A module that is called again has the call's number behind its path.
    named = {way: each["torch_path"].partition("#")[0] for way, each in report.divergences.items() if each}
    is_said = not is_auto or not fault.unusual or bool(getattr(report, fault.unusual))
    unusual = [*(f"{each} exchanged" for each in report.crossed), *report.unlike]
    return Planted(
        name=fault.name,
        rules=rules,
        expected=expected,
        passed=report.passed,
        named=is_said and named.keys() == {fault.where} and named[fault.where] in fault.modules,
        said="".join(f"{each}; " for each in unusual) + _said(report.divergences),
        seconds=time.perf_counter() - start,
    )


def _said(divergences: dict[str, Any]) -> str:
    from remat_jax.parity.report_data import divergence_text

    return "; ".join(
        divergence_text(direction, divergence).removeprefix("first difference, ")
        for direction, divergence in divergences.items()
        if divergence
    )
