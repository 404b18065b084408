"""A pytest fixture for users' own tests: `pytest_plugins = ["remat_jax.parity.plugin"]` in a `conftest.py`.

It is not registered as an entry point: pytest would then import JAX in the test runs of every project.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from remat_jax.parity.comparison import compare, failures
from remat_jax.parity.report import ParityReport


@pytest.fixture
def parity(tmp_path: Any, record_property: Callable[[str, object], None]) -> Callable[..., ParityReport]:
    """`parity(torch_module, flax_module, inputs, **options)` does what `assert_parity` does; on failure it writes an HTML page.

    The page is written to the test's `tmp_path`. The verdict is recorded as the test property `parity`.
    """

    def check(torch_module: Any, flax_module: Any, inputs: Any, **options: Any) -> ParityReport:
        __tracebackhide__ = True
        report = compare(torch_module, flax_module, inputs, **options)
        record_property("parity", report.verdict())
        if not report.passed:
            raise AssertionError(f"{failures(report)}\n  the whole report: {report.to_html(tmp_path / 'parity.html')}")
        return report

    return check
