"""The search for a plan and its fit, with a compiler that is a formula: its compilations, its result, its end."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from remat_jax.planning.candidate import (
    FAILED,
    Compiled,
    Load,
    StepCandidate,
    block_policies,
    one_residual_more,
    runs,
)
from remat_jax.planning.fit_memory import Fit, fitted, predicted
from remat_jax.planning.propose_candidates import WORTH_COMPILING, Proposals
from remat_jax.planning.search_plans import MORE_COMPILED, MOST_COMPILED, Search
from remat_jax.solver import Block, Choice, HostLink, ResidualCosts, Stack, stack_plan

SAVE, OFFLOAD, AGAIN = Choice.SAVE, Choice.OFFLOAD, Choice.RECOMPUTE
X, UP, ACT = ResidualCosts("x", 100.0), ResidualCosts("up", 400.0, 0.5, ("x",)), ResidualCosts("act", 300.0, 0.05, ("up",))
LAYER = Block("layer", (X, UP, ACT), 1.0, 2.0, working_bytes=500.0, repeats=6)
STACK = Stack((LAYER,), fixed_bytes=1000.0)
WORTH = WORTH_COMPILING * STACK.base_seconds
NAMED = {"off": (SAVE, SAVE, SAVE), "everything": (SAVE, SAVE, SAVE), "dots": (SAVE, SAVE, AGAIN), "full": (SAVE, AGAIN, AGAIN)}


def own(choices, stack=STACK, name=""):
    policies = block_policies(stack, choices)
    sums = [
        [sum(r.bytes for r, c in zip(p.block.residuals, p.choices, strict=True) if c is a) for a in Choice] for p in policies
    ]
    loads = tuple(Load(round(saved), round(again), round(away)) for saved, away, again, _ in sums)
    return StepCandidate(name, loads, stack_plan(stack, policies).extra_seconds, None if name else choices)


def compiled(truth, candidates, changed=lambda size, candidate: size):
    """The candidates' steps as compiled, if `truth` determines the compiler's memory and `changed` modifies it."""
    return [Compiled(round(changed(predicted(truth, step.loads), step)), step.host_bytes) for step in candidates]


class Searched:
    """A search with its compiler."""

    def __init__(
        self, budget, named, compile_them, *, host=math.inf, stack=STACK, own=None, recut=None, arguments=0.0, **options
    ):
        self.fit = Fit(stack, budget, host, arguments)
        self.proposals = Proposals(
            self.fit, named, own or (lambda choices: _own(choices, stack)), recut, options.pop("most_runs", None)
        )
        self.search = Search(self.fit, self.proposals, **options)
        self.compile_them = compile_them

    def learn(self, candidates):
        self.fit.learn(candidates, self.compile_them(candidates))

    def run(self):
        return self.search.run(lambda candidates, best: self.compile_them(candidates))


def searched(budget, truth, *, host=math.inf, stack=STACK, named=NAMED, sound=lambda candidate: True, **options):
    """A search and all its compilations; `truth` is the stack that determines the compiler's memory."""
    asked = []

    def compile_them(candidates):
        asked.append(list(candidates))
        steps = zip(compiled(truth, candidates), candidates, strict=True)
        return [replace(step, sound=sound(candidate)) for step, candidate in steps]

    able = [own((choices,) * 6, stack, name) for name, choices in named.items()]
    search = Searched(budget, able, compile_them, host=host, stack=stack, **options)
    return search, asked


_own = own
TRUTH = replace(STACK, fixed_bytes=1700.0, blocks=(replace(LAYER, recomputed_share=0.4, fetched_share=2.0),))


def test_named_policies_that_the_estimate_cannot_rule_out_are_compiled():
    search, _ = searched(3600, TRUTH, named={name: NAMED[name] for name in ("full", "dots")})
    full, dots = search.proposals.named
    search.learn([own((NAMED["dots"], *[NAMED["full"]] * 5))])
    (best,) = search.fit.tried

    def near(slack, **always):
        return search.proposals.near_named(best, slack, **always)

    assert full.seconds > best.candidate.seconds and search.fit.expected(full) <= 3600 < search.fit.expected(dots)
    gap = full.seconds - best.candidate.seconds
    assert near(0.9 * gap) == [] and near(1.1 * gap) == near(0.0, always=("full",)) == [full]
    search.fit.budget = 10_000.0
    assert near(1.1 * gap) == [full, dots]
    search.learn([dots])
    assert near(1.1 * gap) == [full]


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


@pytest.mark.parametrize("budget", [3200, 3500, 4000, 4500, 5000, 5500, 6000, 6900])
def test_the_plan_fits_and_no_named_policy_that_fits_is_faster_and_six_are_compiled_at_most(budget):
    search, asked = searched(budget, TRUTH)
    best = search.run()
    assert best.compiled.device_bytes <= budget
    assert sum(map(len, asked)) == len(search.fit.tried) <= 6 and max(map(len, asked)) <= 2
    for name, choices in NAMED.items():
        candidate = own((choices,) * 6, name=name)
        if predicted(TRUTH, candidate.loads) <= budget:
            assert best.candidate.seconds <= candidate.seconds
    # No residual of a run of layers could be saved as well and save time.
    if best.candidate.choices is not None:
        for changed in one_residual_more(STACK, best.candidate.choices):
            more = own(changed)
            assert predicted(TRUTH, more.loads) > budget or more.seconds >= best.candidate.seconds - WORTH


def test_all_in_all_it_is_the_fastest_there_is():
    """Against every count of three policies in the planner's order."""
    budget = 4700
    best = searched(budget, TRUTH)[0].run()
    every = [(SAVE, AGAIN, AGAIN), (SAVE, SAVE, AGAIN), (SAVE, AGAIN, SAVE), (SAVE, SAVE, SAVE)]
    plans = [own((early,) * first + (late,) * (6 - first)) for first in range(7) for early in every for late in every]
    fits = [candidate.seconds for candidate in plans if predicted(TRUTH, candidate.loads) <= budget]
    assert best.candidate.seconds <= min(fits) + WORTH


def test_off_is_compiled_alone_where_it_surely_fits():
    search, asked = searched(20_000, STACK)
    assert search.run().candidate.name == "off" and [[candidate.name for candidate in batch] for batch in asked] == [["off"]]


def test_what_must_not_be_run_is_not_returned():
    search, _ = searched(20_000, STACK, sound=lambda candidate: candidate.name != "off")
    best = search.run()
    assert best.candidate.name != "off" and best.candidate.seconds == 0


def test_nothing_fits():
    search, asked = searched(2000, TRUTH)
    assert search.run() is None
    assert search.fit.smallest.compiled.device_bytes == 1700 + 600 + 500 + 280
    assert any(candidate.name == "full" for batch in asked for candidate in batch)


def test_the_host_budget_is_kept():
    link = HostLink(1000.0, 1000.0)
    stack = replace(STACK, link=link, blocks=(replace(LAYER, fetched_share=0.0),))
    named = {"full": NAMED["full"]}
    unlimited = searched(3000, stack, stack=stack, named=named)[0].run()
    assert unlimited.compiled.host_bytes > 700
    limited = searched(3000, stack, stack=stack, named=named, host=700.0)[0].run()
    assert limited.compiled.host_bytes <= 700 and limited.candidate.seconds >= unlimited.candidate.seconds


def test_a_compiler_that_jumps_is_survived():
    """Plans between 60 and 80 per cent of all bytes need 900 more than any formula says."""
    budget = 5200

    def compile_them(candidates):
        def more(size, candidate):
            share = sum(load.saved for load in candidate.loads) / 4800
            return size + (900 if 0.6 < share < 0.8 else 0)

        return compiled(TRUTH, candidates, more)

    able = [own((choices,) * 6, name=name) for name, choices in NAMED.items()]
    search = Searched(budget, able, compile_them)
    assert search.run().compiled.device_bytes <= budget


def test_a_named_policy_that_needs_less_than_predicted_is_not_passed_over():
    dots = own((NAMED["dots"],) * 6, name="dots")
    needs = predicted(TRUTH, dots.loads)

    def compile_them(candidates):
        return compiled(TRUTH, candidates, lambda size, candidate: size * (0.93 if candidate.name == "dots" else 1))

    able = [own((choices,) * 6, name=name) for name, choices in NAMED.items()]
    search = Searched(0.95 * needs, able, compile_them)
    assert search.run().candidate.seconds <= dots.seconds


@pytest.mark.parametrize(("shrinks", "returned"), [(0.6, "dots"), (1.0, "")])
def test_a_named_policy_that_might_fit_is_compiled_however_large_it_is_predicted(shrinks, returned):
    """Its kept bytes fit, and its working set may be smaller than any plan's before: only compiling tells."""
    dots = own((NAMED["dots"],) * 6, name="dots")
    budget = predicted(TRUTH, dots.loads) / 1.15
    assert sum(load.saved for load in dots.loads) < budget < predicted(STACK, dots.loads)

    def compile_them(candidates):
        return compiled(TRUTH, candidates, lambda size, candidate: size * (shrinks if candidate.name == "dots" else 1))

    able = [own((choices,) * 6, name=name) for name, choices in NAMED.items()]
    search = Searched(budget, able, compile_them, most_compiled=8)
    assert search.run().candidate.name == returned
    assert search.fit.known(dots) is not None and search.proposals.unknown(search.fit.best) == []


def test_what_cannot_fit_by_what_it_keeps_is_not_compiled():
    search, _ = searched(3200, TRUTH, arguments=900.0)
    best = search.run()
    assert {step.candidate.name for step in search.fit.tried}.isdisjoint({"off", "everything", "dots"})
    assert search.proposals.unknown(best) == []


def test_what_was_not_shown_is_known(monkeypatch):
    search, _ = searched(4700, TRUTH)
    best = search.run()
    assert search.proposals.is_maximal(best)
    monkeypatch.setattr("remat_jax.planning.search_plans.MORE_COMPILED", 0)
    short, _ = searched(4700, TRUTH, most_compiled=2)
    best = short.run()
    assert not short.proposals.is_maximal(best) and [candidate.name for candidate in short.proposals.unknown(best)] == ["dots"]


def test_an_optimizers_state_on_the_host_counts_against_its_budget():
    """500 bytes are always allocated: of 1400, 900 are left for activations."""
    link = HostLink(1000.0, 1000.0)
    stack = replace(STACK, link=link, blocks=(replace(LAYER, fetched_share=0.0),))

    def compile_them(candidates):
        return [replace(step, host_bytes=step.host_bytes + 500) for step in compiled(stack, candidates)]

    search = Searched(3000, [own((NAMED["full"],) * 6, stack, "full")], compile_them, host=1400.0, stack=stack)
    best = search.run()
    assert best.compiled.host_bytes <= 1400 and search.fit.host_left == 900 and 0 < best.candidate.host_bytes <= 900
    alone = searched(3000, stack, stack=stack, named={"full": NAMED["full"]}, host=900.0)[0].run()
    assert best.candidate.seconds == alone.candidate.seconds


def test_runs_are_of_one_block_and_one_policy():
    stack = Stack((replace(LAYER, repeats=3), replace(LAYER, name="other", repeats=2)))
    full, dots = NAMED["full"], NAMED["dots"]
    assert runs(stack, [full, full, dots, dots, dots]) == [(0, 2), (2, 3), (3, 5)]


def test_the_least_is_no_more_than_any_named_policy_needs():
    """Different blocks, each once, and shares of 1: keeping is then as good as recomputing in a single block."""
    blocks = tuple(replace(LAYER, name=f"layer {index}", repeats=1, working_bytes=500.0 + index) for index in range(6))
    stack = Stack(blocks, fixed_bytes=1000.0)
    search, _ = searched(4000, stack, stack=stack)
    full = predicted(stack, own((NAMED["full"],) * 6, stack).loads)
    assert predicted(stack, search.proposals.solve(stack, full).loads) <= full
    assert search.run().compiled.device_bytes <= 4000


def test_a_host_budget_that_is_never_reached_is_none():
    """A plan that fits only with offload also fits with that much host memory, and with as much as it needs."""
    link = HostLink(1000.0, 1000.0)
    stack = replace(STACK, link=link, blocks=(replace(LAYER, fetched_share=0.0, recomputed_share=0.0),))
    named = {"full": NAMED["full"]}
    unlimited = searched(1800, stack, stack=stack, named=named)[0].run()
    assert unlimited.compiled.device_bytes <= 1800 < predicted(stack, own((NAMED["full"],) * 6, stack).loads)
    for host in (1e12, unlimited.compiled.host_bytes):
        assert searched(1800, stack, stack=stack, named=named, host=host)[0].run().compiled.device_bytes <= 1800


def test_the_leanest_is_compiled_before_nothing_is_said_to_fit():
    """A plan that saves any byte needs one byte too many; only a plan that saves nothing fits."""
    full = own((NAMED["full"],) * 6, name="full")

    def compile_them(candidates):
        return compiled(STACK, candidates, lambda size, step: size if step.loads == full.loads else max(6001, size))

    able = [own((choices,) * 6, name=name) for name, choices in NAMED.items()]
    search = Searched(6000, able, compile_them)
    assert search.run().candidate.loads == full.loads and len(search.fit.tried) <= MOST_COMPILED + MORE_COMPILED


def test_a_plan_that_cannot_be_compiled_is_not_the_last_one():
    failed = []

    def compile_them(candidates):
        steps = compiled(TRUTH, candidates)
        if not failed:
            failed.extend(candidate for candidate in candidates if not candidate.name)
            pairs = zip(candidates, steps, strict=True)
            return [Compiled(FAILED, 0, sound=False) if candidate in failed else step for candidate, step in pairs]
        return steps

    able = [own((choices,) * 6, name=name) for name, choices in NAMED.items()]
    best = Searched(4700, able, compile_them, stack=TRUTH).run()
    assert failed and best.candidate.name == "" and best.candidate.seconds < able[3].seconds


def test_where_layers_must_do_the_same_the_leanest_plan_does_too():
    """Keeping everything in the last layer takes no more memory and saves time, because no block follows it."""
    for most_runs, policies in ((None, 2), (1, 1)):
        search, _ = searched(4000, STACK, most_runs=most_runs)
        assert len(set(search.proposals.frontier(STACK, 1, lambda: False)[0].choices)) == policies


def test_while_much_is_left_more_is_compiled_until_nothing_is_worth_it():
    # Two compilations are the leanest policy and a first plan, by a prediction that is too large: much room is left.
    truth = replace(STACK, blocks=(replace(LAYER, working_bytes=100.0),))
    stack = replace(STACK, blocks=(replace(LAYER, working_bytes=1500.0),))
    search, asked = searched(4900, truth, stack=stack, most_compiled=2)
    best = search.run()
    assert len(asked[0]) == 2 and all(len(batch) == 1 for batch in asked[1:])
    first = max(step.compiled.device_bytes for step in search.fit.tried[:2])
    assert first < 0.99 * 4900 and first < best.compiled.device_bytes <= 4900
    assert 2 < len(search.fit.tried) <= 2 + MORE_COMPILED
    every = [(SAVE, AGAIN, AGAIN), (SAVE, SAVE, AGAIN), (SAVE, SAVE, SAVE)]
    plans = [own((early,) * first + (late,) * (6 - first), stack) for first in range(7) for early in every for late in every]
    # A step that is not worth its compilation does not correct the next prediction either.
    fits = [candidate.seconds for candidate in plans if predicted(truth, candidate.loads) <= 4900]
    assert best.candidate.seconds <= min(fits) + 2 * WORTH


def test_where_cutting_a_scan_costs_memory_a_plan_for_all_layers_is_found():
    def runs(candidate):
        return sum(a != b for a, b in zip(candidate.loads, candidate.loads[1:], strict=False))

    def compile_them(candidates):
        return compiled(STACK, candidates, lambda size, candidate: size + 6000 * min(1, runs(candidate)))

    able = [own((NAMED[name],) * 6, name=name) for name in ("off", "full")]
    chosen = {}
    for scanned in (True, False):
        search = Searched(5600, able, compile_them, scanned=scanned)
        chosen[scanned] = search.run().candidate
    assert runs(chosen[True]) == 0 and chosen[True].choices == ((SAVE, SAVE, AGAIN),) * 6
    assert chosen[True].seconds == pytest.approx(0.3) and chosen[True].seconds < chosen[False].seconds


def test_what_could_not_be_compiled_shows_nothing(monkeypatch):
    monkeypatch.setattr(Fit, "missed", math.inf)  # no prediction is trusted
    truth = replace(STACK, blocks=(replace(LAYER, recomputed_share=0.4, working_bytes=900.0),))
    asked = []

    def compile_them(candidates):
        asked.extend(candidates)
        sizes = [round(predicted(truth, candidate.loads)) + (0 if candidate.name else 300) for candidate in candidates]
        late = [len(asked) - len(candidates) + index >= 5 for index in range(len(candidates))]
        return [Compiled(FAILED, 0, sound=False) if no else Compiled(size, 0) for size, no in zip(sizes, late, strict=True)]

    able = [own((choices,) * 6, name=name) for name, choices in NAMED.items()]
    search = Searched(4000, able, compile_them)
    best = search.run()
    assert len(asked) > 5 and best.compiled.device_bytes <= 4000 and not search.proposals.is_maximal(best)


@pytest.mark.parametrize(("budget", "compiled"), [(3400, 6), (4200, 7), (4600, 6)])
def test_what_is_surely_over_the_budget_is_not_compiled(monkeypatch, budget, compiled):
    search, _ = searched(budget, TRUTH)
    best = search.run()
    assert search.fit.missed < 0.005 * budget and search.proposals.is_maximal(best) and len(search.fit.tried) == 5
    for candidate in search.proposals.one_more(best.candidate):
        assert predicted(TRUTH, candidate.loads) > budget or candidate.seconds > best.candidate.seconds - WORTH
    monkeypatch.setattr(Fit, "missed", math.inf)  # no prediction is trusted: more is compiled, and nothing is gained
    doubting, _ = searched(budget, TRUTH)
    assert doubting.run().candidate.seconds == best.candidate.seconds and len(doubting.fit.tried) == compiled


def test_where_a_named_policy_is_best_the_last_compilation_is_not_kept():
    truth = replace(STACK, fixed_bytes=2500.0, blocks=(replace(LAYER, recomputed_share=0.0),))
    search, _ = searched(7700, truth)
    best = search.run()
    dots = own((NAMED["dots"],) * 6)
    assert best.candidate.choices is not None and best.candidate.seconds < dots.seconds
    assert best.compiled.device_bytes <= 7700 and search.proposals.is_maximal(best)


def test_a_host_budget_below_what_is_there_anyway_is_infeasible():
    def compile_them(candidates):
        return [replace(step, host_bytes=step.host_bytes + 32) for step in compiled(STACK, candidates)]

    able = [own((choices,) * 6, name=name) for name, choices in NAMED.items()]
    search = Searched(10_000, able, compile_them, host=10)
    assert search.run() is None
    assert search.fit.host_left == 0


def test_an_empty_answer_ends_the_search():
    asked = []

    def compile_them(candidates):
        asked.append(candidates)
        return compiled(TRUTH, candidates) if len(asked) == 1 else []

    able = [own((choices,) * 6, name=name) for name, choices in NAMED.items()]
    search = Searched(4700, able, compile_them)
    assert search.run() is search.fit.best and len(asked) == 2 and len(search.fit.tried) == len(asked[0])
