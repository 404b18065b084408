"""The solver and its exact oracle against an exhaustive search over all policies."""

from __future__ import annotations

import itertools
import math
import random

import numpy as np
import pytest

from remat_jax.errors import InfeasibleBudget
from remat_jax.solver import Block, HostLink, Prices, ResidualCosts, Solver, Stack, cheapest_policy
from remat_jax.solver.mix import totals
from remat_jax.solver.policies import peak_bytes
from remat_jax.solver.table import BlockTable
from tests.solver_oracles import every_policy, exact_plan, least_peak, simulate, verify

GAP = 1e-3


def random_block(draw, most, name="layer", **fixed):
    count = draw.randint(1, most)
    names = [f"r{index}" for index in range(count)]
    residuals = []
    for index in range(count):
        seconds = draw.choice([None, *(draw.randint(0, 9) / 2 for _ in range(4))])
        may_save = draw.random() < 0.8
        residuals.append(
            ResidualCosts(
                names[index],
                draw.randint(0, 20),
                seconds,
                tuple(draw.sample(names[:index], draw.randint(0, min(index, 2)))),
                may_save=may_save or seconds is None,
                may_offload=draw.random() < 0.7,
                needed=draw.random() < 0.75,
                kept_seconds=draw.choice([0, 0, 1, 3]),
            )
        )
    draw.shuffle(residuals)
    shares = {share: draw.choice([0.0, 0.5, 1.0, 1.5]) for share in ("recomputed_share", "fetched_share")}
    sizes = {"working_bytes": draw.randint(0, 30), "input_bytes": draw.randint(0, 5)}
    return Block(name, tuple(residuals), draw.randint(0, 20), draw.randint(0, 20), **shares, **sizes, **fixed)


def random_link(draw):
    return HostLink(draw.randint(1, 6), draw.randint(1, 6), draw.choice([0.0, 0.5, 1.0]), draw.choice([math.inf, 4.0]))


@pytest.mark.parametrize("linked", [False, True])
def test_the_cheapest_policy_of_a_block_is_the_cheapest_of_all(linked):
    for seed in range(60):
        draw = random.Random(seed)
        block, link = random_block(draw, 6), random_link(draw) if linked else None
        table, prices = (
            BlockTable(block, link),
            Prices(draw.choice([0.0, 0.1, 1.0]), draw.choice([0.0, 0.01]), draw.choice([0.0, 0.1])),
        )
        grid = np.indices((4,) * len(block.residuals), np.int8).reshape(len(block.residuals), -1).T
        every, rows = every_policy(block, link)
        np.testing.assert_array_equal(grid[table.legal(grid)], every)
        np.testing.assert_allclose(table.measures(every), rows + rows[:, [0]] * [0, 1, 0, 0], rtol=1e-12)
        costs = rows @ [prices.saved, prices.transient, prices.host, 1.0]
        codes, bound = table.cheapest(prices)
        (at,) = np.flatnonzero((every == codes).all(axis=1))
        assert costs[at] <= costs.min() * (1 + 1e-6) and bound <= costs.min() * (1 + 1e-9) + 1e-12
        policy = cheapest_policy(block, link, prices)
        measured = policy.saved_bytes, policy.transient_bytes, policy.host_bytes, policy.extra_seconds(link)
        assert measured == pytest.approx(rows[at])


def compare(stack, budget, host, best_seconds, least):
    """Compare the exact programme and the solver with the exhaustive search."""
    exact = exact_plan(stack, budget, host)
    if best_seconds is None:
        assert exact is None and least_peak(stack, host) == (None if least is None else pytest.approx(least))
        with pytest.raises(InfeasibleBudget) as caught:
            Solver(stack).plan(budget, host)
        assert (caught.value.least_bytes is None) == (least is None)
        assert least is None or caught.value.least_bytes >= least * (1 - 1e-9)
        return
    assert best_seconds - 1e-9 <= exact.extra_seconds <= best_seconds * (1 + GAP) + 1e-9
    assert exact.bound <= best_seconds + 1e-6
    plan = Solver(stack).plan(budget, host)
    outcome = verify(stack, plan)
    assert outcome.peak_bytes <= budget and outcome.host_peak_bytes <= host
    assert plan.lower_bound - stack.base_seconds - 1e-6 <= best_seconds == pytest.approx(plan.extra_seconds, rel=GAP, abs=1e-9)


@pytest.mark.parametrize("offload", [False, True])
def test_one_block(offload):
    """Blocks of up to 7 residuals in all."""
    feasible = 0
    for case in range(60):
        draw = random.Random(10 * case + offload)
        block, link = random_block(draw, 7), random_link(draw) if offload else None
        _, rows = every_policy(block, link)
        host = draw.choice([math.inf, math.inf, draw.randint(0, 30)])
        allowed = rows[rows[:, 2] <= host]
        need = rows[:, 0] + rows[:, 1]
        budget = max(1.0, draw.choice([draw.uniform(need.min() - 3, need.max()), float(need[draw.randrange(len(need))])]))
        fits, need = allowed[allowed[:, 0] + allowed[:, 1] <= budget, 3], allowed[:, 0] + allowed[:, 1]
        fastest, least = (float(each.min()) if len(each) else None for each in (fits, need))
        feasible += fastest is not None
        compare(Stack((block,), link, offload_last=True), budget, host, fastest, least)
    assert feasible >= 24


def every_stack(blocks, link, budget, host_budget):
    """The least extra time and the least peak over all combinations of policies, in every order."""
    fastest, least = None, None
    for rows in itertools.product(*(every_policy(block, link)[1].tolist() for block in blocks)):
        if sum(row[2] for row in rows) > host_budget:
            continue
        kept, peak = 0.0, 0.0
        for row in rows:
            kept += row[0]
            peak = max(peak, kept + row[1])
        extra = sum(row[3] for row in rows)
        least = peak if least is None else min(least, peak)
        if peak <= budget and (fastest is None or extra < fastest):
            fastest = extra
    return fastest, least


def test_several_kinds_of_blocks():
    """Identical blocks in a row, followed by other kinds: no order of policies beats the given one."""
    for case in range(30):
        draw = random.Random(case)
        link = HostLink(draw.randint(1, 6), draw.randint(1, 6)) if case % 2 else None
        kinds = (random_block(draw, 2, "tower", repeats=3), random_block(draw, 2, "head", repeats=draw.randint(1, 2)))
        stack = Stack(kinds, link, offload_last=True)
        single = [block for block in kinds for _ in range(block.repeats)]
        _, least = every_stack(single, link, 0, math.inf)
        budget = max(1.0, least + draw.randint(-2, 60))
        host = draw.choice([math.inf, draw.randint(0, 40)])
        compare(stack, budget, host, *every_stack(single, link, budget, host))


def every_mix(stack, most):
    """The seconds and the peak of every mix of at most `most` runs of the stack's only kind, by the simulator."""
    (kind,), link = stack.blocks, stack.link
    codes, _ = every_policy(kind.without_offload(), link)
    policies = [BlockTable(stack.blocks[0], link).policy(code) for code in codes]
    for count in range(1, min(most, kind.repeats) + 1):
        for ends in itertools.combinations(range(1, kind.repeats), count - 1):
            lengths = np.diff([0, *ends, kind.repeats])
            for chosen in itertools.product(policies, repeat=count):
                layers = [policy for policy, length in zip(chosen, lengths, strict=True) for _ in range(length)]
                outcome = simulate(stack, layers, ends)
                yield outcome.seconds, outcome.peak_bytes


def test_layers_whose_gradients_are_allocated_late():
    """Scans are cut where that saves memory; the plan is as fast as the fastest of all mixes, and no mix is below the bound."""
    cut, slower = 0, []
    # The fastest mixes of the last two cases have scans of equal length.
    for case in (*range(40), 343, 385):
        draw = random.Random(case)
        late = draw.choice([3.0, 15.0, 40.0])
        block = random_block(draw, 2, repeats=draw.randint(2, 6), late_bytes=late)
        stack = Stack((block,), None, block.repeats * late + 5.0)
        mixes = list(every_mix(stack, 3))
        low, high = (pick(peak for _, peak in mixes) for pick in (min, max))
        budget = low + draw.uniform(0.05, 0.9) * (high - low) + 1e-6
        fastest = min(seconds for seconds, peak in mixes if peak <= budget)
        solver = Solver(stack)
        plan, bound = solver.plan(budget), stack.base_seconds + solver.bound(budget)
        assert verify(stack, plan).peak_bytes <= budget * (1 + 1e-9) and bound <= fastest * (1 + 1e-9)
        cut += bool(plan.cuts)
        slower.append(plan.seconds - fastest)
    assert max(slower) <= 1e-9 and cut >= 8


def test_the_totals_of_a_mix_are_those_of_its_plan():
    """Also where runs have equal lengths, whose gradients are allocated together."""
    alike = 0
    for case in range(200):
        draw = random.Random(case)
        block = random_block(draw, 2, repeats=draw.randint(2, 7), late_bytes=15.0)
        table = BlockTable(block, None)
        codes, _ = every_policy(block.without_offload(), None)
        ends = [0, *sorted(draw.sample(range(1, block.repeats), min(2, block.repeats - 1))), block.repeats]
        runs = [(draw.randrange(len(codes)), end - start) for start, end in itertools.pairwise(ends)]
        policies = [table.policy(codes[policy]) for policy, count in runs for _ in range(count)]
        saved, peak, host = totals(block, table.measures(codes), tuple(runs))
        stack = Stack((block,), None, 5.0)
        assert peak + 5.0 == pytest.approx(peak_bytes(stack, policies, ends[1:-1])) and host == 0
        assert saved == pytest.approx(sum(policy.saved_bytes - 15.0 for policy in policies))
        alike += len({count for _, count in runs if count > 1}) < sum(count > 1 for _, count in runs)
    assert alike > 20


def test_a_later_kind_may_use_what_earlier_kinds_allocate_late():
    """All recomputed, the second kind runs backward while the first kind's gradients of 120 bytes are not there."""
    residuals = ResidualCosts("x", 10.0), ResidualCosts("up", 30.0, 1.0, ("x",))
    kinds = [
        Block(name, residuals, 1.0, 1.0, working_bytes=working, repeats=repeats, late_bytes=20.0)
        for name, working, repeats in (("first", 20.0, 6), ("second", 150.0, 5))
    ]
    solver = Solver(Stack(tuple(kinds), None, 220.0), most_policies=1)
    for budget in (390.0, 420.0, 449.0):
        assert verify(solver.stack, solver.plan(budget)).peak_bytes == 390.0
    with pytest.raises(InfeasibleBudget):
        solver.plan(389.0)


def test_a_tight_host_budget_is_infeasible_only_where_no_plan_fits():
    """The cheapest mixes of each kind offload more than the host budget; mixes that offload less fit."""
    plans = 0
    for case in [7, 10, 42, 74, 103, *range(200, 212)]:
        draw = random.Random(case)
        blocks = tuple(random_block(draw, 4, f"kind{index}", repeats=draw.randint(1, 6)) for index in range(draw.randint(1, 3)))
        link = HostLink(draw.choice([1.0, 5.0, 20.0]), draw.choice([1.0, 5.0, 20.0]), draw.choice([0.0, 0.5, 1.0]))
        stack = Stack(blocks, link, draw.randint(1, 40))
        most_bytes = Solver(stack).plan().peak_bytes
        most = sum(block.repeats * residual.bytes for block in blocks for residual in block.residuals)
        for _ in range(3):
            host, budget = draw.uniform(0, most / 2), draw.uniform(0.3, 1) * most_bytes
            if exact_plan(stack, budget, host) is None:
                continue
            plans += 1
            outcome = verify(stack, Solver(stack).plan(budget, host))
            assert outcome.peak_bytes <= budget * (1 + 1e-9) and outcome.host_peak_bytes <= host
    assert plans >= 20
