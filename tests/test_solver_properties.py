"""Properties of any stack: plans run as claimed, more memory never raises the bound, and infeasible means infeasible."""

from __future__ import annotations

import math

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from remat_jax.errors import InfeasibleBudget
from remat_jax.solver import Block, HostLink, ResidualCosts, Solver, Stack
from tests.solver_oracles import exact_plan, least_peak, verify

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


def no_slower(more, less):
    return more <= less * (1 + 1e-3) + 1e-9


@few
@given(stack=stacks(), share=st.floats(0, 1), more=st.floats(0, 1))
@example(
    stack=Stack((Block("kind0", (ResidualCosts("r0", 0.0, needed=False),), 0.0, 0.0, 0.0, 10.5),), None, 5), share=0.0, more=0.0
)
def test_a_stack_and_its_budget(stack, share, more):
    solver, least = Solver(stack), least_peak(stack)
    everything = solver.plan()
    assert everything.extra_seconds == pytest.approx(exact_plan(stack).extra_seconds, rel=1e-3, abs=1e-6)
    with pytest.raises(InfeasibleBudget) as caught:
        solver.plan(min(0.5, least / 2))
    assert least * (1 - 1e-9) <= caught.value.least_bytes
    budgets = [caught.value.least_bytes * (1 + 2e-3) + part * everything.peak_bytes for part in sorted((share, more))]
    smaller, larger = (solver.plan(budget) for budget in budgets)
    for plan, budget in ((smaller, budgets[0]), (larger, budgets[1]), (everything, math.inf)):
        assert verify(stack, plan).peak_bytes <= budget * (1 + 1e-9)
    assert no_slower(larger.lower_bound, smaller.lower_bound) and no_slower(everything.lower_bound, larger.lower_bound)
    assert plan.policies[-1].host_bytes == 0, "the last block keeps its residuals on the device"
    with pytest.raises(InfeasibleBudget):
        solver.plan(least * (1 - 1e-4))


@few
@given(stack=stacks(), share=st.floats(0, 1), hosts=st.tuples(SIZES, SIZES))
def test_a_stack_and_its_host_budget(stack, share, hosts):
    solver = Solver(stack)
    budget = max(1e-6, share * solver.plan().peak_bytes)
    bound = math.inf
    for host in (*sorted(hosts), math.inf):
        try:
            plan = solver.plan(budget, host)
        except InfeasibleBudget as error:
            assert error.least_bytes is None or error.least_bytes > budget
            continue
        assert verify(stack, plan).host_peak_bytes <= host * (1 + 1e-9)
        assert no_slower(plan.lower_bound, bound)
        bound = plan.lower_bound
