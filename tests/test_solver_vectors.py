"""The solver and the simulator against known answers: by hand, and `vectors/planner.json`, each entry with its model."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from remat_jax.errors import InfeasibleBudget
from remat_jax.solver import Block, BlockPolicy, HostLink, ResidualCosts, Stack, solve, stack_plan
from tests.solver_oracles import every_policy, simulate, verify

VECTORS = json.loads((Path(__file__).parent / "vectors" / "planner.json").read_text())
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
    plan = stack_plan(STACK, [BlockPolicy(block, choices) for block in STACK.positions()])
    outcome = simulate(STACK, plan.policies)
    assert (outcome.seconds, outcome.peak_bytes, outcome.host_peak_bytes) == (seconds, peak, host)
    assert (plan.seconds, plan.peak_bytes, plan.host_bytes) == (seconds, peak, host)


@pytest.mark.parametrize("case", VECTORS["knapsack"]["cases"])
def test_the_knapsack(case):
    """Independent residuals: saved ones are not recomputed."""
    sizes, seconds, capacity, value, _ = case
    residuals = tuple(ResidualCosts(f"r{at}", size, time) for at, (size, time) in enumerate(zip(sizes, seconds, strict=True)))
    stack = Stack((Block("block", residuals, 0, 0, recomputed_share=0),))
    plan = solve(stack, capacity)
    verify(stack, plan)
    assert plan.extra_seconds == sum(seconds) - value and plan.policies[0].saved_bytes <= capacity


@pytest.mark.parametrize(("key", "link"), [("no_offload", None), ("with_offload", HostLink(0.5, 0.5))])
def test_save_recompute_and_offload(key, link):
    residuals = (
        ResidualCosts("a", 2),
        ResidualCosts("b", 4, 1, ("a",)),
        ResidualCosts("c", 2, 6, ("b",)),
        ResidualCosts("d", 4, 3, ("c",)),
    )
    block = Block("layer", residuals, 10, 20, repeats=3, recomputed_share=0, fetched_share=0)
    stack, vectors = Stack((block,), link, offload_last=True), VECTORS["save_recompute_offload"]
    for budget, extra in zip(vectors["budget"], vectors[key], strict=True):
        plan = solve(stack, budget)
        assert plan.extra_seconds == pytest.approx(extra, abs=1e-9) and verify(stack, plan).peak_bytes <= budget
    if link is None:
        with pytest.raises(InfeasibleBudget, match="the least peak memory found is 6"):
            solve(stack, 5.9)


def test_what_is_computed_again_hides_what_comes_back():
    """10 seconds of copies return beside 3 of recomputing: 10 in all. Offloading the other residual too takes 11."""
    residuals = (ResidualCosts("a", 10, may_save=False), ResidualCosts("b", 1, 3, may_save=False))
    block = Block("layer", residuals, 100, 0, fetched_share=0, recomputed_share=0)
    stack = Stack((block,), HostLink(1, 1), offload_last=True)
    plan = solve(stack)
    verify(stack, plan)
    assert plan.extra_seconds == 10 and plan.policies[0].of == {"a": "offload", "b": "recompute"}


def test_towers_share_one_budget():
    """Vision tower, language model and head: the head's logits are alive after both others have kept their arrays."""

    def block(name, size, seconds, **more):
        return Block(name, (ResidualCosts("x", size), ResidualCosts("up", 4 * size, seconds, ("x",))), 1, 2, **more)

    language = block("language", 4, 2.0, repeats=18)
    stack = Stack((block("vision", 2, 0.5, repeats=27), language, block("head", 1, 0.1, working_bytes=200)))
    budget = 200 + 27 * 2 + 18 * 20 + 5 + 5
    plan = solve(stack, budget)
    assert verify(stack, plan).peak_bytes <= budget
    # A byte of the language model is worth 1/8 of a second, of the tower 1/16. The head's bytes cost nothing: they are alive
    # anyway when the head's backward pass runs, which needs most.
    saved = Counter(policy.block.name for policy in plan.policies if policy.of["up"] == "save")
    assert saved == {"language": 18, "head": 1} and plan.extra_seconds == pytest.approx(27 * 0.5)


def test_one_policy_for_all_layers_is_the_best_that_all_can_follow_and_the_last_offloads_nothing():
    residuals = tuple(ResidualCosts(f"r{at}", 3.0 + 5 * at % 7, 0.1 + 0.3 * (at % 3)) for at in range(6))
    layer = Block("layer", residuals, 4, 8, 10, repeats=80)
    most = solve(Stack((layer,))).peak_bytes
    rows = every_policy(layer, None)[1]
    alike = 80 * rows[80 * rows[:, 0] + rows[:, 1] <= 0.5 * most, 3].min()
    assert solve(Stack((layer,)), 0.5 * most, most_policies=1).extra_seconds == pytest.approx(alike)
    plan = solve(Stack((layer,), HostLink(20, 20)), 0.3 * most)
    assert plan.policies[-1].host_bytes == 0 < plan.host_bytes
    # The runs that save most are nearest the loss.
    transient = [policy.transient_bytes for policy in plan.policies[:-1]]
    assert transient == sorted(transient, reverse=True)


@pytest.mark.parametrize("unit", [1, 2**30, 2**40])
def test_arrays_of_any_size_are_planned_alike(unit):
    residuals = (
        ResidualCosts("x", 8 * unit),
        ResidualCosts("up", 32 * unit, 0.5, ("x",)),
        ResidualCosts("act", 32 * unit, 0.25, ("up",)),
    )
    stack = Stack((Block("layer", residuals, 1, 2, working_bytes=16 * unit, repeats=6),), fixed_bytes=100 * unit)
    with pytest.raises(InfeasibleBudget) as caught:
        solve(stack, 100 * unit)
    # Six inputs, and all three arrays of the block whose backward pass runs.
    least = (100 + 6 * 8 + 64 + 16) * unit
    assert caught.value.least_bytes == pytest.approx(least, rel=1e-3)
    # The last layer keeps everything, which is alive anyway when its backward pass runs; three of the others may keep `up`.
    plan = solve(stack, least + 3 * 32 * unit)
    assert plan.extra_seconds == pytest.approx(5 * 0.75 - 3 * 0.5) and plan.peak_bytes == least + 3 * 32 * unit
