"""Large stacks: the solvers' number of variables, their distance from the optimum, and the shape of their plans."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from remat_jax.errors import InfeasibleBudget
from remat_jax.solver import Block, HostLink, ResidualCosts, Stack
from tests.solver_oracles import Chain, Option, Stage, candidates, counts, solve_blocks, solve_chain, solve_counts, verify
from tests.solver_oracles.candidates import MOST
from tests.solver_oracles.columns import Programme, Run
from tests.solver_oracles.milp import Model
from tests.solver_oracles.pricing import with_priced

LAYERS = 80


def decoder(seed=0, residuals=12, layers=LAYERS, link=HostLink(2, 2), **more):  # noqa: B008  # frozen
    """A block whose sizes are a few multiples of one size, as in a decoder."""
    draw = random.Random(seed)
    costs = [ResidualCosts("r0", 4)]
    for index in range(1, residuals):
        parents = tuple(f"r{parent}" for parent in sorted(draw.sample(range(index), min(index, 2))))
        costs.append(ResidualCosts(f"r{index}", draw.choice([1, 4, 4, 8, 16]), draw.choice([0.05, 0.1, 0.8, 1.5]), parents))
    return Stack((Block("layer", tuple(costs), 4, 8, 10, repeats=layers, **more),), link)


def everything(stack):
    return solve_counts(stack).peak_bytes


@pytest.mark.parametrize("share", [0.3, 0.6])
def test_80_layers_of_12_residuals(share):
    stack = decoder(seed=1)
    budget = share * everything(stack)
    counted = solve_counts(stack, budget)
    single = solve_blocks(stack, budget, gap=1e-3)
    # Three choices for each residual except the input, which is not recomputed, and no offload in the last block.
    assert single.variables == LAYERS * (12 * 3 - 1) - 12
    assert counted.variables <= 300
    assert verify(counted).peak_bytes <= budget
    assert verify(single).peak_bytes <= budget
    assert counted.extra_seconds <= single.extra_seconds * (1 + 1e-3)
    assert single.extra_seconds <= counted.extra_seconds * (1 + 2e-3)
    assert len(counted.actions) <= LAYERS * (4 + 3 * 12 + 10)


def test_80_layers_with_hardly_any_memory():
    """The programme over single residuals is still 0.25 % from its bound after five seconds; counts reach it at once."""
    stack = decoder()
    plan = solve_counts(stack, 0.15 * everything(stack))
    verify(plan)
    assert plan.variables <= 300
    assert 0 < plan.seconds - stack.base_seconds
    assert plan.seconds - plan.lower_bound <= 1e-3 * plan.extra_seconds


def test_the_number_of_layers_does_not_matter():
    stacks = [decoder(layers=layers) for layers in (20, 320)]
    few, many = (solve_counts(stack, 0.4 * everything(stack)).variables for stack in stacks)
    assert many <= few * 1.2


def test_the_least_memory_of_many_columns():
    """Each layer offloads its input; the last layer saves it, and has all arrays that its backward pass reads."""
    stack = decoder()
    with pytest.raises(InfeasibleBudget) as caught:
        solve_counts(stack, 1)
    last = candidates(stack.positions()[-1], stack.link)[0]
    assert caught.value.least_bytes == min(policy.saved_bytes + policy.transient_bytes for policy in last)


@pytest.mark.parametrize("seed", range(8))
def test_columns_that_are_left_out_are_not_missed(seed, monkeypatch):
    """With almost no initial columns, the columns that its bound leaves have the same optimum as all columns."""
    draw = random.Random(seed)
    residuals = tuple(ResidualCosts(f"r{at}", draw.uniform(1, 20), draw.uniform(0, 3)) for at in range(6))
    stack = Stack((Block("layer", residuals, 1, 2, repeats=3),), HostLink(draw.uniform(1, 5), draw.uniform(1, 5)))
    budget = draw.uniform(0.3, 0.7) * everything(stack)
    exact = solve_counts(stack, budget, gap=1e-6)
    monkeypatch.setattr(counts, "_FIRST_COLUMNS", 6)
    plan = solve_counts(stack, budget, gap=1e-6)
    assert plan.variables < exact.variables
    assert plan.extra_seconds == pytest.approx(exact.extra_seconds, rel=1e-5)


def test_more_residuals_than_can_be_tried():
    """If candidates are left out, prices find the missing ones, and the plan gives its distance from the best."""
    draw = random.Random(24)
    residuals = tuple(
        ResidualCosts(
            f"r{at}", draw.randint(1, 40), draw.random(), tuple(f"r{parent}" for parent in draw.sample(range(at), min(at, 2)))
        )
        for at in range(24)
    )
    stack = Stack((Block("layer", residuals, 2, 4, repeats=LAYERS),), HostLink(20, 20, 0.5))
    policies, complete = candidates(stack.blocks[0], stack.link)
    assert not complete
    assert len(policies) < MOST
    budget = 0.3 * sum(residual.bytes for residual in residuals) * LAYERS
    plan = solve_counts(stack, budget)
    assert verify(plan).peak_bytes <= budget
    assert plan.variables <= 400
    assert 0 < plan.seconds - plan.lower_bound <= 5e-3 * plan.extra_seconds


@pytest.mark.parametrize("seed", range(6))
def test_prices_find_what_is_missing(seed):
    """From one policy per run to the value of the relaxed programme over all policies, which is the bound."""
    draw = random.Random(seed)

    def block(name, **more):
        residuals = tuple(ResidualCosts(f"r{at}", draw.uniform(1, 20), draw.uniform(0, 3)) for at in range(4))
        return Block(name, residuals, 1, 2, draw.uniform(0, 5), **more)

    blocks = (block("tower", repeats=3), block("layer", repeats=4, recomputed_share=0.5), block("head"))
    stack = Stack(blocks, HostLink(draw.uniform(1, 5), draw.uniform(1, 5)))
    budget, host_budget = draw.uniform(0.4, 0.7) * everything(stack), draw.uniform(5, 60)
    full = [Run.of(run, stack.link) for run in stack.runs()]
    columns = [(at, number) for at, run in enumerate(full) for number in range(len(run.policies))]
    optimum = Programme(stack, full, columns, budget, host_budget).model.relaxed().objective
    smallest = [
        min(run.policies, key=lambda policy: policy.saved_bytes + policy.transient_bytes + policy.host_bytes) for run in full
    ]
    few = [Run.with_policies(run.block, stack.link, [policy], False) for run, policy in zip(full, smallest, strict=True)]
    priced, bound = with_priced(stack, few, budget, host_budget)
    assert bound == pytest.approx(optimum, rel=1e-4)
    assert sum(len(run.policies) for run in priced) < len(columns)


def test_a_few_blocks_with_many_residuals_are_solved_as_they_are():
    stack = decoder(seed=3, residuals=16, layers=3)
    draw = random.Random(3)
    plain = stack.blocks[0].residuals
    blurred = tuple(
        ResidualCosts(residual.name, residual.bytes + draw.random(), residual.seconds, residual.parents) for residual in plain
    )
    stack = Stack((Block("layer", blurred, 2, 4, repeats=3),), HostLink(5, 5))
    budget = 0.35 * everything(stack)
    plan, single = solve_counts(stack, budget), solve_blocks(stack, budget)
    assert plan.extra_seconds == pytest.approx(single.extra_seconds, rel=1e-3)
    assert plan.seconds - plan.lower_bound <= 1.1e-3 * plan.extra_seconds


def test_ranges_save_most_nearest_the_loss_and_the_last_block_offloads_nothing():
    stack = decoder(link=HostLink(2, 2))
    plan = solve_counts(stack, 0.3 * everything(stack))
    ranges = plan.ranges
    assert sum(span.count for span in ranges) == LAYERS
    assert [span.first for span in ranges] == [0, *itertools.accumulate(span.count for span in ranges)][:-1]
    bulk = [span.policy for span in ranges[:-1]]
    assert [policy.transient_bytes for policy in bulk] == sorted((policy.transient_bytes for policy in bulk), reverse=True)
    assert any(policy.host_bytes for policy in bulk)
    assert ranges[-1].policy.host_bytes == 0


@pytest.mark.parametrize("most", [1, 2, 3])
def test_a_limit_on_policies(most):
    stack = decoder(seed=2, link=None)
    budget = 0.37 * everything(stack)
    free = solve_counts(stack, budget)
    plan = solve_counts(stack, budget, most_policies=most)
    assert verify(plan).peak_bytes <= budget
    assert len({span.policy.choices for span in plan.ranges}) <= most
    assert plan.extra_seconds >= free.extra_seconds * (1 - 1e-3)
    if most == 1:
        # Against every policy that all layers could follow.
        alike = []
        for policy in candidates(stack.positions()[0], None)[0]:
            if LAYERS * policy.saved_bytes + policy.transient_bytes <= budget:
                alike.append(LAYERS * policy.recompute_seconds)
        assert plan.extra_seconds == pytest.approx(min(alike))
    if most == 3:
        assert plan.extra_seconds <= free.extra_seconds * 1.02


def test_towers_share_one_budget():
    """Vision tower, language model and head: the head's logits are alive after both others have kept their arrays."""

    def block(name, size, seconds, **more):
        return Block(name, (ResidualCosts("x", size), ResidualCosts("up", 4 * size, seconds, ("x",))), 1, 2, **more)

    language = block("language", 4, 2.0, repeats=18)
    stack = Stack((block("vision", 2, 0.5, repeats=27), language, block("head", 1, 0.1, working_bytes=200)))
    budget = 200 + 27 * 2 + 18 * 20 + 5 + 5
    plan = solve_counts(stack, budget)
    assert verify(plan).peak_bytes <= budget
    saved = {
        name: sum(run.count for run in plan.ranges if run.block == name and run.policy.of["up"] == "save")
        for name in ("vision", "language", "head")
    }
    # A byte of the language model is worth 1/8 of a second, of the tower 1/16. The head's bytes cost nothing: they are alive
    # anyway when the head's backward pass runs, which needs most.
    assert saved == {"vision": 0, "language": 18, "head": 1}
    assert plan.extra_seconds == pytest.approx(27 * 0.5)


def test_a_chain_of_60_stages():
    draw = random.Random(0)
    stages = []
    for number in range(60):
        output = draw.uniform(1, 4)
        options = (Option("all", output + draw.uniform(4, 16), 1, 2), Option("some", output + 2, 1, 2.5, backward_bytes=8))
        stages.append(Stage(f"s{number}", output, 1, options))
    chain = Chain(tuple(stages), 2)
    fast = solve_chain(chain, slots=200)
    times = [fast.seconds]
    for share in (0.7, 0.3, 0.1):
        plan = solve_chain(chain, share * fast.peak_bytes, slots=200)
        assert verify(plan).peak_bytes <= share * fast.peak_bytes
        times.append(plan.seconds)
    assert times == sorted(set(times))
    # Every stage except the last at most twice, if a third of everything fits.
    assert times[2] < fast.seconds + 60


ATTENTION = (
    ("x", 67, 0, ()),
    ("norm", 92, 0.2, ("x",)),
    ("scores", 2147, 1.0, ("norm",)),
    ("exp", 4296, 1.0, ("scores",)),
    ("weights", 2150, 0.5, ("exp",)),
    ("out", 75, 0.6, ("norm", "weights")),
    ("added", 67, 0.73, ("x", "out")),
    ("norm2", 67, 0.1, ("added",)),
    ("gate", 235, 2.43, ("norm2",)),
    ("up", 235, 2.44, ("norm2",)),
    ("act", 236, 0.11, ("gate",)),
    ("mul", 234, 0.05, ("act", "up")),
)
"""A layer of a 70B decoder, in MB and ms: its working set equals many layers' residuals, and its policies are nearly alike."""


def test_fewer_rounds_of_the_solver_give_a_plan_that_fits_and_a_bound_that_holds(monkeypatch):
    residuals = tuple(ResidualCosts(name, float(size), seconds, parents) for name, size, seconds, parents in ATTENTION)
    stack = Stack((Block("layer", residuals, 11.4, 23.0, 5553, repeats=4, recomputed_share=1.22),))
    asked = []
    monkeypatch.setattr(Model, "solve", lambda *given, real=Model.solve: asked.append(given) or real(*given))
    by_rounds = {}
    for rounds in (math.inf, 0):
        before = len(asked)
        plan = solve_counts(stack, 19400.0, most_policies=3, gap=1e-2, node_limit=50, most_rounds=rounds, say_least=False)
        assert verify(plan).peak_bytes <= 19400
        by_rounds[rounds] = (len(asked) - before, plan)
    (all_rounds, exact), (fewer, quick) = by_rounds[math.inf], by_rounds[0]
    assert (all_rounds, fewer) == (7, 5)
    assert quick.lower_bound <= exact.seconds and exact.extra_seconds <= quick.extra_seconds * (1 + 1e-2)
    assert quick.extra_seconds == pytest.approx(7.6)


@pytest.mark.parametrize("rounds", [0, 2, 8])
def test_a_working_set_larger_than_the_budget_loses_no_plan_that_fits(rounds):
    residuals = (ResidualCosts("x", 1.0), *(ResidualCosts(f"a{i}", 100.0 + 3 * i, 0.1 + 0.013 * i, ("x",)) for i in range(3)))
    layer = Block("layer", residuals, 1.0, 2.0, 0.0, repeats=6, recomputed_share=1.5, fetched_share=0.1)
    stack = Stack((layer, Block("head", (ResidualCosts("x", 1.0),), 1.0, 2.0, 0.0)), link=HostLink(20.0, 20.0, 0.5))
    plan = solve_counts(stack, 62.0, most_policies=3, gap=1e-2, node_limit=200, most_rounds=rounds, say_least=False)
    assert verify(plan).peak_bytes <= 62.0
    assert plan.extra_seconds == pytest.approx(solve_counts(stack, 62.0, most_policies=3).extra_seconds, rel=1e-2)
