"""Oracles for the planner's solver: an exact integer programme over policies by brute force, and a simulator of plans."""

from __future__ import annotations

from tests.solver_oracles.exact import Exact, every_policy, exact_plan, least_peak
from tests.solver_oracles.simulator import Outcome, simulate, verify

__all__ = ["Exact", "Outcome", "every_policy", "exact_plan", "least_peak", "simulate", "verify"]
