"""Differences between two policies: moved residuals in bytes, products in FLOPs, and compiled bytes."""

from __future__ import annotations

import json

import pytest

import remat_jax as rj
from remat_jax.cost.count import flops
from remat_jax.memory.diff import NOT_KEPT, diff_policies
from tests.small_models import Mlp, Stack
from tests.workloads import mean_square, needs_gpu_compiler, struct

ROWS, WIDTH, LAYERS = 64, 4, 3
HIDDEN = 4 * ROWS * 3
"""Bytes of one hidden activation of `Mlp`, which is 3 wide."""


def workload(scanned=True, layers=LAYERS):
    return mean_square(Stack(Mlp, layers, scanned), struct(ROWS, WIDTH), Mlp, name="stack")


@pytest.fixture(scope="module")
def scanned():
    return workload()


def moved(diff):
    return {move.name: (move.before, move.after, move.device_bytes, move.host_bytes) for move in diff.moves}


def test_what_is_saved_and_offloaded_is_told_by_name_and_in_bytes(scanned):
    diff = diff_policies(scanned, "full", "save: *tanh*; offload: @inputs")
    stream = 4 * LAYERS * ROWS * WIDTH
    table = {row.name: row for row in rj.residuals(scanned, "save: *tanh*; offload: @inputs")}
    assert moved(diff)["layers:tanh#0"] == ("recompute", "save", LAYERS * HIDDEN, 0)
    assert moved(diff)["layers:input#0"][1:] == ("offload", 0, stream)
    assert table["layers:input#0"].bytes == stream
    # The scan carries the stream that was the blocks' inputs under `full`.
    assert diff.change("residual_host_bytes") == stream == sum(move.host_bytes for move in diff.moves)
    assert diff.change("residual_device_bytes") == LAYERS * HIDDEN - stream == sum(move.device_bytes for move in diff.moves)
    # Equal arrays of several runs of layers all count.
    of_runs = diff_policies(workload(layers=4), "full", "2 × save: *tanh* | 2 × everything")
    assert sum(move.bytes for move in of_runs.moves if move.name == "layers:tanh#0") == 4 * HIDDEN
    assert of_runs.change("residual_device_bytes") == sum(move.device_bytes for move in of_runs.moves)


def test_there_and_back_is_nothing(scanned):
    there, back = diff_policies(scanned, "full", "dots"), diff_policies(scanned, "dots", "full")
    assert there.moves and moved(back) == {name: (b, a, -d, -h) for name, (a, b, d, h) in moved(there).items()}
    assert there.change("device_bytes") == -back.change("device_bytes")
    assert there.recompute_flops == tuple(reversed(back.recompute_flops))
    data = json.loads(json.dumps(there.to_dict()))
    assert (data["before"], data["after"]) == ("full", "dots")
    assert data["device_bytes"] == rj.measure(scanned, "dots").device_bytes - rj.measure(scanned, "full").device_bytes
    assert {move["name"]: move["device_bytes"] for move in data["moves"]} == {k: v[2] for k, v in moved(there).items()}
    same = diff_policies(scanned, "dots", "save: @dots")
    assert same.moves == () and same.change("device_bytes") == 0 and "Residuals that move" not in str(same)


@pytest.mark.parametrize("is_scanned", [True, False])
def test_the_flops_computed_again_are_the_whole_difference_to_no_checkpoint(is_scanned):
    job = workload(is_scanned)
    diff = diff_policies(job, "off", "full")
    up = 2 * ROWS * WIDTH * 3 * LAYERS
    # `Linear_1` is the first product. The second is only added: backward does not read it, and it is not recomputed.
    assert diff.recompute_flops == (0, up) and list(diff.recomputed.values()) == [(0, up)]
    (module,) = diff.recomputed
    assert module == ("layers/Linear_1" if is_scanned else "layer_*/Linear_1")
    steps = [job.step(policy) for policy in ("off", "full")]
    plain, full = (flops(step.function, *step.arguments) for step in steps)
    assert full - plain == up
    # A kept product is not recomputed.
    assert diff_policies(job, "full", "save: *Linear_1:*").recompute_flops == (up, 0)


def test_off_is_shown_as_what_it_keeps_by_the_names_that_a_checkpoint_gives(scanned):
    diff = diff_policies(scanned, "off", "full")
    assert moved(diff)["layers:tanh#0"] == ("save", "recompute", -LAYERS * HIDDEN, 0)
    off, full = (rj.residuals(scanned, policy).device_bytes for policy in ("off", "full"))
    assert diff.change("residual_device_bytes") == full - off
    assert "off keeps the same residuals as the policy everything" in " ".join(str(diff).split())
    dots = diff_policies(scanned, "off", "dots")
    assert moved(dots)["layers/Linear_1:dot_general#0"] == (NOT_KEPT, "save", LAYERS * HIDDEN, 0)


def test_unrolled_layers_are_one_line_and_one_by_one_in_the_data():
    diff = diff_policies(workload(False), "full", "save: *tanh*")
    assert moved(diff) == {f"layer_{index}:tanh#0": ("recompute", "save", HIDDEN, 0) for index in range(LAYERS)}
    assert "layer_*:tanh#0 ×3" in str(diff) and "layer_1" not in str(diff)
    mixed = diff_policies(workload(False), "full", "save: layer_1:tanh*")
    assert list(moved(mixed)) == ["layer_1:tanh#0"] and "layer_1:tanh#0" in str(mixed)


@needs_gpu_compiler
def test_on_a_gpu_the_host_bytes_are_the_offloaded_residuals(scanned):
    diff = diff_policies(scanned, "full", "offload: @inputs", "h200")
    assert diff.change("host_bytes") == diff.change("residual_host_bytes") == 4 * LAYERS * ROWS * WIDTH
    assert diff.after.target == "h200"


def test_the_residuals_of_a_finished_step_are_compared_as_those_of_its_loss(scanned):
    step = scanned.step("off")
    finished = rj.Workload.from_step(step.function, *step.arguments, blocks=Mlp)
    of_step, of_loss = (diff_policies(job, "full", "dots") for job in (finished, scanned))
    assert of_step.moves == of_loss.moves != ()
    assert of_step.change("residual_device_bytes") == of_loss.change("residual_device_bytes") > 0
