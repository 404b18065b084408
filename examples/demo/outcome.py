"""The demo's measurements, tables and conclusions as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

Gradients = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Evidence:
    """All measurements of one row.

    Attributes:
      losses: the loss of every step of the float32 training, before its update.
      gradients64, gradients32: the gradients of the first batch at the initial weights, with PyTorch's names and shapes.
      block_executions: how many times blocks ran in one step.
      expected_executions: how many times blocks should run in one step.
      offloads: whether the mode or policy must put bytes on the host.
      host_bytes: the host memory of the step compiled for the target; None if it was not compiled.
    """

    framework: str
    model: str
    mode: str
    losses: tuple[float, ...]
    gradients64: Gradients = field(repr=False)
    gradients32: Gradients = field(repr=False)
    block_executions: int
    expected_executions: int
    offloads: bool
    residual_device_bytes: int
    residual_host_bytes: int
    peak_bytes: Mapping[str, int | None]
    host_bytes: int | None = None

    @property
    def label(self) -> str:
        return f"{self.model}, {self.framework}, {self.mode}"


@dataclass(frozen=True)
class Row:
    """One row of the table.

    Attributes:
      loss: after the last step of training.
      grad_error: the largest relative error of a parameter's gradient in float64, against PyTorch's plain gradient.
      block_executions: how many times blocks ran in one step, forward pass and recomputation together.
      residual_device_bytes, residual_host_bytes: the bytes that are kept between the passes.
      peak_bytes: the peak memory of a step, by source: `torch` tracked on fake tensors, `cpu` and `h200` compiled.
    """

    framework: str
    model: str
    mode: str
    loss: float
    grad_error: float
    block_executions: int
    residual_device_bytes: int
    residual_host_bytes: int
    peak_bytes: Mapping[str, int | None]


@dataclass(frozen=True)
class Check:
    """One check.

    Attributes:
      name: what is checked.
      figure: the measured figure; the worst if there are several.
      bound: the largest figure that is allowed.
      holds: whether the check passes.
      detail: where the figure comes from.
    """

    name: str
    figure: float
    bound: float
    holds: bool
    detail: str


@dataclass(frozen=True)
class Outcome:
    """The rows, the checks, and the remarks that a reader needs."""

    rows: tuple[Row, ...]
    checks: tuple[Check, ...]
    notes: tuple[str, ...]

    @property
    def passed(self) -> bool:
        """Whether there are checks, and all of them hold."""
        return bool(self.checks) and all(check.holds for check in self.checks)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "passed": self.passed,
            "rows": [asdict(row) for row in self.rows],
            "checks": [asdict(check) for check in self.checks],
        }
