"""The simulator: its errors, and its results where the answer is known."""

from __future__ import annotations

import dataclasses

import pytest

from remat_jax.errors import PlanningError
from remat_jax.solver import Block, BlockPolicy, HostLink, ResidualCosts, Stack
from tests.solver_oracles import (
    Chain,
    Compute,
    Fetch,
    Free,
    Operation,
    Option,
    Program,
    Stage,
    Value,
    Wait,
    executable,
    revolve,
    simulate,
    solve_blocks,
    solve_chain,
    uniform_segments,
    verify,
)

VALUES = (
    Value("x", 1),
    Value("y", 10, recomputed_bytes=4, fetched_bytes=6, may_offload=True),
    Value("z", 100, may_save=False, may_offload=True),
    Value("end"),
)
OPERATIONS = (
    Operation("f", 2, ("x",), ("y", "z"), extra_bytes=1000),
    Operation("again", 3, ("x",), ("y",)),
    Operation("g", 5, ("y",), ("end",), in_place=True),
)
PROGRAM = Program(VALUES, OPERATIONS, ("x",), ("end",), 5000, HostLink(5, 2))


@pytest.mark.parametrize(
    ("actions", "message"),
    [
        ([Compute("h")], r"action 0, Compute\(operation='h'.*: there is no operation 'h'"),
        ([Compute("g", ("end",))], r"it reads \['y'\], not on the device"),
        ([Compute("f", ("y",)), Free("y"), Compute("g", ("end",))], r"action 2.*it reads \['y'\]"),
        ([Compute("f", (), ("y",)), Compute("g", ("end",))], r"action 1.*it reads \['y'\]"),
        ([Compute("f", ("end",))], r"it does not write 'end'"),
        ([Compute("f", ("y",)), Compute("again", ("y",))], r"'y' is there already"),
        ([Compute("f", (), ("y",)), Wait(), Compute("again", ("y",))], r"'y' is there already"),
        ([Compute("f", ("y",), ("y",))], r"saved or offloaded, not both"),
        ([Compute("f", ("z",))], r"'z' may not be saved"),
        ([Compute("g")], r"it reads"),
        ([Free("y")], r"'y' is not on the device"),
        ([Fetch("y")], r"'y' is not in host memory"),
        ([Compute("f", (), ("y",)), Fetch("y")], r"'y' is not in host memory"),
        ([Compute("f", ("y",)), Fetch("y")], r"'y' is not in host memory"),
        ([Compute("f", ("y",))], r"ends before \['end'\] is computed"),
        (["f"], r"action 0, f: this is no action"),
    ],
)
def test_what_cannot_be_done(actions, message):
    with pytest.raises(PlanningError, match=message):
        simulate(PROGRAM, actions)


def test_nothing_is_offloaded_that_may_not_be_or_without_a_link():
    values = tuple(dataclasses.replace(value, may_offload=False) for value in VALUES)
    plain = Program(values, OPERATIONS, ("x",), (), 0, HostLink(1, 1))
    with pytest.raises(PlanningError, match="'y' may not be offloaded"):
        simulate(plain, [Compute("f", (), ("y",))])
    with pytest.raises(PlanningError, match="there is no link to the host"):
        simulate(dataclasses.replace(PROGRAM, link=None), [Compute("f", (), ("y",))])


def test_time_and_memory_of_an_offload():
    """Out: 110 bytes at 5 a second, 2 seconds hidden. In: 10 bytes at 2 a second, 5 seconds of compute beside it."""
    steps = [Compute("f", (), ("y", "z")), Wait(), Fetch("y"), Compute("g", ("end",))]
    outcome = simulate(PROGRAM, steps)
    assert (outcome.compute_seconds, outcome.exposed_out_seconds, outcome.exposed_in_seconds) == (7, 20, 0)
    assert (outcome.seconds, outcome.out_bytes, outcome.in_bytes) == (27, 110, 10)
    # While f runs: x, the copies in flight, and its own 1000 bytes. Afterwards y is back with 6.
    assert outcome.peak_bytes == 5000 + 1 + 6 + 100 + 1000
    assert outcome.host_peak_bytes == 110
    assert outcome.executions == {"f": 1, "g": 1}


def test_a_window_hides_only_its_own_copies_and_both_directions_run_side_by_side():
    link = HostLink(1, 2, hidden_share=0.5)
    program = dataclasses.replace(PROGRAM, link=link, goal=())
    first = [Compute("f", (), ("y", "z")), Wait(), Fetch("y")]
    # 110 seconds out, 1 of 2 hidden; then 5 seconds in, half of the 5 of g hidden.
    apart = simulate(program, [*first, Compute("g", ("end",)), Wait()])
    assert (apart.exposed_out_seconds, apart.exposed_in_seconds, apart.seconds) == (109, 2.5, 2 + 109 + 5 + 2.5)
    # Without compute beside it nothing is hidden.
    bare = simulate(program, [*first, Wait(), Compute("g", ("end",))])
    assert (bare.exposed_in_seconds, bare.seconds) == (5, 2 + 109 + 5 + 5)
    # y returns while z leaves: 50 seconds beside 5, of which 2.5 seconds are hidden each.
    both = [Compute("f", (), ("y",)), Wait(), Fetch("y"), Compute("f", (), ("z",)), Compute("again")]
    outcome = simulate(program, both)
    assert (outcome.exposed_out_seconds, outcome.exposed_in_seconds) == (9 + 97.5, 2.5)
    assert outcome.seconds == 2 + 9 + 2 + 3 + 97.5


def test_what_is_computed_again_may_be_smaller():
    outcome = simulate(PROGRAM, [Compute("f", ("y",)), Free("y"), Compute("again", ("y",)), Compute("g", ("end",))])
    assert outcome.seconds == 10
    assert outcome.peak_bytes == 5000 + 1 + 10 + 1000
    steps = [Compute("f"), Compute("again", ("y",)), Compute("g", ("end",))]
    small = simulate(dataclasses.replace(PROGRAM, fixed_bytes=0), steps)
    assert small.executions == {"f": 1, "again": 1, "g": 1}
    assert small.peak_bytes == 1 + 1000


LAYER = Block("layer", (ResidualCosts("x", 8), ResidualCosts("up", 32, 0.5, ("x",))), 1, 2, 5, 3, repeats=2)
STACK = Stack((LAYER,), HostLink(8, 4), 100, offload_last=True)


@pytest.mark.parametrize(
    ("choices", "seconds", "peak", "host"),
    [
        # Each keeps the input of 3. The running block has all of its 40 and 5 more.
        (("save", "save"), 6, 100 + 2 * 43 + 5, 0),
        (("save", "recompute"), 7, 100 + 2 * 11 + 32 + 5, 0),
        # x leaves in its forward second, and returns in 2 seconds, which the backward pass hides.
        (("offload", "recompute"), 7, 100 + 2 * 3 + 40 + 5, 16),
        # 5 seconds out, 1 hidden; 10 back, 2 hidden.
        (("offload", "offload"), 6 + 2 * (4 + 8), 100 + 2 * 3 + 40 + 5, 80),
    ],
)
def test_a_stack_by_hand(choices, seconds, peak, host):
    plan = executable(STACK, [BlockPolicy(block, choices) for block in STACK.positions()])
    outcome = verify(plan)
    assert (outcome.seconds, outcome.peak_bytes, outcome.host_peak_bytes) == (seconds, peak, host)
    assert outcome.executions["recompute layer/0/up"] == (choices[1] == "recompute")


@pytest.mark.parametrize(
    "make",
    [
        lambda: solve_blocks(STACK, 160),
        lambda: solve_chain(Chain(tuple(Stage(f"s{n}", 1, 1, (Option("all", 3, 1, 2),)) for n in range(4)), 1), 7),
        lambda: revolve(10, 3),
        lambda: uniform_segments(10, 1, 3),
    ],
    ids=["stack", "chain", "revolve", "segments"],
)
def test_a_plan_that_claims_or_does_something_else_is_found_out(make):
    plan = make()
    verify(plan)
    for claim in ("seconds", "peak_bytes", "host_bytes"):
        with pytest.raises(PlanningError, match=f"claims {claim}="):
            verify(dataclasses.replace(plan, **{claim: getattr(plan, claim) * 1.001 + 0.001}))
    computed = [number for number, action in enumerate(plan.actions) if isinstance(action, Compute)]
    for number in computed:
        with pytest.raises(PlanningError):
            verify(dataclasses.replace(plan, actions=plan.actions[:number] + plan.actions[number + 1 :]))
