"""`rj.plan` on real models: the compiled step fits, nothing that fits is faster, and the applied step is the compiled one."""

from __future__ import annotations

import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import remat_jax as rj
from remat_jax.cost.count import flops
from remat_jax.errors import (
    ArgumentError,
    BlockError,
    CompileError,
    InfeasibleBudget,
    PlanningError,
    RematError,
    TargetError,
    UnsupportedError,
)
from remat_jax.hardware import target
from remat_jax.memory.compile.process import NotDoneError
from remat_jax.memory.measure import measure_many
from remat_jax.planning import compile_candidates, loop, make_plan
from remat_jax.planning.explain import summary
from remat_jax.policy import NAMED
from tests.plan_models import LAYERS, WIDTH, MlpLayer, MlpStack, job
from tests.small_models import assert_same

MIB = 2**20
BUDGET = 9 * MIB


@pytest.fixture(scope="module")
def made():
    progress = []
    plan = rj.plan(job(scanned=True), BUDGET, "cpu", progress=lambda *call: progress.append(call))
    return plan, progress


def test_the_compiled_step_fits_and_is_what_measure_says(made):
    plan, _ = made
    assert plan.device_bytes <= plan.budget == BUDGET and plan.host_bytes == 0
    planned, full = measure_many(job(scanned=True), [dict(plan.policies), "full"], "cpu")
    assert planned.device_bytes == plan.device_bytes
    # It was compiled because it was expected to fit.
    assert plan.device_bytes / 2 < plan.predicted_bytes <= BUDGET
    assert plan.device_bytes > full.device_bytes + MIB, "a residual of one layer and more is kept"


def test_no_named_policy_that_fits_is_faster(made):
    plan, _ = made
    assert {point.name for point in plan.named} == set(NAMED)
    assert {point.name for point in plan.named if point.remark} == {"offload_inputs", "offload_dot_with_no_batch_dims"}
    named = [point for point in plan.named if not point.remark]
    reports = measure_many(job(scanned=True), [point.name for point in named], "cpu")
    fits = [point for point, report in zip(named, reports, strict=True) if report.device_bytes <= BUDGET]
    assert "full" in {point.name for point in fits} and all(plan.seconds <= point.seconds for point in fits)
    full = next(point for point in fits if point.name == "full")
    # A step that was not compiled fits by its prediction: on JAX 0.11.2 `dots` does.
    assert plan.seconds < plan.best_named.seconds <= full.seconds
    assert plan.base_seconds == next(point.seconds for point in plan.named if point.name == "everything")


def test_the_bound_is_of_the_whole_step_and_below_every_way_that_fits(made):
    plan, _ = made
    assert plan.lower_bound <= plan.seconds < 1.02 * plan.lower_bound and plan.seconds < plan.base_seconds
    within = [
        point for point in (*plan.frontier, *plan.named) if point.device_bytes is not None and point.device_bytes <= BUDGET
    ]
    assert len(within) > 3 and min(point.seconds for point in within) >= plan.lower_bound
    below = 100 * (1 - plan.lower_bound / plan.seconds)
    assert f"By the same estimate, no plan within the budget is more than {below:.1f} % faster." in plan.explain()


def test_every_compilation_is_told(made):
    plan, progress = made
    assert 2 <= len(plan.tried) <= loop.MOST_COMPILED
    messages = [message for message, _, _ in progress]
    assert messages[0] == "perceptrons: tracing" and any(
        message.startswith("compiling ") and " for cpu" in message for message in messages
    )
    assert all(done <= of for _, done, of in progress)


def with_one_residual_more(plan):
    """The policies of `plan` with one more residual saved in all layers of one run; the scan is cut at the same layers."""
    cuts, variants = [part.first for part in plan.parts[1:]], []
    for changed in plan.parts:
        saved = [row.residual for row in changed.rows if row.action == "save" and row.residual != "input#0"]
        for row in changed.rows:
            if row.action == "recompute":
                more = "save: " + ", ".join(f"*:{name}" for name in (*saved, row.residual))
                layers = [more if part is changed else part.policy for part in plan.parts for _ in range(part.layers)]
                variants.append({MlpLayer: rj.LayerPolicies.of(layers, cuts)})
    return variants


def test_no_step_with_one_residual_more_fits(made):
    """Each residual of a layer is 1 MiB; a run of three layers would need three more."""
    plan, _ = made
    assert plan.is_maximal and not plan.cut_short and plan.left_out == ()
    reports = measure_many(job(scanned=True), with_one_residual_more(plan), "cpu")
    assert len(reports) >= 2 and all(report.device_bytes > BUDGET for report in reports)


def test_the_parts_are_the_policies(made):
    plan, _ = made
    (policies,) = plan.policies.values()
    assert list(plan.policies) == [MlpLayer] and policies.layers == LAYERS
    assert [(part.first, part.layers) for part in plan.parts] == [
        (positions.start, len(positions)) for positions, _ in policies.ranges
    ]
    kept = sum(part.saved_bytes for part in plan.parts)
    table = rj.residuals(job(scanned=True), dict(plan.policies))
    of_blocks = sum(row.bytes for row in table if row.action == "save" and ("#" in row.name))
    assert kept == of_blocks
    # The product of `up` is the recomputation's cost: once for each layer that keeps neither it nor what follows.
    again = [
        part.layers for part in plan.parts if any(row.action == "recompute" and "tanh" in row.residual for row in part.rows)
    ]
    assert plan.recompute_flops == sum(again) * 2 * 2048 * WIDTH * 4 * WIDTH


def test_the_frontier_falls_and_has_the_plan(made):
    plan, _ = made
    places = [(point.device_bytes, point.seconds) for point in plan.frontier]
    assert (
        len(places) >= 4 and places == sorted(places) and sorted((s for _, s in places), reverse=True) == [s for _, s in places]
    )
    assert (plan.device_bytes, plan.seconds) in places
    # Half a MiB more than the budget of 9 MiB, enough for a part of the fastest step's residuals.
    assert plan.next_bytes == 2**19 and 0 < plan.next_gib_seconds < plan.seconds - places[-1][1]


def test_what_is_applied_gives_the_same_gradients(made, x64):
    plan, _ = made
    model = MlpStack(scanned=True)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(8, WIDTH)))
    params = model.init(jax.random.key(0), x)
    loss = lambda params, x: jnp.mean(model.apply(params, x) ** 2)  # noqa: E731
    wide = replace(plan, model=replace(plan.model, parameters=tuple((p, s, "float64") for p, s, _ in plan.model.parameters)))
    planned = wide.apply(loss, strict=False)  # another batch and dtype
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.float64), params)
    assert_same(jax.jit(jax.grad(planned))(params, x), jax.jit(jax.grad(loss))(params, x))
    assert flops(jax.grad(planned), params, x) > flops(jax.grad(loss), params, x)


def test_it_says_why_in_words(made):
    plan, _ = made
    explanation = plan.explain()
    assert "MlpLayer 0" in explanation and "recomputing it takes" in explanation and " more would save " in explanation
    assert f"The best named policy that fits, {plan.best_named.name}" in explanation and str(plan)


def test_a_plan_that_is_a_named_policy_is_not_compared_with_itself(made):
    plan, _ = made
    full = tuple(point for point in plan.named if point.name == "full")
    named = replace(plan, policies={MlpLayer: NAMED["full"]}, recompute_flops=0, named=full)
    text = summary(named)
    assert "; no matmul and no convolution is recomputed." in text and text.endswith("The plan is a named policy, full.")
    assert "The best named policy that fits, full, takes" in summary(replace(plan, named=full))


def test_in_a_scan_more_memory_than_the_fastest_plan_needs_is_left_alone():
    """Stacks of a scan cost more than recomputing fusing operations: only the tangent is kept."""
    plan = rj.plan(job(scanned=True), "1 GiB", "cpu")
    assert plan.texts == {"MlpLayer": "save: layers:tanh#0"}
    assert plan.seconds < plan.base_seconds and plan.recompute_flops == 0 and plan.next_gib_seconds is None


@pytest.mark.versions
def test_with_memory_enough_nothing_is_checkpointed():
    plan = rj.plan(job(), "1 GiB", "cpu")
    assert plan.is_off and plan.seconds == plan.base_seconds and plan.recompute_flops == 0
    assert [name for name, _ in plan.tried] == ["off"] and plan.next_gib_seconds is None
    assert "Nothing is checkpointed" in plan.explain() and "The whole step fits without checkpoints." in plan.explain()
    assert str(plan).count("│ off ") == 1 and "every layer" in str(plan) and "best named" not in str(plan)
    fn = lambda params: sum(jnp.sum(leaf) for leaf in jax.tree.leaves(params))  # noqa: E731
    assert float(plan.apply(fn, strict=False)(_ones())) == 2 * LAYERS * 4 * WIDTH * WIDTH


def _ones():
    return jax.tree.map(lambda leaf: jnp.ones(leaf.shape, leaf.dtype), job().params)


def test_too_little_says_the_least_and_what_takes_it():
    with pytest.raises(InfeasibleBudget) as caught:
        rj.plan(job(scanned=True), 3 * MIB, "cpu")
    least = rj.measure(job(scanned=True), "full", "cpu").device_bytes
    assert caught.value.least_bytes <= least and caught.value.held_by["parameters"] == 2 * LAYERS * 4 * WIDTH * WIDTH * 4
    message = str(caught.value)
    assert (
        "budget=3145728 (3.0 MiB): no policy of 'perceptrons' fits on cpu. The least" in message
        and "Its largest parts:" in message
    )


def test_less_than_the_parameters_is_said_without_compiling(monkeypatch):
    monkeypatch.setattr(make_plan, "problem", None)
    with pytest.raises(InfeasibleBudget, match="arguments of a step of 'perceptrons'.*parameters 192.0 KiB") as caught:
        rj.plan(job(scanned=True), "300 kB", "cpu")
    assert caught.value.held_by == {"batch": 2048 * WIDTH * 4, "parameters": 2 * LAYERS * 4 * WIDTH * WIDTH * 4}


@pytest.mark.parametrize(
    ("error", "note", "remark"),
    [
        (CompileError("it crashed; it said nothing"), "plan 2 could not be compiled: it crashed", "could not be compiled"),
        (NotDoneError("not done after timeout=9 s"), "dots would fit and be faster", "was not compiled in time"),
    ],
)
def test_what_cannot_be_compiled_is_left_out_and_told(error, note, remark, monkeypatch, tmp_path):
    compile_programs = compile_candidates.compile_programs

    def failing(programs, *rest, **options):
        if programs[0].key.startswith("plan") or programs[0].key == "dots":
            raise error
        return compile_programs(programs, *rest, **options)

    monkeypatch.setattr(compile_candidates, "compile_programs", failing)
    plan = rj.plan(job(scanned=True), BUDGET, "cpu")
    assert plan.device_bytes <= BUDGET and [name for name, _ in plan.tried if name == "a plan"] == []
    assert any(note in each for each in plan.notes)
    assert rj.Plan.load(plan.save(tmp_path / "plan.json")) == plan
    remarks = {point.name: point.remark for point in plan.named}
    assert remarks["dots"] == f"it {remark}" and remarks["full"] == ""


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"budget": 0}, PlanningError, "budget=0: expected more than 0 bytes"),
        ({"host_budget": -1}, PlanningError, "host_budget=-1"),
        ({"target": "h2000"}, TargetError, "target='h2000' is not a known target"),
        ({"target": "8xh100"}, UnsupportedError, "target='8xh100' has 8 devices"),
        ({"timeout": 0}, ArgumentError, "timeout=0: expected a positive number"),
        ({"workload": 3}, ArgumentError, "workload=3: expected a remat_jax.Workload"),
    ],
)
def test_bad_arguments_are_named(arguments, error, message):
    given = {"workload": job(scanned=True), "budget": BUDGET, "target": "cpu", **arguments}
    with pytest.raises(error, match=message):
        rj.plan(**given)


def test_workloads_that_cannot_be_planned():
    x = jax.ShapeDtypeStruct((4, WIDTH), jnp.float32)
    step = rj.Workload.from_step(lambda x: x, x, blocks=MlpLayer)
    with pytest.raises(BlockError, match="MlpLayer"):
        rj.plan(step, BUDGET, "cpu")
    unused = rj.Workload(lambda p, x: jnp.sum(p * x), x, (x,), MlpLayer)
    with pytest.raises(BlockError, match="MlpLayer"):
        rj.plan(unused, BUDGET, "cpu")


def test_rates_that_are_no_numbers_are_refused():
    with pytest.raises(RematError, match="hbm_bytes_per_s"):
        rj.plan(job(scanned=True), BUDGET, replace(target("h200"), hbm_bytes_per_s=math.nan))


def test_for_a_gpu_offload_is_planned_where_layers_are_unrolled(monkeypatch):
    """Three layers compiled for an H200: within the budget, with host memory where it is faster than recomputing."""
    monkeypatch.setattr(loop, "MOST_COMPILED", 2)
    work = job(rows=65536, layers=3)
    plan = rj.plan(work, "150 MiB", "h200")
    assert plan.device_bytes <= 150 * MIB
    assert plan.best_named is None or plan.seconds <= plan.best_named.seconds
    none = rj.plan(work, "150 MiB", "h200", host_budget=0)
    assert none.host_bytes == 0 and none.device_bytes <= 150 * MIB and none.seconds >= plan.seconds * 0.999
