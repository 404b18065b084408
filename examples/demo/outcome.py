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
      gradients64, gradients32: of the first batch at the initial weights, under PyTorch's names and in its shapes.
      block_executions: how many times a block ran in one step.
      expected_executions: how many times it should.
      offloads: whether the mode or policy has to put anything on the host.
      host_bytes: what the step that was compiled for the target keeps in host memory; None where none was compiled.
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
    relative_time: float | None = None
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
      block_executions: how many times a block ran in one step, forward pass and recomputation together.
      residual_device_bytes, residual_host_bytes: what is kept between the passes.
      peak_bytes: of a step, by how it was found: `torch` tracked on fake tensors, `cpu` and `h200` compiled.
      relative_time: of a step, to that of the same framework and model without checkpointing.
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
    relative_time: float | None


@dataclass(frozen=True)
class Check:
    """One check.

    Attributes:
      name: what is checked.
      figure: what was found; the worst, where there are several.
      bound: what it may be at most.
      holds: whether it is.
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
