"""Properties of any problem: plans run as claimed, more memory is never slower, and infeasible means infeasible."""

from __future__ import annotations

import math

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from remat_jax.errors import InfeasibleBudget
from remat_jax.solver import Block, HostLink, ResidualCosts, Stack
from tests.solver_oracles import (
    Chain,
    ChainSolver,
    Option,
    Stage,
    chain_program,
    forward_steps,
    revolve,
    shortening_segments,
    solve_blocks,
    solve_chain,
    solve_counts,
    solve_graph,
    uniform_segments,
    verify,
)

GAP = 1e-3
SIZES = st.floats(0, 40) | st.integers(0, 12)
SECONDS = st.floats(0, 10, allow_subnormal=False) | st.integers(0, 4)
RATES = st.floats(0.25, 8)
few = settings(max_examples=40, deadline=None, derandomize=True)


@st.composite
def residuals(draw, most=4):
    count = draw(st.integers(1, most))
    drawn = []
    for index in range(count):
        parents = draw(st.sets(st.sampled_from(range(index)), max_size=2)) if index else ()
        seconds = draw(st.none() | SECONDS)
        drawn.append(
            ResidualCosts(
                f"r{index}",
                draw(SIZES),
                seconds,
                tuple(f"r{parent}" for parent in sorted(parents)),
                may_save=draw(st.booleans()) or seconds is None,
                may_offload=draw(st.booleans()),
                needed=draw(st.booleans()) or draw(st.booleans()),
            )
        )
    return tuple(drawn)


@st.composite
def stacks(draw, most=2):
    blocks = tuple(
        Block(
            f"kind{index}",
            draw(residuals()),
            draw(SECONDS),
            draw(SECONDS),
            draw(SIZES),
            draw(SIZES),
            draw(st.integers(1, 6)),
            draw(st.sampled_from([0.0, 0.5, 1.0, 2.0])),
            draw(st.sampled_from([0.0, 0.5, 1.0, 2.0])),
        )
        for index in range(draw(st.integers(1, most)))
    )
    link = draw(st.none() | st.builds(HostLink, RATES, RATES, st.floats(0, 1)))
    return Stack(blocks, link, draw(st.integers(1, 40)))


@st.composite
def chains(draw, most=5):
    link = draw(st.none() | st.builds(HostLink, RATES, RATES, st.floats(0, 1)))
    host = SIZES if link else st.just(0)

    def option(output):
        return st.builds(
            Option,
            st.text("xyz", min_size=1, max_size=6),
            SIZES.map(lambda size: output + size),
            SECONDS,
            SECONDS,
            host,
            SIZES,
            SIZES,
        )

    stages = []
    for index in range(draw(st.integers(1, most))):
        output = draw(SIZES)
        options = draw(st.lists(option(output), min_size=1, max_size=3, unique_by=lambda choice: choice.name))
        stages.append(Stage(f"s{index}", output, draw(SECONDS), tuple(options)))
    return Chain(tuple(stages), draw(SIZES), link, draw(SIZES))


def no_slower(more, less):
    return more <= less * (1 + GAP) + 1e-9


@pytest.mark.parametrize("solve", [solve_counts, solve_blocks])
@few
@given(stack=stacks(), share=st.floats(0, 1), more=st.floats(0, 1))
# Residuals of no bytes beside an input with some: the oracle scaled its programme by the residuals alone, and HiGHS failed.
@example(
    stack=Stack((Block("kind0", (ResidualCosts("r0", 0.0, needed=False),), 0.0, 0.0, 0.0, 10.5),), None, 5), share=0.0, more=0.0
)
def test_a_stack_and_its_budget(solve, stack, share, more):
    everything = solve(stack)
    verify(everything)
    with pytest.raises(InfeasibleBudget) as caught:
        solve(stack, 0.5)
    least = caught.value.least_bytes
    budgets = [least + part * (everything.peak_bytes - least) for part in sorted((share, more))]
    smaller, larger = (solve(stack, max(least, budget)) for budget in budgets)
    for plan, budget in zip((smaller, larger), budgets, strict=True):
        outcome = verify(plan)
        assert outcome.peak_bytes <= max(least, budget) * (1 + 1e-9)
    assert no_slower(larger.extra_seconds, smaller.extra_seconds)
    assert no_slower(everything.extra_seconds, larger.extra_seconds)
    with pytest.raises(InfeasibleBudget):
        solve(stack, least * (1 - 1e-4))


@few
@given(stack=stacks(), share=st.floats(0, 1), hosts=st.tuples(SIZES, SIZES))
def test_a_stack_and_its_host_budget(stack, share, hosts):
    budget = max(1e-6, share * solve_counts(stack).peak_bytes)
    times = []
    for host in (*sorted(hosts), math.inf):
        try:
            plan = solve_counts(stack, budget, host)
        except InfeasibleBudget as error:
            assert error.least_bytes is None or error.least_bytes > budget
            assert not times, "a larger host budget must not be infeasible where a smaller one was not"
            continue
        assert verify(plan).host_peak_bytes <= host * (1 + 1e-9)
        assert not times or no_slower(plan.extra_seconds, times[-1])
        times.append(plan.extra_seconds)


@few
@given(stack=stacks())
def test_the_two_solvers_of_stacks_agree(stack):
    everything = solve_blocks(stack)
    budget = max(1e-6, 0.6 * everything.peak_bytes)
    answers = []
    for solve in (solve_blocks, solve_counts):
        try:
            answers.append(solve(stack, budget).extra_seconds)
        except InfeasibleBudget as error:
            answers.append(error.least_bytes)
    assert answers[0] == pytest.approx(answers[1], rel=GAP, abs=1e-6)


@few
@given(stack=stacks())
def test_the_last_block_keeps_its_residuals_on_the_device(stack):
    last = solve_counts(stack).ranges[-1]
    if last.policy.host_bytes:
        assert last.count == 0


@few
@given(chain=chains(), shares=st.tuples(st.floats(0, 1), st.floats(0, 1)), slots=st.sampled_from([7, 500]))
def test_a_chain_and_its_budget(chain, shares, slots):
    solver = ChainSolver(chain, slots=slots)
    fastest = solver.plan()
    verify(fastest)
    times = []
    least = solver.least_bytes
    for share in sorted(shares):
        budget = least + share * max(0.0, fastest.peak_bytes - least)
        if budget > 0:
            plan = solver.plan(budget)
            assert verify(plan).peak_bytes <= budget * (1 + 1e-9)
            times.append(plan.seconds)
    for more, less in zip([*times[1:], fastest.seconds], times, strict=True):
        assert more <= less + 1e-9
    if least > 1e-6:
        with pytest.raises(InfeasibleBudget, match="least that can be reached"):
            solver.plan(least * (1 - 1e-6))


@few
@given(chain=chains(), hosts=st.tuples(SIZES, SIZES))
def test_a_chain_and_its_host_budget(chain, hosts):
    budget = max(1e-6, 0.7 * solve_chain(chain).peak_bytes)
    times = []
    for host in (*sorted(hosts), math.inf):
        try:
            plan = solve_chain(chain, budget, host)
        except InfeasibleBudget:
            assert not times
            continue
        assert verify(plan).host_peak_bytes <= host * (1 + 1e-9)
        assert not times or plan.seconds <= times[-1] + 1e-9
        times.append(plan.seconds)


@settings(max_examples=15, deadline=None, derandomize=True)
@given(chain=chains(most=3))
def test_a_search_over_all_schedules_is_at_least_as_good_as_the_persistent_one(chain):
    if chain.link is not None:
        return
    persistent = solve_chain(chain)
    # The two add up the same bytes in another order.
    budget = max(1e-6, (ChainSolver(chain).least_bytes + persistent.peak_bytes) / 2 * (1 + 1e-9))
    free = solve_graph(chain_program(chain), budget)
    assert verify(free).peak_bytes <= budget * (1 + 1e-9)
    assert free.seconds <= solve_chain(chain, budget).seconds + 1e-9


@few
@given(steps=st.integers(1, 90), slots=st.integers(1, 12))
def test_revolve_runs_as_its_closed_form_says(steps, slots):
    outcome = verify(revolve(steps, slots, state_bytes=2.0, forward_seconds=3.0, backward_seconds=5.0))
    assert outcome.seconds == forward_steps(steps, slots) * 3 + steps * 5
    assert outcome.peak_bytes <= 2 * (slots + 1)
    assert forward_steps(steps, slots + 1) <= forward_steps(steps, slots) <= steps * (steps + 1) // 2


@few
@given(layers=st.integers(1, 40), input_bytes=SIZES, full_bytes=SIZES)
def test_segments_that_shorten_are_the_best_there_are(layers, input_bytes, full_bytes):
    """Against a recurrence without closed forms: the least peak of the remaining layers, with a number of inputs before
    them.
    """
    plan = shortening_segments(layers, input_bytes, full_bytes)
    assert sum(plan.lengths) == layers
    verify(plan)
    verify(uniform_segments(layers, input_bytes, full_bytes))
    # least[n]: with n layers left and index - 1 segments before them.
    least = [0.0] + [math.inf] * layers
    for index in range(layers, 0, -1):
        least = [0.0] + [
            min(max(index * input_bytes + length * full_bytes, least[left - length]) for length in range(1, left + 1))
            for left in range(1, layers + 1)
        ]
    assert plan.peak_bytes == pytest.approx(least[layers])
