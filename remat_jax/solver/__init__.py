"""Planning as mathematics: problems, one solver per file, and a simulator that knows nothing of them. Knows nothing of JAX."""

from __future__ import annotations

from remat_jax.solver.block import solve_blocks
from remat_jax.solver.candidates import candidates
from remat_jax.solver.chain import ChainSolver, solve_chain
from remat_jax.solver.counts import solve_counts
from remat_jax.solver.frontier import chain_frontier, frontier, stack_frontier, unbeaten_plans
from remat_jax.solver.graph import solve_graph
from remat_jax.solver.lowering import chain_program, stack_program
from remat_jax.solver.policies import BlockPolicy, Choice, Range, StackPlan, stack_plan
from remat_jax.solver.problem import Block, Chain, HostLink, Option, Residual, Stack, Stage
from remat_jax.solver.program import Action, Compute, Fetch, Free, Operation, Plan, Program, Value, Wait
from remat_jax.solver.revolve import forward_steps, revolve
from remat_jax.solver.segments import (
    SegmentPlan,
    segments_of_length,
    shortening_segments,
    sqrt_segments,
    uniform_segments,
)
from remat_jax.solver.simulator import Outcome, simulate, verify
from remat_jax.solver.solve import Solver, solve
from remat_jax.solver.table import Prices, cheapest_policy

__all__ = [
    "Action",
    "Block",
    "BlockPolicy",
    "Chain",
    "ChainSolver",
    "Choice",
    "Compute",
    "Fetch",
    "Free",
    "HostLink",
    "Operation",
    "Option",
    "Outcome",
    "Plan",
    "Prices",
    "Program",
    "Range",
    "Residual",
    "SegmentPlan",
    "Solver",
    "Stack",
    "StackPlan",
    "Stage",
    "Value",
    "Wait",
    "candidates",
    "chain_frontier",
    "chain_program",
    "cheapest_policy",
    "forward_steps",
    "frontier",
    "revolve",
    "segments_of_length",
    "shortening_segments",
    "simulate",
    "solve",
    "solve_blocks",
    "solve_chain",
    "solve_counts",
    "solve_graph",
    "sqrt_segments",
    "stack_frontier",
    "stack_plan",
    "stack_program",
    "unbeaten_plans",
    "uniform_segments",
    "verify",
]
