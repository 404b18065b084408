"""The programs of public reports: each report once, and how an outcome is judged."""

from __future__ import annotations

from pathlib import Path

import numpy as np

import benchmarks.public_reports.__main__  # noqa: F401 it collects the reports
from benchmarks.public_reports.report import FAULT, REPORTS, compared
from remat_jax import RematError


def test_each_report_is_named_once_and_in_the_page() -> None:
    names = [report.issue for report in REPORTS]
    assert len(set(names)) == len(names) >= 40
    text = (Path(__file__).parents[1] / "docs/notes/public_reports.md").read_text(encoding="utf-8")
    assert all(f"[{name}]" in text for name in names)


def raised(error: Exception) -> float:
    raise error


def test_verdicts() -> None:
    one, two = np.ones(2), np.full(2, 2.0)
    assert compared(one, lambda: one, lambda: one).verdict == "both right"
    assert compared(one, lambda: two, lambda: one).verdict == "cured"
    assert compared(one, lambda: raised(TypeError("no")), lambda: one).verdict == "cured"
    assert compared(one, lambda: one, lambda: two).verdict == FAULT
    assert compared(one, lambda: one, lambda: raised(RematError("no"))).verdict == "refused"
    assert compared(one, lambda: one, lambda: raised(TypeError("no"))).verdict == FAULT
