"""Parity as an assertion, for test suites."""

from __future__ import annotations

from typing import Any

from remat_jax.parity.comparison import compare
from remat_jax.parity.report import ParityReport
from remat_jax.parity.report_data import differs, said


def assert_parity(torch_module: Any, flax_module: Any, inputs: Any, **options: Any) -> ParityReport:
    """Return the report of `compare`, which passed; its arguments are those.

    Raises:
        AssertionError: it has not passed; the message is the verdict, and every check and tensor that failed.
        RematError: as `compare`.

    >>> import flax.linen as nn, numpy as np, torch
    >>> rules = "weight -> params/kernel | linear"
    >>> dense = nn.Dense(2, use_bias=False)
    >>> assert_parity(torch.nn.Linear(3, 2, bias=False), dense, np.ones((4, 3)), rules=rules, modes="off").passed
    True
    """
    __tracebackhide__ = True  # pytest shows the line of the test
    report = compare(torch_module, flax_module, inputs, **options)
    if not report.passed:
        raise AssertionError(failures(report))
    return report


def failures(report: ParityReport) -> str:
    """The verdict, and a line for every check and every tensor that failed.

    >>> failures(ParityReport((), (), (), "Linear", "Dense", "", ("off",), ("float64",)))
    'NOT PASSED: a planted fault was not found, so this comparison proves nothing'
    """
    lines = [report.verdict()]
    lines += [f"  {check.name}: {check.found}" for check in report.checks if not check.passed]
    lines += [f"  {one['path'] or 'the whole model'}: {differs(one)}" for one in report.differences]
    lines += [f"  {said(where, one)}" for where, one in report.divergences.items() if one]
    lines += [f"  {row.kind} {row.name}: {'; '.join(row.problems) or 'not compared'}" for row in report.failed_rows]
    return "\n".join(lines)
