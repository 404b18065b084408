"""The block solvers against an exhaustive search over all policies."""

from __future__ import annotations

import itertools
import math
import random

import numpy as np
import pytest

from remat_jax.errors import InfeasibleBudget
from remat_jax.solver import Block, HostLink, ResidualCosts, Solver, Stack
from tests.solver_oracles import candidates, solve_blocks, solve_counts, verify

SAVE, OFFLOAD, RECOMPUTE, UNUSED = range(4)
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


def every_policy(block, link):
    """Saved bytes, transient bytes, host bytes and extra seconds of all legal policies, one row each."""
    grid = np.indices((4,) * len(block.residuals), np.int8).reshape(len(block.residuals), -1).T
    at = {residual.name: index for index, residual in enumerate(block.residuals)}
    legal = np.ones(len(grid), bool)
    sums = np.zeros((4, len(grid)))
    for index, residual in enumerate(block.residuals):
        does = [grid[:, index] == choice for choice in range(4)]
        legal &= ~does[SAVE] | residual.may_save
        legal &= ~does[OFFLOAD] | (residual.may_offload and link is not None)
        legal &= ~does[RECOMPUTE] | (residual.seconds is not None)
        legal &= ~does[UNUSED] | (not residual.needed)
        for parent in residual.parents:
            legal &= ~(does[RECOMPUTE] & (grid[:, at[parent]] == UNUSED))
        for choice, row in ((SAVE, 0), (OFFLOAD, 1), (RECOMPUTE, 2)):
            sums[row] += residual.bytes * does[choice]
        sums[3] += (residual.seconds or 0) * does[RECOMPUTE] + residual.kept_seconds * (does[SAVE] | does[OFFLOAD])
    saved, away, again, seconds = sums[:, legal]
    extra = seconds.copy()
    if link is not None:
        extra += np.maximum(0, away / link.out_bytes_per_s - link.hidden_share * block.forward_seconds)
        extra += np.maximum(0, away / link.in_bytes_per_s - link.hidden_share * (block.backward_seconds + seconds))
    transient = block.working_bytes + block.recomputed_share * again + block.fetched_share * away
    return np.stack([saved + block.input_bytes, transient, away, extra], axis=1)


def best(rows, budget, host_budget):
    """Over single policies: the least extra time within the budgets, and the least memory within the host budget."""
    allowed = rows[rows[:, 2] <= host_budget]
    need = allowed[:, 0] + allowed[:, 1]
    fitting = allowed[need <= budget]
    return (float(fitting[:, 3].min()) if len(fitting) else None), (float(need.min()) if len(need) else None)


def check(solve, stack, budget, host_budget, best_seconds, least):
    if best_seconds is None:
        with pytest.raises(InfeasibleBudget) as caught:
            solve(stack, budget, host_budget)
        assert caught.value.least_bytes == (None if least is None else pytest.approx(least))
        return
    plan = solve(stack, budget, host_budget)
    assert best_seconds - 1e-9 <= plan.extra_seconds <= best_seconds * (1 + GAP) + 1e-9
    assert plan.lower_bound <= plan.seconds <= plan.lower_bound + best_seconds * GAP + 1e-6
    outcome = verify(plan)
    assert outcome.peak_bytes <= budget
    assert outcome.host_peak_bytes <= host_budget


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("group", range(10))
def test_one_block(group, offload):
    """200 blocks of up to 9 residuals in all, half of them with a link."""
    feasible = 0
    for case in range(10):
        draw = random.Random(1000 * group + 10 * case + offload)
        block = random_block(draw, 9)
        link = HostLink(draw.randint(1, 6), draw.randint(1, 6), draw.choice([0.0, 0.5, 1.0])) if offload else None
        rows = every_policy(block, link)
        need = rows[:, 0] + rows[:, 1]
        budget = max(1.0, draw.choice([draw.uniform(need.min() - 3, need.max()), float(need[draw.randrange(len(need))])]))
        host_budget = draw.choice([math.inf, math.inf, draw.randint(0, 30)])
        fastest, least = best(rows, budget, host_budget)
        feasible += fastest is not None
        stack = Stack((block,), link, offload_last=True)
        for solve in (solve_blocks, solve_counts):
            check(solve, stack, budget, host_budget, fastest, least)
    assert feasible >= 4


def every_stack(blocks, link, budget, host_budget):
    """The least extra time and the least peak over all combinations of policies, in every order."""
    fastest, least = None, None
    for rows in itertools.product(*(every_policy(block, link).tolist() for block in blocks)):
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


@pytest.mark.parametrize("case", range(30))
def test_several_kinds_of_blocks(case):
    """Identical blocks in a row, followed by other kinds: no order of policies beats the given one."""
    draw = random.Random(case)
    link = HostLink(draw.randint(1, 6), draw.randint(1, 6)) if case % 2 else None
    kinds = (random_block(draw, 2, "tower", repeats=3), random_block(draw, 2, "head", repeats=draw.randint(1, 2)))
    stack = Stack(kinds, link, offload_last=True)
    single = [block for block in kinds for _ in range(block.repeats)]
    _, least = every_stack(single, link, 0, math.inf)
    budget = max(1.0, least + draw.randint(-2, 60))
    host_budget = draw.choice([math.inf, draw.randint(0, 40)])
    fastest, least = every_stack(single, link, budget, host_budget)
    for solve in (solve_blocks, solve_counts):
        check(solve, stack, budget, host_budget, fastest, least)


@pytest.mark.parametrize("case", range(20))
def test_the_candidates_are_all_that_can_be_best(case):
    """For any prices of the three kinds of memory the cheapest policy is among them."""
    draw = random.Random(case)
    block = random_block(draw, 6)
    link = HostLink(draw.randint(1, 6), draw.randint(1, 6), draw.choice([0.0, 0.5, 1.0])) if case % 2 else None
    rows = every_policy(block, link)
    policies, complete = candidates(block, link)
    assert complete
    mine = np.array(
        [[policy.saved_bytes, policy.transient_bytes, policy.host_bytes, policy.extra_seconds(link)] for policy in policies]
    )
    for _ in range(50):
        prices = np.array([draw.random(), 0, draw.random(), 1])
        prices[1] = prices[0] * draw.random()
        assert (mine @ prices).min() == pytest.approx((rows @ prices).min())
    assert len(policies) <= len(rows)


@pytest.mark.parametrize("solve", [solve_blocks, solve_counts])
def test_what_is_computed_again_hides_what_comes_back(solve):
    """10 seconds of copies return beside 3 of recomputing: 10 in all. Offloading the other residual too takes 11."""
    residuals = (ResidualCosts("a", 10, may_save=False), ResidualCosts("b", 1, 3, may_save=False))
    block = Block("layer", residuals, 100, 0, fetched_share=0, recomputed_share=0)
    plan = solve(Stack((block,), HostLink(1, 1), offload_last=True))
    verify(plan)
    assert plan.extra_seconds == 10
    assert plan.ranges[0].policy.of == {"a": "offload", "b": "recompute"}


@pytest.mark.parametrize("case", [7, 10, 42, 74, 103])
def test_a_tight_host_budget_is_infeasible_only_where_no_plan_fits(case):
    """The cheapest mixes of each kind offload more than the host budget; mixes that offload less fit."""
    draw = random.Random(case)
    blocks = tuple(random_block(draw, 4, f"kind{index}", repeats=draw.randint(1, 6)) for index in range(draw.randint(1, 3)))
    link = HostLink(draw.choice([1.0, 5.0, 20.0]), draw.choice([1.0, 5.0, 20.0]), draw.choice([0.0, 0.5, 1.0]))
    stack = Stack(blocks, link, draw.randint(1, 40))
    everything = solve_counts(stack)
    most = sum(block.repeats * residual.bytes for block in blocks for residual in block.residuals)
    plans = 0
    for _ in range(3):
        host_budget, budget = draw.uniform(0, most / 2), draw.uniform(0.3, 1) * everything.peak_bytes
        try:
            solve_counts(stack, budget, host_budget)
        except InfeasibleBudget:
            continue
        plan, plans = Solver(stack).plan(budget, host_budget), plans + 1
        assert plan.peak_bytes <= budget * (1 + 1e-9) and sum(policy.host_bytes for policy in plan.policies) <= host_budget
    assert plans
