"""The planner against known answers: `vectors/planner.json`, each entry with its model, and another project's tables."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from checkpoint_schedules.hrevolve_sequences.revolve import get_opt_0_table
from checkpoint_schedules.multistage import optimal_steps_binomial

from remat_jax.errors import InfeasibleBudget
from remat_jax.solver import Block, HostLink, ResidualCosts, Stack
from tests.solver_oracles import (
    Chain,
    ChainSolver,
    Operation,
    Option,
    Program,
    Stage,
    Value,
    chain_program,
    forward_steps,
    revolve,
    segments_of_length,
    shortening_segments,
    solve_blocks,
    solve_chain,
    solve_counts,
    solve_graph,
    sqrt_segments,
    uniform_segments,
    verify,
)

VECTORS = json.loads((Path(__file__).parent / "vectors" / "planner.json").read_text())
STACK_SOLVERS = pytest.mark.parametrize("solve", [solve_blocks, solve_counts])


def entry(name):
    return {key: value for key, value in VECTORS[name].items() if key != "_"}


def test_every_entry_is_used():
    used = {"revolve_total_forward_steps", "chen_two_level_uniform", "rotor_heterogeneous_persistent", "knapsack"}
    used |= {"checkmate_unit_linear_graph", "save_recompute_offload", "rotor_uniform_chain_persistent"}
    assert set(VECTORS) == used


@pytest.mark.parametrize("steps", [10, 64])
def test_revolve(steps):
    for slots, total in entry("revolve_total_forward_steps")[f"n={steps}"].items():
        assert forward_steps(steps, int(slots)) == total
        plan = revolve(steps, int(slots), state_bytes=7.0, forward_seconds=1.0, backward_seconds=0.0)
        outcome = verify(plan)
        assert (outcome.seconds, plan.lower_bound) == (total, total)
        # The kept states, and the working state.
        assert outcome.peak_bytes <= 7 * (int(slots) + 1)


@pytest.mark.parametrize("steps", range(1, 61))
def test_revolve_against_checkpoint_schedules(steps):
    table = get_opt_0_table(steps, 12, 3, 5)
    for slots in range(1, 13):
        assert forward_steps(steps, slots) == optimal_steps_binomial(steps, slots)
        # Its chain of l steps has one more backward step, and backward steps do not run forward.
        assert (forward_steps(steps, slots) - steps) * 3 + steps * 5 == table[slots][steps - 1]
    plan = revolve(steps, min(steps, 5))
    assert verify(plan).seconds == optimal_steps_binomial(steps, min(steps, 5)) + steps


@pytest.mark.parametrize(("full", "layers"), [(17, 32), (17, 64), (1, 64)])
def test_uniform_segments(full, layers):
    expected = entry("chen_two_level_uniform")["a_full=17*a_in" if full == 17 else "a_full=a_in"][f"L={layers}"]
    plan = uniform_segments(layers, 3.0, 3.0 * full)
    assert verify(plan).peak_bytes == 3 * expected["peak"]
    assert plan.lengths[-1] == expected["g"]
    assert min(segments_of_length(layers, g, 3, 3 * full).peak_bytes for g in range(1, layers + 1)) == 3 * expected["peak"]
    assert (
        shortening_segments(layers, 3.0, 3.0 * full).peak_bytes
        <= plan.peak_bytes
        <= sqrt_segments(layers, 3, 3 * full).peak_bytes
    )


def uniform_chain(stages):
    return Chain(tuple(Stage(f"s{index}", 1, 1, (Option("all", 3, 1, 2),)) for index in range(stages)), 1)


def different_chain():
    outputs, full, forward, backward = (2, 1, 2, 1), (4, 3, 5, 3), (2, 1, 3, 1), (4, 2, 6, 2)
    rows = enumerate(zip(outputs, full, forward, backward, strict=True))
    return Chain(tuple(Stage(f"s{index}", a, f, (Option("all", bar, f, b),)) for index, (a, bar, f, b) in rows), 1)


def test_the_uniform_chain():
    for budget, makespan in enumerate(VECTORS["rotor_uniform_chain_persistent"]["L=4"], 6):
        plan = solve_chain(uniform_chain(4), budget)
        assert verify(plan).seconds == makespan
        assert plan.peak_bytes <= budget
    with pytest.raises(InfeasibleBudget, match="least that can be reached is 6.0 bytes") as caught:
        solve_chain(uniform_chain(4), 5)
    assert caught.value.least_bytes == 6


def bounds(text):
    """The budgets of an entry such as "9-10", "<=8" or ">=17"."""
    if text[:2] in ("<=", ">="):
        edge = int(text[2:])
        return [edge - 2, edge] if text[0] == "<" else [edge, edge + 20]
    low, high = map(int, text.split("-"))
    return list(range(low, high + 1))


def test_the_chain_of_different_stages():
    for text, makespan in entry("rotor_heterogeneous_persistent").items():
        for budget in bounds(text) if text[0] in "<>19" else []:
            if makespan is None:
                with pytest.raises(InfeasibleBudget, match="least that can be reached is 9.0"):
                    solve_chain(different_chain(), budget)
            else:
                plan = solve_chain(different_chain(), budget)
                assert verify(plan).seconds == makespan
                assert plan.peak_bytes <= budget


@pytest.mark.parametrize(("chain", "faster"), [(uniform_chain(4), {11: 13}), (different_chain(), {13: 23, 14: 23})])
def test_schedules_that_are_not_persistent_are_at_least_as_good_and_sometimes_better(chain, faster):
    """The entries' notes say where; so the search, which knows no chains, judges the chain's programme too."""
    for budget in range(9, 19):
        free = solve_graph(chain_program(chain), budget)
        assert verify(free).peak_bytes <= budget
        assert free.seconds == faster.get(budget, solve_chain(chain, budget).seconds)


def test_host_memory_is_shared_by_the_stages_of_a_chain():
    """Each stage keeps 4, or 1 and 8 on the host, with copies that its compute hides. In 7 bytes each saves one run."""
    options = (Option("all", 4, 1, 2), Option("away", 1, 1, 2, 8, 0, 1))
    chain = Chain(tuple(Stage(f"s{index}", 1, 1, options) for index in range(3)), 1, HostLink(8, 8))
    for host_budget, least, seconds in ((0, 7, 12), (8, 5, 11), (16, 5, 10), (24, 5, 9), (math.inf, 5, 9)):
        solver = ChainSolver(chain, host_budget)
        assert solver.least_bytes == least
        assert verify(solver.plan(least)).host_peak_bytes <= host_budget
        outcome = verify(solver.plan(7))
        assert outcome.seconds == seconds
        assert outcome.host_peak_bytes == min(host_budget, 24)


def linear_graph(n):
    values = tuple(Value(f"v{index}", 1) for index in range(2 * n + 1))
    operations = []
    for index in range(2 * n + 1):
        reads = (f"v{index - 1}",) if index else ()
        reads += (f"v{2 * n - index}",) if index > n else ()
        operations.append(Operation(f"compute {index}", 1, reads, (f"v{index}",)))
    return Program(values, tuple(operations), goal=(f"v{2 * n}",))


@pytest.mark.parametrize(("n", "budget"), [(4, 3), (4, 4), (4, 5), (4, 6), (8, 3), (8, 4), (8, 5), (8, 6), (8, 10)])
def test_the_unit_graph(n, budget):
    plan = solve_graph(linear_graph(n), budget)
    assert verify(plan).seconds == VECTORS["checkmate_unit_linear_graph"][f"n={n}"][str(budget)]
    assert plan.peak_bytes <= budget


@pytest.mark.parametrize("budget", [7, 8, 9])
def test_the_unit_graph_where_most_sets_are_possible(budget):
    assert solve_graph(linear_graph(8), budget).seconds == VECTORS["checkmate_unit_linear_graph"]["n=8"][str(budget)]


def test_the_unit_graph_does_not_fit_into_two():
    with pytest.raises(InfeasibleBudget, match="least that can be reached is 3.0"):
        solve_graph(linear_graph(8), 2)


@STACK_SOLVERS
@pytest.mark.parametrize("case", range(len(VECTORS["knapsack"]["cases"])))
def test_the_knapsack(case, solve):
    """Independent residuals: saved ones are not recomputed."""
    sizes, seconds, capacity, value, _ = VECTORS["knapsack"]["cases"][case]
    residuals = tuple(ResidualCosts(f"r{at}", size, time) for at, (size, time) in enumerate(zip(sizes, seconds, strict=True)))
    block = Block("block", residuals, 0, 0, recomputed_share=0)
    plan = solve(Stack((block,)), capacity)
    verify(plan)
    assert plan.extra_seconds == sum(seconds) - value
    assert plan.ranges[0].policy.saved_bytes <= capacity


def three_blocks(link):
    residuals = (
        ResidualCosts("a", 2),
        ResidualCosts("b", 4, 1, ("a",)),
        ResidualCosts("c", 2, 6, ("b",)),
        ResidualCosts("d", 4, 3, ("c",)),
    )
    block = Block("layer", residuals, 10, 20, repeats=3, recomputed_share=0, fetched_share=0)
    return Stack((block,), link, offload_last=True)


@STACK_SOLVERS
@pytest.mark.parametrize(("key", "link"), [("no_offload", None), ("with_offload", HostLink(0.5, 0.5))])
def test_save_recompute_and_offload(key, link, solve):
    vectors = VECTORS["save_recompute_offload"]
    for budget, extra in zip(vectors["budget"], vectors[key], strict=True):
        plan = solve(three_blocks(link), budget)
        outcome = verify(plan)
        assert plan.extra_seconds == pytest.approx(extra, abs=1e-9)
        assert outcome.seconds == pytest.approx(90 + extra)
        assert outcome.peak_bytes <= budget
    if link is None:
        with pytest.raises(InfeasibleBudget, match="least that can be reached is 6"):
            solve(three_blocks(link), 5.9)
    assert solve(three_blocks(link), math.inf).extra_seconds == 0
