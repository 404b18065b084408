"""What a search learns of memory: the fit of the planner's formula to compiled steps."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from remat_jax.planning.candidate import Compiled, Load
from remat_jax.planning.fit_memory import Fit, fitted, predicted
from remat_jax.solver import HostLink
from tests.searches import LAYER, NAMED, OFFLOAD, SAVE, STACK, TRUTH, cut, made, named


def test_a_fit_finds_what_the_compiler_does():
    def loads(count):
        saved, again = Load(800, 0, 0), Load(100, 700, 0)
        return (again,) * (6 - count) + (saved,) * count

    seen = [(step, round(predicted(TRUTH, step))) for step in (loads(0), loads(6))]
    stack = fitted(STACK, seen, 6000.0)
    assert stack.fixed_bytes + 500 == pytest.approx(2200, rel=0.02)
    assert stack.blocks[0].recomputed_share == pytest.approx(0.4, abs=0.08)
    # Exact at the compiled step nearest to the budget, close elsewhere.
    assert predicted(stack, loads(6)) == pytest.approx(seen[1][1], abs=1e-6)
    assert predicted(stack, loads(3)) == pytest.approx(predicted(TRUTH, loads(3)), rel=0.03)
    assert fitted(STACK, [], 5000.0) is STACK


def test_a_fit_finds_which_share_of_the_gradients_is_allocated_late():
    """Half of each layer's 300 bytes is: a step that is cut needs 2 · 150 bytes less, and 2 · 300 by the guess."""
    stack = replace(STACK, fixed_bytes=3000.0, blocks=(replace(LAYER, late_bytes=300.0),))
    truth = replace(stack, blocks=(replace(LAYER, late_bytes=150.0),))
    whole = made((NAMED["dots"],) * 6, stack)
    two, three = cut(whole, (2,)), cut(whole, (3, 5))
    assert predicted(stack, whole.loads) - predicted(stack, two.loads) == 600
    assert predicted(stack, cut(whole, (3,)).loads) == predicted(stack, whole.loads), "scans of one length share their zeros"
    steps = [(step.loads, round(predicted(truth, step.loads))) for step in (whole, two)]
    assert steps[0][1] - steps[1][1] == 300
    fit = Fit(stack, 6000.0)
    fit.learn([whole, two], [Compiled(size, 0) for _, size in steps])
    assert fit.shares[2] == pytest.approx(0.5, abs=0.02)
    assert predicted(fit.stack, three.loads) == pytest.approx(predicted(truth, three.loads), rel=0.01)


def test_a_fit_finds_a_share_that_its_first_guess_hides():
    """By the guess the second step's peak is in its last block, which offloads nothing; in truth it is in the block before."""
    link = HostLink(1000.0, 1000.0)
    stack = replace(STACK, link=link, blocks=(replace(LAYER, fetched_share=0.3),))
    truth, away = replace(TRUTH, link=link), (SAVE, OFFLOAD, OFFLOAD)
    layers = ((NAMED["full"],) * 6, (*[away] * 5, NAMED["off"]), (*[away] * 5, NAMED["dots"]))
    steps = [made(choices, stack).loads for choices in layers]
    corrected = fitted(stack, [(loads, round(predicted(truth, loads))) for loads in steps], 3200.0)
    assert corrected.blocks[0].fetched_share == pytest.approx(2.0, rel=0.25)
    next_loads = made((*[away] * 5, NAMED["full"]), stack).loads
    assert predicted(corrected, next_loads) == pytest.approx(predicted(truth, next_loads), rel=0.02)


def test_a_fit_leaves_out_other_programs_and_cuts_where_it_is_asked_to():
    fit = Fit(STACK, 5000.0)
    full = made((NAMED["full"],) * 6)
    assert not fit.is_cut(full) and fit.is_cut(replace(full, cuts=(3,)))
    fit.learn([full, named()[0]], [Compiled(3000, 0), Compiled(9999, 0)])
    assert fit.expected(full) == 3000 and predicted(fit.stack, full.loads) == pytest.approx(3000), "`off` is not fitted"
    assert fit.smallest.candidate is full and math.isinf(fit.host_left)


def test_what_a_cut_costs_is_not_predicted_for_a_step_without_cuts():
    fit, full, dots = Fit(STACK, 4000.0), made((NAMED["full"],) * 6), made((NAMED["dots"],) * 6)
    cut = replace(full, cuts=(3,))
    fit.learn([cut], [Compiled(4000, 0)])
    assert fit.expected(full) == 4000, "nothing else is known"
    fit.learn([full], [Compiled(3000, 0)])
    uncut = predicted(fitted(STACK, [(full.loads, 3000)], 4000.0), dots.loads)
    assert fit.expected(dots) == round(uncut) and fit.expected(replace(dots, cuts=(3,))) > uncut


def test_what_other_kernels_need_is_expected_of_steps_alike():
    fit, full, dots, off = Fit(STACK, 4000.0), made((NAMED["full"],) * 6), made((NAMED["dots"],) * 6), named()[0]
    steps = [full, replace(full, memory_limit=1), off]
    fit.learn(steps, [Compiled(3000, 0)] * 3)
    for tried, needed in zip(list(fit.tried), (10, 50, 300), strict=True):
        fit.learn_more(tried, needed)
    assert [fit.within(step) for step in steps] == [3990, 3950, 3700]
    others = dots, replace(dots, memory_limit=1), replace(off, memory_limit=1)
    assert [fit.within(step) for step in others] == [3990, 3950, 3700] and fit.compiled_budget == 3990
