"""Blocks partitioned by hand: their gradients and residuals inside `shard_map` equal those of one device."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType

import remat_jax as rj
from tests.shard_map_models import AXES, BATCH, HEADS, LAYERS, LENGTH, MODES, WIDTH, losses


@pytest.fixture(scope="module")
def results(on_eight_devices):
    return dict(np.load(on_eight_devices("tests.shard_map_models", "results.npz", JAX_ENABLE_X64="1")))


@pytest.mark.parametrize(("case", "policy"), [*MODES, ("nnx", "inside"), ("nnx", "eager")])
def test_gradients_inside_shard_map_are_those_of_one_device(results, case, policy):
    alone = {name.rpartition("/")[2]: value for name, value in results.items() if name.startswith(f"{case}/alone/")}
    assert len(alone) == (4 if case == "scanned" else 4 * LAYERS)
    for place, expected in alone.items():
        gradient = results[f"{case}/{policy}/{place}"]
        assert gradient.dtype == np.float64 and np.abs(expected).max() > 1e-3
        np.testing.assert_allclose(gradient, expected, rtol=0, atol=1e-12 * np.abs(expected).max())


@pytest.mark.parametrize("case", ["constraint True", "constraint False"])
def test_offload_on_several_devices_without_jit_says_what_to_do(results, case):
    assert "put the function that takes the gradient under jax.jit" in str(results[f"eager/{case}"])


def test_offload_with_a_sharding_constraint_works_under_jit(results):
    for place in range(4):
        within, between = (results[f"constraint {is_within}/{place}"] for is_within in (True, False))
        assert np.abs(within).max() > 1e-3
        np.testing.assert_allclose(within, between, rtol=0, atol=1e-12 * np.abs(within).max())


@pytest.fixture(scope="module")
def workloads():
    mesh = AbstractMesh((2, 2, 2), AXES, axis_types=(AxisType.Auto,) * 3)
    params, of_blocks, alone, divided = losses("scanned", mesh)
    x = jax.ShapeDtypeStruct((BATCH, LENGTH, WIDTH), jnp.float32)
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.float32), params)
    return tuple(rj.Workload(loss, shapes, (x,), of_blocks) for loss in (alone, divided))


@pytest.mark.parametrize("policy", ["full", "offload_inputs", "dots", "offload_dot_with_no_batch_dims"])
def test_residuals_of_all_devices_are_those_of_one_but_for_sums_that_are_not_summed_yet(workloads, policy):
    alone, divided = (rj.residuals(job, policy) for job in workloads)
    stream = 4 * LAYERS * BATCH * LENGTH * WIDTH
    # Each of the two devices that share the heads has its own part of the sum over them.
    partial = stream if "dot" in policy else 0
    if policy.startswith("offload"):
        assert alone.host_bytes > 0 and divided.host_bytes == alone.host_bytes + partial
        assert divided.device_bytes == alone.device_bytes
    else:
        assert divided.device_bytes == alone.device_bytes + partial
    kept = {row.name: row.bytes for row in divided.rows if str(row.action) in ("save", "offload")}
    if policy == "dots":
        assert kept["layers/attention/bthd,bshd->bhts:dot_general#0"] == 4 * LAYERS * BATCH * HEADS * LENGTH * LENGTH
        assert kept["layers/hidden:dot_general#0"] == 4 * stream and kept["layers/attention:dot_general#0"] == 2 * stream
