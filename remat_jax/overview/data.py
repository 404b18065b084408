"""The content of a report, before rendering."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from remat_jax.hardware import Target
from remat_jax.overview.compared import PolicyComparison
from remat_jax.parity.report import ParityReport
from remat_jax.planning import Plan
from remat_jax.workload import Workload

_BYTES = ("device_bytes", "temp_bytes", "host_bytes", "residual_device_bytes", "residual_host_bytes", "measured_peak_bytes")


@dataclass(frozen=True)
class Gathered:
    """The content of a report.

    Attributes:
      workload, target: the arguments of the report.
      comparison: the compared policies.
      plan, parity: None if not given.
    """

    workload: Workload
    target: Target
    comparison: PolicyComparison
    plan: Plan | None = None
    parity: ParityReport | None = None

    def to_dict(self) -> dict[str, Any]:
        """The figures as plain data for JSON."""
        policies = [
            {
                "policy": one.name,
                **{name: getattr(one.memory, name) for name in _BYTES},
                "receipt": asdict(one.memory.receipt) if one.memory.receipt else None,
                "seconds": one.seconds,
                "extra_seconds": one.extra_seconds,
                "recompute_flops": one.recompute_flops,
                "findings": [asdict(finding) for finding in one.diagnosis.findings],
            }
            for one in self.comparison.policies
        ]
        return {
            "workload": self.workload.name,
            "target": self.target.name,
            "policies": policies,
            "left_out": dict(self.comparison.left_out),
            "notes": list(self.comparison.notes),
            "plan": self.plan.to_dict() if self.plan else None,
            "parity": {"passed": self.parity.passed, "verdict": self.parity.verdict()} if self.parity else None,
        }
