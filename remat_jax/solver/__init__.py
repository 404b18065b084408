"""The planning problem and its solver: the fastest plan of a stack of blocks within memory budgets. Does not import JAX."""

from __future__ import annotations

from remat_jax.solver.policies import BlockPolicy, StackPlan, not_yet_allocated, peak_bytes, scans, stack_plan
from remat_jax.solver.problem import Block, Choice, HostLink, ResidualCosts, Stack
from remat_jax.solver.solve import Solver, solve
from remat_jax.solver.table import Prices, cheapest_policy

__all__ = [
    "Block",
    "BlockPolicy",
    "Choice",
    "HostLink",
    "Prices",
    "ResidualCosts",
    "Solver",
    "Stack",
    "StackPlan",
    "cheapest_policy",
    "not_yet_allocated",
    "peak_bytes",
    "scans",
    "solve",
    "stack_plan",
]
