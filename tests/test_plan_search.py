"""The search for a plan, with a compiler that is a formula: what it promises for every stack, truth, budget and failure."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from remat_jax.planning.candidate import FAILED, Compiled, KeptArrays, Load, StepCandidate, Tried
from remat_jax.planning.choose_fastest import AS_FAST, TIME_ERROR, choose_fastest
from remat_jax.planning.fit_memory import predicted
from remat_jax.planning.generators import memory_limit, more, without_host
from remat_jax.planning.loop import MOST_COMPILED, MOST_GIVEN_UP, MOST_UNTIL_ONE_FITS, search
from remat_jax.planning.outcome import gain_of_more_memory
from remat_jax.planning.plan_data import next_bytes
from remat_jax.solver import HostLink
from tests.searches import AGAIN, LAYER, NAMED, OFFLOAD, SAVE, STACK, TRUTH, Searched, drawn, made, named


@settings(max_examples=12, deadline=None)
@example(3821)  # the step with one more residual is predicted alike where it is proposed and where it is required
@given(st.integers(0, 2**32))
def test_of_every_search(seed):
    searched = drawn(seed)
    ended, known = searched.run(), searched.known
    fit, best = known.fit, known.best
    tried = [step.candidate for step in fit.tried]
    given_up = [step for step in fit.tried if step.compiled.more is not None and not fit.fits(step)]
    assert len(set(tried)) == len(tried) <= MOST_UNTIL_ONE_FITS + MOST_COMPILED * min(len(given_up), MOST_GIVEN_UP)
    assert max(map(len, searched.asked)) <= 2
    # A step that was compiled and fits is never lost, not even if it does not fit with other kernels.
    assert (best is None) == (not fit.fitting) and (known.in_hand is None) == (not fit.fitting and not given_up)
    if best is None:
        assert not given_up or known.in_hand is min(given_up, key=lambda step: step.compiled.most_bytes)
        # `full` was tried, or it failed, or what it saves alone is over the budget.
        (full,) = (candidate for candidate in known.named if candidate.name == "full")
        assert fit.cannot_fit(full) or (tried_full := fit.known(full)) is not None and not fit.fits(tried_full)
        return
    # The first step that fits may be compiled beside one more.
    assert given_up or len(tried) <= MOST_COMPILED or not any(map(fit.fits, fit.tried[: MOST_COMPILED - 1]))
    assert best.compiled.device_bytes <= searched.budget and best.compiled.host_bytes <= searched.host
    chosen, _ = choose_fastest(known)
    assert chosen.compiled.more == searched.more(chosen.candidate) and chosen.compiled.most_bytes <= searched.budget
    seconds = known.seconds(best.candidate)
    assert all(known.seconds(step.candidate) >= seconds for step in fit.fitting)
    if ended.by == "gain":
        assert ended.left == ()
        # No named policy that fits is faster by what is worth a compilation.
        for candidate in known.named:
            compiled = searched.compiled(candidate)
            if compiled.device_bytes <= fit.within(candidate) and known.chance(candidate):
                assert known.seconds(candidate) >= seconds - known.worth
        # No further residual fits, as far as its variants show.
        if best.candidate.choices is not None:
            assert more.is_maximal(known) or any(step.compiled.device_bytes == FAILED for step in fit.tried)
    assert known.seconds(chosen.candidate) * (1 - AS_FAST) <= seconds


@pytest.mark.parametrize("budget", [3200, 3500, 4000, 4700, 5500, 6900])
def test_the_plan_is_nearly_the_fastest_there_is(budget):
    """Against every count of two policies, in the order in which plans keep."""
    searched = Searched(STACK, budget, lambda step: predicted(TRUTH, step.loads), named())
    searched.run()
    every = list({*NAMED.values(), (SAVE, AGAIN, SAVE)})
    plans = [made((early,) * first + (late,) * (6 - first)) for first in range(7) for early in every for late in every]
    fits = [plan.seconds for plan in plans if predicted(TRUTH, plan.loads) <= budget]
    assert searched.known.best.candidate.seconds <= min(fits) + searched.known.worth


def test_a_step_that_is_chosen_once_another_is_known_is_compiled_otherwise_too():
    """The faster step has a memory limit, so the mix is chosen. Then that step is expected not to fit, and `dots` is chosen."""
    mix, dots = made((*[NAMED["dots"]] * 3, *[NAMED["full"]] * 3)), made((NAMED["dots"],) * 6, name="dots")
    steps = {replace(mix, memory_limit=5000): (4990, 1.0), mix: (4900, 1.004), dots: (4800, 1.006)}

    def pace(step):
        return steps[step][1] / (STACK.base_seconds + step.seconds)

    searched = Searched(STACK, 5000, lambda step: steps[step][0], named(), pace=pace).learn(*steps)
    search(searched.known, searched.compile_them, (), lambda tried: 50)
    chosen, _ = choose_fastest(searched.known)
    assert (chosen.candidate, chosen.compiled.more) == (dots, 50)


def test_where_nothing_fits_with_other_kernels_full_is_tried_and_the_smallest_step_is_compiled_with_them():
    """The excess of `dots` is expected from another step's, and is less: 10 bytes in place of 200."""
    mix, dots, full = made((*[NAMED["dots"]] * 3, *[NAMED["full"]] * 3)), named()[2], named()[3]
    sizes, more = {mix: 4900, dots: 4750, full: 4600}, {mix: 300, dots: 260, full: 390}
    for candidates, chosen in ((named()[:3], dots), (named(), full)):
        searched = Searched(STACK, 5000, sizes.__getitem__, candidates, pace=lambda step: 1.0).learn(mix, dots)
        search(searched.known, searched.compile_them, (), lambda tried: more[tried.candidate])
        assert searched.known.in_hand.candidate == chosen and (searched.known.best is None) == (chosen is dots)


def test_of_the_first_two_steps_one_does_not_cut_its_scan():
    """Without an uncut step nothing says what cuts cost: here 400 bytes each, where their late gradients save nothing."""
    stack = replace(STACK, fixed_bytes=3000.0, blocks=(replace(LAYER, late_bytes=300.0),))
    truth = replace(stack, blocks=(replace(LAYER, late_bytes=0.0),))

    def size(step):
        return predicted(truth, step.loads) + 400 * (sum(load.cut for load in step.loads) + len(set(step.kept)) - 1)

    searched = Searched(stack, 5750, size, named(stack), pace=lambda step: 1.0, scanned=True)
    searched.run()
    cuts = [[searched.known.fit.is_cut(step) for step in steps] for steps in searched.asked]
    assert cuts[0] == [True, False]


def test_a_memory_limit_leaves_room_for_other_kernels():
    searched = Searched(STACK, 5000, lambda step: predicted(STACK, step.loads), named(), pace=lambda step: 1.0)
    off = searched.candidates[0]
    searched.learn(off)
    (tried,) = searched.known.fit.tried
    size = tried.compiled.device_bytes
    for budget, needed, limits in ((size, 600, [size - 600]), (900, 1000, [])):
        searched.known.fit.budget = budget
        searched.known.fit.tried[0] = replace(tried, compiled=replace(tried.compiled, more=needed))
        assert [step.memory_limit for step in memory_limit.propose(searched.known)] == limits


def test_the_model_as_written_is_the_last_to_be_given_up():
    """Every other step needs three times what is predicted."""
    searched = Searched(
        STACK, 4000, lambda step: predicted(TRUTH, step.loads) * (1 if step.name == "as written" else 3), named()[1:]
    )
    full = searched.candidates[-1]
    written = replace(full, name="as written", kept=tuple(replace(kept, checkpointed=False) for kept in full.kept))
    searched.known = replace(searched.known, as_written=written)
    searched.run()
    assert searched.known.best.candidate is written


@pytest.mark.parametrize("spares", [-300, 0, 300])
def test_a_plan_offloads_only_what_does_not_fit_without(spares):
    """Every step that offloads needs less by the same amount, however much it moves."""
    stack = replace(TRUTH, link=HostLink(2000.0, 2000.0), blocks=(replace(TRUTH.blocks[0], fetched_share=1.0),))

    def size(step):
        left = tuple(Load(load.saved + load.offloaded, load.recomputed, 0) for load in step.loads)
        return predicted(stack, left) - (spares if step.host_bytes else 0)

    searched = Searched(stack, 4500, size, named(stack), pace=lambda step: 1.0)
    ended = searched.run()
    best = searched.known.best.candidate
    if best.host_bytes:
        assert spares > 0 and (without_host.offload_needed(searched.known, best) or ended.by == "compilations")
    else:
        assert without_host.offload_needed(searched.known, best) is None


def test_a_residual_that_may_not_be_saved_has_no_step_without_the_host():
    stack = replace(TRUTH, link=HostLink(2000.0, 2000.0))
    searched = Searched(stack, 4500, lambda step: 1.0, named(stack))
    away = made((*[(SAVE, OFFLOAD, AGAIN)] * 5, NAMED["dots"]), stack)
    assert without_host.left_on_device(searched.known, away) == made((NAMED["dots"],) * 6, stack)
    kept = replace(
        stack.blocks[0], residuals=(LAYER.residuals[0], replace(LAYER.residuals[1], may_save=False), LAYER.residuals[2])
    )
    searched.known.fit.guess = replace(stack, blocks=(kept,))
    assert without_host.left_on_device(searched.known, away) is None


def test_an_optimizers_state_on_the_host_counts_against_its_budget():
    stack = replace(STACK, link=HostLink(1000.0, 1000.0))
    searched = Searched(stack, 3000, lambda step: predicted(stack, step.loads), named(stack), host=1400.0)
    compiled = searched.compiled
    searched.compiled = lambda step: replace(compiled(step), host_bytes=step.host_bytes + 500)
    searched.run()
    assert searched.known.fit.host_left == 900 and searched.known.best.compiled.host_bytes <= 1400


def test_the_last_layer_of_a_scan_is_tried_alone():
    """The search does not know that this saves half of a layer's time, and finds it."""
    stack = replace(STACK, blocks=(replace(LAYER, late_bytes=1.0),))
    searched = Searched(stack, 1e6, lambda step: predicted(stack, step.loads), named(stack)[3:], scanned=True)
    searched.pace = lambda step: 1.0 - (5 in step.cuts) * 1.5 / (stack.base_seconds + step.seconds)
    searched.known = replace(searched.known, has_times=True)
    searched.run()
    best, seconds = searched.known.best, stack.base_seconds - 1.5
    assert 5 in best.candidate.cuts and best.compiled.seconds == pytest.approx(seconds + best.candidate.seconds)


def test_a_search_that_the_time_ends_keeps_its_best_step_and_says_what_was_left():
    searched = Searched(STACK, 4700, lambda step: predicted(TRUTH, step.loads), named())
    compile_them, calls = searched.compile_them, []
    searched.compile_them = lambda *call: compile_them(*call) if not calls.append(call) and len(calls) == 1 else []
    ended = searched.run()
    assert (ended.by, len(calls)) == ("time", 2) and ended.left and searched.known.best is not None


def test_more_memory_gains_what_was_compiled():
    """`dots` is compiled, over the budget by less than the further memory, and faster than its estimate.

    What a longer search within the budget would save is not credited to the memory.
    """
    searched = Searched(STACK, 4500, lambda step: predicted(STACK, step.loads), named(), pace=lambda step: 1.0)
    _, _, dots, full = searched.candidates
    searched.learn(full)
    (best,) = searched.known.fit.tried
    fast = SimpleNamespace(seconds=0.5 * searched.known.seconds(full), time=None)
    searched.known.fit.tried.append(Tried(dots, Compiled(4500 + next_bytes(4500) // 2, 0, sizes=fast), 4500))
    known = searched.known
    now = known.solved.plan(known.fit.stack, known.fit.compiled_budget)
    assert known.fit.known(now) is None and known.seconds(now) < known.seconds(full)
    assert gain_of_more_memory(known, best) == pytest.approx(known.seconds(now) - fast.seconds)


def test_a_step_is_compiled_with_a_memory_limit_only_near_the_budget():
    searched = Searched(STACK, 5000, lambda step: predicted(STACK, step.loads), named(), pace=lambda step: 1.0)
    assert memory_limit.propose(searched.known) == []
    full, dots = searched.candidates[3], searched.candidates[2]
    searched.learn(full, dots)
    assert [step.compiled.device_bytes for step in searched.known.fit.tried] == [2800, 4800]
    searched.known.fit.budget = 4500
    (limited,) = (step for step in memory_limit.propose(searched.known) if step.checkpoints)
    assert (limited.name, limited.memory_limit, limited.title) == ("dots", 4500, "dots with a memory limit")
    assert limited != dots and searched.known.fit.known(limited) is None
    assert memory_limit.propose(replace(searched.known, has_times=False)) == []
    assert searched.known.best is not None and memory_limit.propose(replace(searched.known, scanned=True)) == []


# --- candidates, times, chances ---------------------------------------------------------------------------------------


def test_candidates_are_equal_if_they_are_the_same_program():
    dots, mix = named()[2], made((NAMED["dots"],) * 6)
    assert dots == mix and hash(dots) == hash(mix) and dots.name != mix.name
    off, everything = named()[:2]
    assert off != everything, "without checkpoints, XLA is free"
    others = [replace(mix, **change) for change in ({"cuts": (2,)}, {"groups": ((0, 3),)}, {"memory_limit": 1})]
    assert len({mix, *others}) == 4 and replace(mix, seconds=9.0, source="x") == mix


def test_a_named_policy_may_be_faster_than_its_estimate_says():
    searched = Searched(STACK, 1e6, lambda step: predicted(TRUTH, step.loads), named(), pace=lambda step: 1.0)
    mix, (off, _, dots, full) = made((NAMED["dots"],) * 5 + (NAMED["full"],)), searched.candidates
    searched.learn(mix)
    known = searched.known
    assert known.seconds(full) > known.seconds(mix) > known.seconds(dots)
    assert known.gain(dots, mix) > known.seconds(mix) - known.seconds(dots) > 0
    assert known.gain(full, mix) == pytest.approx(0, abs=0.1 * known.worth), "it is too far off"
    assert known.gain(mix, off) == 0.0 and replace(known, has_times=False).gain(full, mix) == 0.0


# --- the choice -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("simple", "other", "assumed", "allowed"),
    [("full", "", (), AS_FAST), ("full", "away", (), AS_FAST), ("full", "away", ("in_bytes_per_s",), TIME_ERROR)],
)
def test_the_simpler_step_is_the_plan_where_it_is_as_fast(simple, other, assumed, allowed):
    def tried(name, seconds):
        kept, loads = (KeptArrays(frozenset({name})),), (Load(1, 1, 9 if name == "away" else 0),)
        sizes = SimpleNamespace(seconds=seconds, time=SimpleNamespace(assumed=assumed))
        return Tried(StepCandidate(kept, name="full" if name == "full" else "", loads=loads), Compiled(1, 0, sizes=sizes), 1)

    for share, is_simple in ((0.9 * allowed, True), (1.1 * allowed, False)):
        searched = Searched(STACK, 10, lambda step: 1.0, [], pace=lambda step: 1.0)
        searched.known.fit.tried += [tried(simple, 100.0), tried(other, 100.0 * (1 - share))]
        chosen, findings = choose_fastest(searched.known)
        assert (chosen.candidate.name == "full") == is_simple and len(findings) == is_simple
        if is_simple:
            assert findings[0].kind == "preferred" and f"{100 * share:.2g} % faster" in findings[0].text
