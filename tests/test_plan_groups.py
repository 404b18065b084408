"""Plans below `full`: groups of layers, if the inputs of single layers are too large."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

import remat_jax as rj
from remat_jax.errors import InfeasibleBudget, PlanningError
from remat_jax.hardware import target
from remat_jax.planning import make_plan
from remat_jax.planning.candidate import Compiled
from remat_jax.planning.fit_memory import predicted
from remat_jax.planning.loop import search
from remat_jax.planning.translate import named_candidate
from tests import plan_models

LAYERS = 16


@pytest.fixture(scope="module")
def job():
    return plan_models.job(rows=65536, scanned=True, layers=LAYERS)


@pytest.fixture(scope="module")
def full(job):
    return rj.measure(job, "full", "h200").device_bytes


@pytest.fixture(scope="module")
def planned(job, full):
    """The plan by Triton's matmuls: of so small a step, cuBLAS's need a quarter more, and nothing would fit."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(make_plan, "more_without_triton", lambda compiler, tried: 0)
        return rj.plan(job, int(0.9 * full), "h200", host_budget=0)


def test_layers_are_in_groups_where_their_inputs_are_too_much(job, full, planned):
    (policies,) = planned.policies.values()
    assert planned.device_bytes <= planned.budget == int(0.9 * full) and len(policies.groups) == 1
    # No more groups than necessary: their inputs are the difference, to a hundredth of the available memory.
    assert planned.device_bytes == pytest.approx(planned.predicted_bytes, rel=0.01)
    assert rj.measure(job, dict(planned.policies), "h200").device_bytes == planned.device_bytes
    assert planned.recompute_flops > 0 == planned.host_bytes


def test_the_parts_say_what_groups_keep(planned):
    (policies,) = planned.policies.values()
    grouped, rest = planned.parts
    assert (grouped.layers, rest.layers) == (policies.groups[-1][1], LAYERS - policies.groups[-1][1])
    assert grouped.saved_bytes == rest.saved_bytes // rest.layers * len(policies.groups)
    assert grouped.recompute_seconds == pytest.approx(rest.recompute_seconds + grouped.forward_seconds)


def test_a_plan_with_groups_is_saved_and_read(tmp_path, planned, job):
    assert rj.Plan.load(planned.save(tmp_path / "plan.json"), job) == planned
    data = planned.to_dict()
    data["policies"][0]["groups"] = [[3, 3]]
    (tmp_path / "wrong.json").write_text(json.dumps(data))
    with pytest.raises(PlanningError, match="group"):
        rj.Plan.load(tmp_path / "wrong.json", job)


@pytest.mark.parametrize(("rate", "grouped"), [(5e9, True), (1e14, False)])
def test_groups_are_a_candidate_where_the_link_makes_offload_slow(rate, grouped):
    """No step is compiled here: each needs what the formula says. The budget lacks room for the inputs of three layers."""
    alone = plan_models.job(rows=65536, layers=8)

    def loss(params, x):  # layers of one kind: the first one's input comes from parameters too
        return alone.loss(params, x * params["params"]["layers_0"]["down"]["kernel"][0])

    work = rj.Workload(loss, alone.params, alone.batch, plan_models.MlpLayer, optimizer=alone.optimizer)
    h200 = target("h200")
    link = replace(h200, reached={**h200.reached, "out_bytes_per_s": rate, "in_bytes_per_s": rate})
    described = making(work, 2**60, link).described
    stack, full = described.stack, named_candidate(described, "full")
    planner = making(work, int(predicted(stack, full.loads)) - 3 * full.loads[0].saved, link)
    known = planner.known

    def by_the_formula(candidates, best=None):
        sizes = (step.expected_bytes or predicted(stack, step.loads) for step in candidates)
        return [Compiled(round(size), step.host_bytes) for size, step in zip(sizes, candidates, strict=True)]

    known.fit.learn([full], by_the_formula([full]))
    search(known, by_the_formula)
    best = known.best.candidate
    assert bool(best.groups) == grouped and known.best.compiled.device_bytes <= planner.budget
    if grouped:
        # Over saving everything: all layers once more, and three of each group's layers (all but the last) a second time.
        again = full.seconds + 3 * stack.blocks[0].forward_seconds
        assert best.seconds == pytest.approx(again)


def making(work, budget, link):
    return make_plan._Planner(work, budget, link, None, 300.0, lambda *_: None, None)


def test_below_every_grouping_nothing_fits(job, full):
    with pytest.raises(InfeasibleBudget, match="The least memory of a compiled step") as caught:
        rj.plan(job, int(0.5 * full), "h200", host_budget=0)
    assert caught.value.least_bytes < 0.8 * full
