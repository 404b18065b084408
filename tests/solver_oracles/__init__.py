"""Solvers that `rj.plan` does not call, and a simulator: oracles for the solver's answers.

Exact programmes over single residuals and over counts of policies, chains, binomial checkpointing, a search over any small
program, and segments; and a simulator that runs a plan action by action and knows no solver.
"""

from __future__ import annotations

from tests.solver_oracles.candidates import candidates
from tests.solver_oracles.chain import ChainSolver, solve_chain
from tests.solver_oracles.chain_problem import Chain, Option, Stage
from tests.solver_oracles.counts import solve_counts
from tests.solver_oracles.exact import solve_blocks
from tests.solver_oracles.graph import solve_graph
from tests.solver_oracles.lowering import chain_program, stack_program
from tests.solver_oracles.program import Action, Compute, Fetch, Free, Operation, Plan, Program, Value, Wait
from tests.solver_oracles.revolve import forward_steps, revolve
from tests.solver_oracles.segments import (
    SegmentPlan,
    segments_of_length,
    shortening_segments,
    sqrt_segments,
    uniform_segments,
)
from tests.solver_oracles.simulator import Outcome, simulate, verify
from tests.solver_oracles.stack_plans import ExecutablePlan, executable, ranges

__all__ = [
    "Action", "Chain", "ChainSolver", "Compute", "ExecutablePlan", "Fetch", "Free", "Operation", "Option", "Outcome", "Plan",
    "Program", "SegmentPlan", "Stage", "Value", "Wait", "candidates", "chain_program", "executable",
    "forward_steps", "ranges", "revolve", "segments_of_length", "shortening_segments", "simulate", "solve_blocks",
    "solve_chain", "solve_counts", "solve_graph", "sqrt_segments", "stack_program", "uniform_segments", "verify",
]  # fmt: skip
