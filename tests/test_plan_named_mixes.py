"""Mixes of two named policies: how many layers each has, by the compiled bytes and times of both."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest

import remat_jax as rj
from remat_jax import compat
from remat_jax.planning.candidate import Compiled, StepCandidate
from remat_jax.planning.fit import Fit
from remat_jax.planning.fitting import Load
from remat_jax.planning.named_mixes import best_mix, can_be_mixed, ends
from remat_jax.planning.proposals import Proposals
from remat_jax.solver import Block, ResidualCosts, Stack
from tests.plan_models import job

needs_gpu_compiler = pytest.mark.skipif(not compat.gpu_compiler_installed(), reason="needs XLA's GPU compiler")
LAYERS = 10


def named(name, saved, extra, away=0):
    return StepCandidate(name, (Load(saved, 0, away),) * LAYERS, extra)


FULL, DOTS, EVERYTHING = named("full", 10, 3.0), named("dots", 30, 1.0), named("everything", 90, 0.0)
OFFLOAD, OFF = named("offload_inputs", 0, 4.0, away=10), named("off", 90, 0.0)
NAMED = (OFF, FULL, OFFLOAD, DOTS, EVERYTHING)


def fit_of(budget, *compiled):
    stack = Stack((Block("layer", (ResidualCosts("x", 90.0, 0.3),), 1.0, 2.0, repeats=LAYERS),), None, 0)
    fit = Fit(stack, float(budget), float("inf"), 0)
    for candidate, size, seconds in compiled:
        fit.learn([candidate], [Compiled(size, 0, sizes=SimpleNamespace(seconds=seconds))])
    return fit


def test_the_smallest_that_is_too_large_and_the_leanest_are_compiled_first():
    assert [one.name for one in ends(fit_of(200), NAMED)] == ["dots", "full"]
    assert [one.name for one in ends(fit_of(200, (FULL, 100, 13.0)), NAMED)] == ["dots"]
    assert ends(fit_of(1000), NAMED) == []  # all fit
    assert ends(fit_of(50), NAMED) == []  # none fits


@pytest.mark.parametrize(("budget", "dots"), [(200, 4), (255, 7), (299, 9)])
def test_as_many_of_the_last_layers_keep_more_as_fit(budget, dots):
    mix = best_mix(fit_of(budget, (FULL, 100, 13.0), (DOTS, 300, 11.0)), NAMED, 13.0)
    assert mix.by_layer == ("full",) * (LAYERS - dots) + ("dots",) * dots
    assert re.fullmatch(rf"{LAYERS - dots} × full \| {dots} × dots", mix.name)
    assert mix.loads == FULL.loads[dots:] + DOTS.loads[:dots] and mix.seconds == pytest.approx(3.0 - 0.2 * dots)
    assert 100 + 20 * dots <= 0.99 * budget < 100 + 20 * (dots + 1)


def test_a_mix_must_be_clearly_faster_than_what_fits():
    fit = fit_of(200, (FULL, 100, 13.0), (DOTS, 300, 11.0))
    # Four layers of ten save 0.8 of 2 seconds: 12.2 against 12.5 is less than 4 %.
    assert best_mix(fit, NAMED, 12.5) is None and best_mix(fit, NAMED, 12.8) is not None
    assert best_mix(fit_of(200, (FULL, 100, 11.0), (DOTS, 300, 13.0)), NAMED, 11.0) is None  # keeping costs time


def test_leaner_policies_are_those_that_fit_offload_nothing_and_recompute_little():
    fit = fit_of(1000, (OFF, 900, 20.0))
    proposals = Proposals(fit, NAMED, lambda choices: None)
    # `dots` adds a second, `full` three: more than a quarter of a step of 10 seconds.
    assert [one.name for one in proposals.leaner(fit.tried[0], 10.0)] == ["dots"]
    assert [one.name for one in proposals.leaner(fit.tried[0], 12.0)] == ["dots", "full"]
    fit.learn([DOTS], [Compiled(300, 0)])
    assert proposals.leaner(fit.tried[0], 10.0) == []  # compiled already


@needs_gpu_compiler
def test_where_off_fits_leaner_policies_are_compiled_for_the_last_word():
    found = rj.plan(job(), "1GiB", "h200")
    assert {"off", "dots"} <= {name for name, _ in found.tried} and found.timed


@pytest.mark.parametrize(
    ("kinds", "mixed"),
    [
        (
            (("layer", range(0, 1), 1), ("layer", range(1, 4), 3)),
            True,
        ),  # a first layer that takes the batch is a kind of its own
        ((("encoder", range(0, 2), 2), ("decoder", range(0, 2), 2)), False),
        ((("layer", range(0, 4, 2), 2), ("layer", range(1, 4, 2), 2)), False),  # two kinds that take turns
    ],
)
def test_layers_of_one_class_in_a_row_can_be_mixed(kinds, mixed):
    described = SimpleNamespace(
        kinds=[SimpleNamespace(block=block, layers=layers) for block, layers, _ in kinds],
        stack=SimpleNamespace(blocks=[SimpleNamespace(repeats=repeats) for *_, repeats in kinds]),
    )
    assert can_be_mixed(described) is mixed
