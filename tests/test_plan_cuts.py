"""Cuts of a scanned stack: the memory of a layer in a scan of its own, and a search that tries it."""

from __future__ import annotations

import functools
import json

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

import remat_jax as rj
from benchmarks.cuts import few_rows
from remat_jax.cost.cost import is_pass
from remat_jax.memory.measure import measure_many
from remat_jax.planning.candidate import block_policies, choices_together
from remat_jax.planning.fit_memory import predicted
from remat_jax.planning.outcome import parts_of
from remat_jax.planning.problem import describe, extra_seconds
from remat_jax.planning.translate import named_candidate, own_candidate, policies_of, recut
from remat_jax.policy import Policy
from remat_jax.solver import Block, Choice, ResidualCosts, Stack, stack_plan
from tests import plan_models
from tests.plan_by_hand import PlannedLayer, part
from tests.plan_by_hand import plan as planned
from tests.planning_models import RATES, decoder
from tests.searches import SAVE
from tests.workloads import mean_square, needs_gpu_compiler, struct

# --- what is compiled -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def job():
    return plan_models.job(rows=65536, scanned=True, layers=4)


@pytest.fixture(scope="module")
def sizes(job):
    """Four layers: the last kept, the last two cut, and the last two in one scan, compiled for an H200."""
    last = ("|| 1 x full | 1 x everything", "| 1 x everything || 1 x everything", "| 2 x everything")
    texts = [f"2 x full {text}" for text in last]
    return [report.device_bytes for report in measure_many(job, texts, "h200")]


def test_a_scan_of_one_layer_needs_what_its_policy_says(sizes):
    """One more layer keeps 32 MiB, and less than in one scan of two, whose rows are stacked.

    Against one that is kept already: with some versions of JAX the last layer keeps for nothing, where it would compute again.
    """
    last, alone, scan = sizes
    assert alone - last == pytest.approx(32 * 2**20, rel=0.05) and alone < 0.9 * scan


def test_a_scan_allocates_its_gradients_when_its_backward_pass_begins():
    """A cut saves as much as the formula says; in two scans of one length it saves nothing: XLA gives them the same zeros."""
    job = few_rows(8)
    described = describe(job, "h200")
    (block,) = described.stack.blocks
    assert block.late_bytes == 8 * 1024**2 * 2 + (4096 + 3 * 1024) * 2
    cuts = {"8 x dots": (), "5 x dots || 3 x dots": (5,), "4 x dots || 4 x dots": (4,)}
    dots = named_candidate(described, "dots")
    expected = [predicted(described.stack, recut(described, dots, places).loads) for places in cuts.values()]
    whole, cut, same = (report.device_bytes for report in measure_many(job, list(cuts), "h200"))
    assert expected[0] - expected[1] == pytest.approx(3 * 20 * 2**20, rel=0.01)
    assert whole - cut == pytest.approx(expected[0] - expected[1], rel=0.2)
    assert expected[2] == expected[0] and whole - same < 0.2 * (whole - cut)


class Tied(nn.Module):
    """Four iterations of a scan that share their parameters."""

    @nn.compact
    def __call__(self, x):
        axes = {"variable_broadcast": "params", "split_rngs": {"params": False}}
        scan = nn.scan(lambda layer, x, _: (layer(x), None), **axes, length=4)
        return scan(plan_models.MlpLayer(name="layers"), x, None)[0]


@needs_gpu_compiler
def test_a_plan_has_its_last_layer_alone_and_says_why():
    plan = rj.plan(few_rows(8), "720MiB", "h200")
    (layers,) = plan.policies.values()
    assert 7 in layers.cuts and [finding.kind for finding in plan.findings].count("cut") == 1


def test_only_a_scan_of_separate_parameters_stacks_gradients():
    """Gradients of parameters that all iterations share are summed, and unrolled layers are not one scan."""
    tied, x = Tied(), jax.ShapeDtypeStruct((8, plan_models.WIDTH), jnp.float32)
    parameters = plan_models.parameters(tied)
    shared = rj.Workload(lambda params, x: tied.apply(params, x).sum(), parameters, (x,), plan_models.MlpLayer)
    for job in (shared, plan_models.job()):
        assert {block.late_bytes for block in describe(job, "h200").stack.blocks} == {0.0}


# --- what is planned --------------------------------------------------------------------------------------------------


def test_cuts_are_of_scans_and_between_layers_that_do_the_same():
    described = {scanned: describe(plan_models.job(scanned=scanned), "h200") for scanned in (True, False)}
    full = {scanned: named_candidate(problem, "full").choices for scanned, problem in described.items()}
    unrolled = recut(described[False], own_candidate(described[False], full[False]), (3, 5))
    assert unrolled.cuts == ()
    candidate = own_candidate(described[True], (*full[True][:4], *[(SAVE,) * len(full[True][0])] * 2))
    assert candidate.cuts == ()
    cut = recut(described[True], candidate, (0, 2, 4, 5))
    assert cut.cuts == (2, 5) and [load.cut for load in cut.loads] == [at in (2, 4, 5) for at in range(6)]
    (policies,) = policies_of(described[True], cut).values()
    assert policies.cuts == (2, 5) and [len(layers) for layers, _ in policies.ranges] == [2, 2, 1, 1]
    assert cut.seconds == candidate.seconds and cut != candidate
    # To join the gradients of two scans, each of their bytes is read and written once.
    whole, (block,) = own_candidate(described[True], full[True]), described[True].stack.blocks
    joining = 2 * block.repeats * block.late_bytes / described[True].rates.hbm_bytes_per_s
    assert recut(described[True], whole, (2,)).seconds - whole.seconds == pytest.approx(joining)
    assert candidate.seconds - extra_seconds(described[True], policies_of(described[True], candidate)) == pytest.approx(joining)
    parts = describe(plan_models.job(scanned=True).in_micro_batches(4), "h200")
    whole = own_candidate(parts, full[True])
    assert recut(parts, whole, (2,)).seconds - whole.seconds == pytest.approx(4 * joining)
    parts = parts_of(described[True], described[True].stack, cut)
    assert [(part.first, part.layers) for part in parts] == [(run.start, len(run)) for run, _ in policies.ranges]


def test_the_layers_of_a_plan_with_cuts_keep_their_order():
    """Its cuts say between which layers. Without cuts, the layers that save least come first."""
    block = Block("layer", (ResidualCosts("x", 8.0, 1.0),), 1.0, 2.0, repeats=4, late_bytes=1.0)
    stack, choices = Stack((block,)), [(Choice.SAVE,), *[(Choice.RECOMPUTE,)] * 3]
    for cuts, expected in (((), choices[::-1]), ((2,), choices)):
        plan = stack_plan(stack, block_policies(stack, tuple(choices)), cuts=cuts)
        assert choices_together(stack, plan) == tuple(expected)


@functools.cache
def scanned_decoder(target):
    return describe(decoder(scan=True), target, rates=RATES)


@pytest.mark.parametrize("name", ["full", "dots", "dots_with_no_batch_dims"])
def test_the_parts_of_a_named_policy_take_together_what_it_takes(name):
    described = scanned_decoder("h200")
    candidate = named_candidate(described, name)
    parts = parts_of(described, described.stack, candidate)
    kept = sum(len(kind.layers) * kind.program.price(Policy.parse(name)).kept_seconds for kind in described.kinds)
    assert kept > 0 and candidate.seconds > kept
    assert sum(part.layers * part.recompute_seconds for part in parts) == pytest.approx(candidate.seconds - kept)


def test_the_kernels_of_a_tpu_write_into_the_stack_of_a_scan():
    """A matmul writes its result in any case; on a GPU the scan passes over it three times more."""
    kept = {}
    for name in ("h200", "v5e"):
        (kind,) = scanned_decoder(name).kinds
        (up,) = (array for array in kind.program.arrays if any(each == "layers/ffn/up:dot_general#0" for each in array.names))
        kept[name] = kind.program.kept_seconds(up) * RATES.hbm_bytes_per_s / up.bytes
    assert kept == {"h200": pytest.approx(3), "v5e": 0}


def test_on_a_tpu_a_pass_fuses_into_the_matmul_that_reads_it():
    """The activation between two matmuls: a GPU writes it anyway, and a TPU only to keep it."""
    prices = {}
    for name in ("h200", "v5e"):
        (kind,) = scanned_decoder(name).kinds
        program = kind.program
        (down,) = (eqn for eqn in program.flat.eqns if "layers/ffn/down:dot_general#0" in eqn.outputs[0].names)
        (relu,) = (eqn for eqn in program.flat.eqns if down.inputs[0] in eqn.outputs)
        assert is_pass(relu)
        written = program.kept_seconds(down.inputs[0]) * RATES.hbm_bytes_per_s / down.inputs[0].bytes
        prices[name] = program.seconds[relu] > 0, round(written)
    assert prices == {"h200": (True, 3), "v5e": (False, 1)}


def test_layers_of_another_shape_are_not_in_a_scan_of_their_own():
    """Two parts have the same policy, and no scan is cut: the residuals of the two differ."""
    explained = planned(
        policies={PlannedLayer: rj.Policy.parse("full")}, parts=(part(0, 2, "full"), part(2, 1, "full"))
    ).explain()
    assert "PlannedLayer 2:" in explained and "of its own" not in explained


def test_a_file_carries_the_cuts_and_one_without_is_read(tmp_path):
    cut = rj.LayerPolicies.parse("2 x full || 1 x full | 1 x dots")
    parts = (part(0, 2, "full"), part(2, 1, "full"), part(3, 1, "dots"))
    plan = planned(policies={PlannedLayer: cut}, parts=parts)
    assert rj.Plan.load(plan.save(tmp_path / "plan.json")) == plan
    assert "PlannedLayer 2, in a scan of its own:" in plan.explain() and plan.explain().count("of its own") == 1
    data = json.loads((tmp_path / "plan.json").read_text())
    assert data["version"] == 4 and [count for count, _ in data["policies"][0]["runs"]] == [2, 1, 1]
    data["version"], data["policies"][0]["runs"] = 1, [[4, rj.Policy.parse("full").to_dict()]]
    (tmp_path / "old.json").write_text(json.dumps(data))
    assert rj.Plan.load(tmp_path / "old.json").policies == {PlannedLayer: rj.LayerPolicies.parse("4 x full")}


def test_the_parts_of_a_plan_cost_what_the_plan_costs():
    """The very last layer's copies, which nothing hides, count too; all of them use the device's memory bandwidth."""
    described = describe(plan_models.job(rows=65536, layers=3), "h200")
    for name in ("full", "offload_inputs", "offload: @dots", "dots"):
        candidate = named_candidate(described, name)
        parts = parts_of(described, described.stack, candidate)
        in_memory = 2 * candidate.host_bytes / described.rates.hbm_bytes_per_s
        costs = sum(part.layers * (part.recompute_seconds + part.copy_seconds) for part in parts)
        assert costs + in_memory == pytest.approx(candidate.seconds), name


class Sine(nn.Module):
    width: int = 64

    @nn.compact
    def __call__(self, x):
        return nn.Dense(16)(jnp.sin(nn.Dense(self.width)(x)))


def test_a_named_policy_is_the_program_of_its_choices():
    """A residual that is only an intermediate, a product before its sine, is recomputed under both."""
    described = describe(mean_square(nn.Sequential([Sine(), Sine(), Sine()]), struct(256, 16), Sine), "h200")
    assert any(not residual.needed for block in described.stack.blocks for residual in block.residuals)
    candidate = named_candidate(described, "full")
    alike = own_candidate(described, candidate.choices)
    assert candidate == alike and alike.seconds == pytest.approx(candidate.seconds)
    assert named_candidate(described, "off").choices is None


class Norm(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.LayerNorm()(x)


def test_calls_of_a_block_that_do_the_same_are_one_part_though_calls_of_another_block_are_between_them():
    """The first norm, whose input needs no gradient, and the narrow layer are parts of their own."""
    widths = (64, 64, 32, 64)
    model = nn.Sequential([module for width in widths for module in (Norm(), Sine(width))])
    described = describe(mean_square(model, struct(256, 16), (Norm, Sine)), "h200", rates=RATES)
    candidate = named_candidate(described, "full")
    parts = parts_of(described, described.stack, candidate)
    assert [part.where for part in parts] == ["Norm 0", "Sine 0–1", "Norm 1–3", "Sine 2", "Sine 3"]
    assert sum(part.recomputed_bytes for part in parts) == sum(load.recomputed for load in candidate.loads)
    assert parts[1].saved_bytes == 2 * 256 * 16 * 4 and parts[2].saved_bytes == 3 * 256 * 16 * 4
