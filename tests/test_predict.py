"""The benchmark of predicted memory: predictions against compiled memory, and its parts against closed forms."""

from __future__ import annotations

import flax.linen as nn
import numpy as np
import pytest

import remat_jax as rj
from benchmarks import predict_memory
from benchmarks.predictor import Predictor, compile_policies, random_policies
from remat_jax.hardware import target
from tests.small_models import Stack
from tests.workloads import mean_square, needs_gpu_compiler, struct

ROWS, WIDTH, LAYERS = 4096, 64, 8


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        hidden = nn.gelu(nn.Dense(4 * WIDTH, name="up")(nn.LayerNorm(name="norm")(x)))
        return x + nn.Dense(WIDTH, name="down")(hidden)


@pytest.fixture(scope="module")
def job():
    return mean_square(Stack(Block, LAYERS, True), struct(ROWS, WIDTH), Block)


@pytest.fixture(scope="module")
def on_h200(job):
    return Predictor(job, "h200", 5)


@needs_gpu_compiler
def test_random_policies_are_predicted_without_compiling_them(job, on_h200):
    policies = [policy for policy in random_policies(job, 5, seed=7) if not on_h200.predict(policy).compiled]
    sizes = compile_policies(job, policies, target("h200"))
    errors = [abs(on_h200.predict(policy).temp_bytes - sizes[policy].temp) / sizes[policy].temp for policy in policies]
    assert len(policies) >= 4 and np.median(errors) < 0.03 and max(errors) < 0.12, errors
    # Figures that do not depend on the schedule are exact.
    for policy in policies:
        prediction = on_h200.predict(policy)
        assert prediction.host_bytes == sizes[policy].host_temp
        assert prediction.device_bytes - prediction.temp_bytes == sizes[policy].device - sizes[policy].temp
    # They are small beside the differences between the policies, whichever residuals a version names from the seed.
    temps = [sizes[policy].temp for policy in policies]
    assert max(temps) - min(temps) > 5 * max(
        abs(on_h200.predict(policy).temp_bytes - sizes[policy].temp) for policy in policies
    )


@needs_gpu_compiler
def test_a_compiled_policy_is_answered_with_what_the_compiler_said(job, on_h200):
    report = rj.measure(job, "full", "h200")
    prediction = on_h200.predict("full")
    assert prediction.compiled and (prediction.temp_bytes, prediction.device_bytes) == (report.temp_bytes, report.device_bytes)
    # Another text that keeps the same arrays is the same policy.
    assert on_h200.predict("recompute: *").compiled


def test_three_points_on_a_plane_give_the_plane_back(job, monkeypatch):
    """A made-up compiler: 5 + kept + 2 × a layer's saved bytes + 3 × its offloaded bytes."""

    def made_up(workload, policies, described, **_):
        sizes = {}
        for policy in policies:
            table = rj.residuals(workload, policy)
            of = {action: sum(r.bytes for r in table if r.action == action) for action in ("save", "offload")}
            layer = {action: sum(r.bytes for r in table if r.action == action and r.scanned) // LAYERS for action in of}
            temp = 5 + of["save"] + 2 * layer["save"] + 3 * layer["offload"]
            sizes[policy] = type("Sizes", (), {"temp": temp, "device": temp + 7})
        return sizes

    monkeypatch.setattr("benchmarks.predictor.compile_policies", made_up)
    predictor = Predictor(job, "h200", ["full", "everything", "dots", "offload: *mul*, *up*, *norm*", "offload: @dots"])
    for policy in ("save: *norm*", "offload: *norm*; save: *up:dot*"):
        wanted = made_up(job, [policy], None)[policy].temp
        prediction = predictor.predict(policy)
        assert not prediction.compiled and prediction.device_bytes - prediction.temp_bytes == 7
        assert abs(prediction.temp_bytes - wanted) <= 1e-4 * wanted
    predictor.learn("offload: *up:dot*", 123_456)
    assert predictor.predict("offload: *up:dot*").temp_bytes == 123_456


# The benchmark of another depth.


@needs_gpu_compiler
def test_another_depth_predicts_the_compiled_memory() -> None:
    rows = predict_memory.compare(predict_memory.deep_mlp(3), predict_memory.deep_mlp(2), "h200", 1, 0)
    assert rows and all(row["host_bytes"] == row["residual_host_bytes"] for row in rows)
    assert all(row["temp_bytes"] > row["residual_device_bytes"] > 0 for row in rows)
    assert predict_memory.summary(rows, "two layers")["worst"] < 0.15
