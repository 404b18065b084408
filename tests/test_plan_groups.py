"""Plans below `full`: groups of layers, where the inputs of single layers are too much."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import remat_jax as rj
from remat_jax.errors import InfeasibleBudget, PlanningError
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
    return rj.plan(job, int(0.9 * full), "h200", host_budget=0)


def test_layers_are_in_groups_where_their_inputs_are_too_much(job, full, planned):
    (policies,) = planned.policies.values()
    assert planned.device_bytes <= planned.budget == int(0.9 * full) and len(policies.groups) == 1
    # No more groups than it takes: their inputs are the difference, to a hundredth of what is there.
    assert planned.device_bytes == pytest.approx(planned.predicted_bytes, rel=0.01)
    assert rj.measure(job, dict(planned.policies), "h200").device_bytes == planned.device_bytes
    again = rj.measure(job, "full", "h200")
    assert again.device_bytes == full and planned.recompute_flops > 0


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


def test_the_gradients_of_a_plan_with_groups_are_those_of_the_loss():
    job = plan_models.job(rows=64, scanned=True, layers=8)
    policies = {plan_models.MlpLayer: "4 × full in groups of 4 | 4 × full"}
    draw = np.random.default_rng(0)
    with jax.enable_x64():
        params, batch = (
            jax.tree.map(lambda leaf: jnp.asarray(draw.normal(size=leaf.shape) / 8, jnp.float64), one)
            for one in (job.params, job.batch)
        )
        plain = jax.grad(job.loss)(params, *batch)
        under = jax.grad(rj.checkpoint_blocks(job.loss, policies))(params, *batch)
        for one, other in zip(jax.tree.leaves(plain), jax.tree.leaves(under), strict=True):
            np.testing.assert_allclose(other, one, rtol=1e-12, atol=1e-12)


def test_below_every_grouping_nothing_fits(job, full):
    with pytest.raises(InfeasibleBudget, match="The least that was reached, compiled") as caught:
        rj.plan(job, int(0.5 * full), "h200", host_budget=0)
    assert caught.value.least_bytes < 0.8 * full
