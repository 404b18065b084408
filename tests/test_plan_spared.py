"""A search with host memory, and a search whose compiler needs less than any formula says."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from remat_jax.errors import CompileError
from remat_jax.hardware import target
from remat_jax.planning import compile_candidates, make_plan
from remat_jax.planning.candidate import (
    FAILED,
    Compiled,
    Load,
    StepCandidate,
    Tried,
    block_policies,
    choices_together,
    one_residual_more,
)
from remat_jax.planning.compile_candidates import Compiler
from remat_jax.planning.fit_memory import fitted, predicted
from remat_jax.planning.search_plans import MOST_COMPILED
from remat_jax.solver import HostLink, ResidualCosts, stack_plan
from tests.test_plan_search import AGAIN, LAYER, NAMED, OFFLOAD, SAVE, STACK, TRUTH, WORTH, Searched, X, own, searched


def with_link(rate, stack, **shares):
    return replace(stack, link=HostLink(rate, rate), blocks=(replace(stack.blocks[0], **shares),))


@pytest.mark.parametrize("budget", [2900, 3200, 3500, 4500])
@pytest.mark.parametrize("rate", [500.0, 1000.0])
def test_more_host_memory_is_never_slower(rate, budget):
    """The first guess is a seventh of what the compiler needs for fetched arrays."""
    stack, truth = (with_link(rate, base, **shares) for base, shares in ((STACK, {"fetched_share": 0.3}), (TRUTH, {})))
    seconds = []
    for host in (0.0, 700.0, math.inf):
        best = searched(budget, truth, stack=stack, host=host)[0].run()
        seconds.append(math.inf if best is None else best.candidate.seconds)
    assert seconds[2] <= seconds[1] + WORTH and seconds[1] <= seconds[0] + WORTH and seconds[2] < 3


def test_beside_a_plan_that_offloads_the_fastest_without_the_host_is_asked_for():
    """Priced as a whole, an offload takes longer than the solver's sum over residuals."""
    stack = with_link(1000.0, TRUTH)
    search, _ = searched(3500, stack, stack=stack)
    priced = search.proposals.own
    assert search.proposals.solve(stack, 3500).host_bytes > 0
    search.proposals.own = lambda done: replace(
        candidate := priced(done), seconds=candidate.seconds + (3 if candidate.host_bytes else 0)
    )
    assert search.proposals.solve(stack, 3500) == searched(3500, stack, stack=stack, host=0.0)[0].proposals.solve(stack, 3500)


def test_the_fastest_plan_without_the_host_is_compiled_too_if_a_step_offloads():
    """For the final choice by compiled time: by the estimate it is slower, and copies may wait longer than estimated."""
    stack = with_link(2000.0, TRUTH)
    search, asked = searched(3500, stack, stack=stack)
    best = search.run()
    assert best.candidate.host_bytes > 0
    here = search.proposals.without_copies(search.fit.stack, 3500)
    compile_them = lambda candidates, best: search.compile_them(candidates)  # noqa: E731
    making = SimpleNamespace(
        fit=search.fit, proposals=search.proposals, budget=3500, compiler=SimpleNamespace(is_over=False, compile=compile_them)
    )
    search.fit.tried = [step for step in search.fit.tried if not step.candidate.is_same(here)]
    further = make_plan._Planner._without_copies(making, best)
    assert further == [here] and here.host_bytes == 0
    assert make_plan._Planner._with(making, further, best) is best and search.fit.known(here) is not None
    assert asked[-1] == [here] and make_plan._Planner._without_copies(making, best) == []
    search.fit.tried = [step for step in search.fit.tried if not step.candidate.host_bytes and step.candidate is not here]
    assert make_plan._Planner._without_copies(making, best) == []  # nothing that fits offloads


def test_every_named_policy_near_the_best_step_is_compiled_while_time_is_left():
    """The best step is a mix; by the estimate `dots`, `half` and `full` are slower, each by less than a tenth of the step."""
    stack = replace(TRUTH, blocks=(replace(TRUTH.blocks[0], forward_seconds=20.0, backward_seconds=40.0),))
    named = {name: NAMED[name] for name in ("full", "dots")} | {"half": (SAVE, AGAIN, SAVE)}

    def making(kind="gpu", devices=1, times_left=9, base=stack.base_seconds):
        search, asked = searched(100_000, stack, stack=stack, named=named)

        class FormulaCompiler:
            is_over, rounds = False, 0
            is_time_left = property(lambda self: self.rounds < times_left)

            def compile(self, candidates, best):
                self.rounds += 1
                return search.compile_them(candidates)

        search.learn([search.proposals.own((NAMED["off"],) * 6)])
        planner = SimpleNamespace(
            fit=search.fit,
            proposals=search.proposals,
            budget=100_000,
            compiler=FormulaCompiler(),
            notes=[],
            target=SimpleNamespace(kind=kind, devices=devices),
            described=SimpleNamespace(base_seconds=base),
        )
        for name in ("_near_named", "_with"):
            setattr(planner, name, getattr(make_plan._Planner, name).__get__(planner))
        make_plan._Planner._with_near_named(planner, search.fit.best)
        return [[step.name for step in round_] for round_ in asked[1:]], planner.notes

    assert making() == ([["full", "dots"], ["half"]], [])
    compiled, (note,) = making(times_left=1)
    assert compiled == [["full", "dots"]] and note.startswith("Not shown: whether half, nearly as fast by the estimate, would")
    assert making(kind="cpu") == ([], [])
    # Without a base no policy is near the best step, which has no extra seconds; on several devices `full` is compiled anyway.
    assert making(base=0.0) == ([], []) and making(base=0.0, devices=2) == ([["full"]], [])


def test_another_compilation_is_in_time_if_the_longest_one_would_be():
    compiler = Compiler(None, None, target("h200"), 60.0, time.monotonic() + 60.0, None, lambda *_: None, [])
    assert compiler.compile([], None) == [] and compiler._longest > 0 and compiler.is_time_left
    compiler._longest = 31.0  # for a GPU, the time of one compilation is kept for the check without Triton
    assert not compiler.is_time_left and not compiler.is_over
    compiler._longest = 61.0
    assert compiler.is_over


@pytest.mark.parametrize("error", [CompileError("the compiler hung"), RuntimeError("INTERNAL"), MemoryError()])
def test_once_a_step_fits_no_failure_loses_it(error, monkeypatch):
    monkeypatch.setattr(compile_candidates, "export_step", Mock(side_effect=error))
    workload = SimpleNamespace(step=lambda policies: None)
    compiler = Compiler(workload, None, target("cpu"), 60.0, time.monotonic() + 60.0, None, lambda *_: None, notes := [])
    off = StepCandidate("off", (), 0.0)
    with pytest.raises(type(error)):
        compiler.compile([off], None)
    fitting = Tried(off, Compiled(10, 0, sizes=SimpleNamespace(seconds=1.0)), 10)
    (compiled,) = compiler.compile([off], fitting)
    assert compiled.device_bytes == FAILED and notes[0].startswith("Left out: off could not be compiled")


@pytest.mark.parametrize(("compiled", "reason"), [(MOST_COMPILED - 1, ""), (MOST_COMPILED, "; no compilations were left")])
def test_the_reason_in_a_note_counts_the_compilations_of_the_search_alone(compiled, reason):
    planner = SimpleNamespace(
        search_compiled=compiled,
        fit=SimpleNamespace(tried=[None] * 2 * MOST_COMPILED),
        proposals=SimpleNamespace(unknown=lambda best: [StepCandidate("dots", (), 0.0)], is_maximal=lambda best: True),
        search=SimpleNamespace(unmoved=lambda best: []),
        target=target("h200"),
        _is_late=lambda: False,
        notes=[],
    )
    best = Tried(StepCandidate("off", (), 0.0), Compiled(1, 0, sizes=SimpleNamespace(warning=None, compiler_options={})), 1)
    make_plan._Planner._note(planner, best, best)
    assert planner.notes == [f"Not shown: whether dots, faster by the estimate, would fit{reason}"]


def test_a_step_that_keeps_everything_can_save_no_residual_more():
    """Also in a scan, where keeping has a price, so the step is not the fastest."""
    search, _ = searched(10_000, TRUTH)
    off, dots = (Tried(StepCandidate(name, (Load(800, 0, 0),) * 6, 0.5), Compiled(5800, 0), 5800) for name in ("off", "dots"))
    assert search.proposals.is_maximal(off) and not search.proposals.is_maximal(dots)


@pytest.mark.parametrize("spares", [-300, 0, 300])
def test_a_plan_offloads_only_what_does_not_fit_without(spares):
    """Every step that offloads needs less by the same amount, however much it moves: only a step that moves nothing shows
    it.
    """
    stack = with_link(2000.0, TRUTH, fetched_share=1.0)

    def needs(candidate):
        left = tuple(Load(load.saved + load.offloaded, load.recomputed, 0) for load in candidate.loads)
        return round(predicted(stack, left) - (spares if candidate.host_bytes else 0))

    search, _ = searched(4500, TRUTH, stack=stack)
    search.compile_them = lambda asked: [Compiled(needs(candidate), candidate.host_bytes) for candidate in asked]
    best = search.run()
    here = search.proposals.without_host(best.candidate)
    assert here is None or (spares > 0 and search.fit.known(here).compiled.device_bytes > 4500)
    assert best.candidate.seconds < 1.85 and any(step.candidate.host_bytes for step in search.fit.tried)


@pytest.mark.parametrize(("over", "asked"), [(1.05, True), (1.2, False)])
def test_whether_an_offload_has_to_be_is_asked_where_it_may_not(over, asked, monkeypatch):
    stack = with_link(2000.0, TRUTH, fetched_share=1.0)
    away, left = (own((*[(SAVE, action, AGAIN)] * 5, NAMED["dots"]), stack) for action in (OFFLOAD, SAVE))
    budget, named = predicted(stack, left.loads) / over, {"full": NAMED["full"]}
    search, _ = searched(budget, stack, stack=stack, named=named, most_compiled=1)
    search.learn([away])
    (best,) = search.fit.tried
    assert [candidate.loads for candidate in search.search.unmoved(best)] == [left.loads] * asked
    # The question is asked even if no further residual fits, and beside the compilations for the rest.
    monkeypatch.setattr(search.proposals, "is_maximal", lambda best: True)
    assert search.search._limit == 1 + asked
    search.search._wanted()
    assert search.search._most == 1 + asked
    search.learn([left])
    assert search.search.unmoved(best) == []


def test_what_may_not_be_saved_has_no_plan_without_the_host():
    search, _ = searched(4500, STACK, stack=with_link(2000.0, STACK))
    away = search.proposals.own((*[(SAVE, OFFLOAD, AGAIN)] * 5, NAMED["dots"]))
    here = search.proposals.without_host(away)
    assert here is not None and search.proposals.without_host(here) is None
    kept = replace(search.fit.guess.blocks[0], residuals=(X, replace(LAYER.residuals[1], may_save=False), LAYER.residuals[2]))
    search.fit.guess = replace(search.fit.guess, blocks=(kept,))
    assert search.proposals.without_host(away) is None


def test_what_was_not_compiled_is_shown_by_the_compiled_step_of_the_nearest_size():
    """This compiler needs at most 5000 bytes: exact if everything is kept; a prediction is far off if little is."""
    search, _ = searched(6000, TRUTH)
    search.compile_them = lambda asked: [
        Compiled(round(min(5000, predicted(TRUTH, candidate.loads))), 0) for candidate in asked
    ]
    full = own((NAMED["full"],) * 6, name="full")
    search.learn([full, own((NAMED["everything"],) * 6)])
    near = own((*[NAMED["full"]] * 5, NAMED["dots"]))
    assert search.fit.shown(full) == search.fit.known(full).compiled.device_bytes
    assert (
        abs(search.fit.shown(near) - predicted(TRUTH, near.loads))
        < abs(search.fit.expected(near) - predicted(TRUTH, near.loads)) / 2
    )


def test_a_fit_finds_a_share_that_its_first_guess_hides():
    """By the guess the second step's peak is in its last block, which offloads nothing; in truth it is in the block before."""
    stack, truth = (with_link(1000.0, base, **shares) for base, shares in ((STACK, {"fetched_share": 0.3}), (TRUTH, {})))
    away = (SAVE, OFFLOAD, OFFLOAD)
    steps = [
        own(choices, stack).loads
        for choices in ((NAMED["full"],) * 6, (*[away] * 5, NAMED["off"]), (*[away] * 5, NAMED["dots"]))
    ]
    corrected = fitted(stack, [(loads, round(predicted(truth, loads))) for loads in steps], 3200.0)
    assert corrected.blocks[0].fetched_share == pytest.approx(2.0, rel=0.25)
    next_loads = own((*[away] * 5, NAMED["full"]), stack).loads
    assert predicted(corrected, next_loads) == pytest.approx(predicted(truth, next_loads), rel=0.02)


def test_what_offloads_comes_first_and_what_keeps_most_last():
    stack = with_link(1000.0, STACK)
    much, more, away = NAMED["dots"], NAMED["everything"], (SAVE, OFFLOAD, AGAIN)

    def arranged(*choices):
        return choices_together(stack, stack_plan(stack, block_policies(stack, choices)))

    assert arranged(more, away, much, more, away, much) == (away, away, much, much, more, more)
    assert arranged(*[much] * 3, *[NAMED["full"]] * 3) == (*[NAMED["full"]] * 3, *[much] * 3)


def test_a_residual_that_is_offloaded_may_be_saved_as_well():
    stack = with_link(1000.0, STACK)
    changed = {choices[0] for choices in one_residual_more(stack, ((SAVE, OFFLOAD, AGAIN),) * 6)}
    assert changed == {(SAVE, SAVE, AGAIN), (SAVE, OFFLOAD, SAVE)}


@pytest.mark.parametrize(("share", "budget"), [(0.5, 4000), (0.7, 3000)])
def test_a_step_that_needed_less_than_was_predicted_lets_the_next_one_dare_more(share, budget):
    """XLA needs much less than all kept bytes. Filled by predictions alone, the remaining room would be halved each time."""
    many = tuple(ResidualCosts(f"r{index}", 60.0 + 7 * index, 0.02 + 0.003 * index, ("x",)) for index in range(16))
    stack = replace(STACK, blocks=(replace(LAYER, residuals=(X, *many), repeats=3, working_bytes=100.0),))

    def compile_them(candidates):
        sizes = (
            predicted(stack, candidate.loads) - share * sum(load.saved for load in candidate.loads) for candidate in candidates
        )
        return [Compiled(round(size), 0) for size in sizes]

    full = own(((SAVE, *[AGAIN] * 16),) * 3, stack, "full")
    search = Searched(budget, [full], compile_them, stack=stack)
    assert search.run().candidate.seconds == 0


def test_what_keeps_everything_may_fit_though_its_kept_bytes_alone_do_not():
    """XLA recomputes what is cheap: `off` is compiled before the search ends."""

    def compile_them(candidates):
        return [
            Compiled(round((0.6 if candidate.name == "off" else 1) * predicted(TRUTH, candidate.loads)), 0)
            for candidate in candidates
        ]

    able = [own((choices,) * 6, name=name) for name, choices in NAMED.items()]
    off = able[0]
    assert predicted(TRUTH, off.loads) * 0.6 < 4700 < sum(load.saved for load in off.loads)
    search = Searched(4700, able, compile_them)
    assert search.run().candidate.name == "off"
