"""Host memory of several devices: offloaded arrays stay partitioned, and each host's sum is compared with its memory."""

from __future__ import annotations

from dataclasses import replace

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import PartitionSpec as P

import remat_jax as rj
from remat_jax import compat
from remat_jax.hardware import target
from remat_jax.memory.compile.devices import host_shortage
from tests.mesh_models import BATCH, CONFIG, LAYERS, LENGTH, MESH, small_llama
from tests.workloads import needs_gpu_compiler

FLOAT = 4


@needs_gpu_compiler
def test_each_device_has_its_part_of_the_state_and_of_the_residuals_on_its_host():
    job = small_llama(MESH, optimizer=rj.offload_optimizer(optax.adam(1e-3)))
    norms = (2 * LAYERS + 1) * CONFIG.hidden_size
    matrices = sum(leaf.size for leaf in jax.tree.leaves(job.params)) - norms
    here, tokens = FLOAT * (matrices // 8 + norms), 2 * FLOAT * BATCH * LENGTH // 4
    moments = 2 * here
    both = rj.measure(job, "offload_inputs", "2x4xh200")
    # Parameters, Adam's count, tokens and targets; the moments replace the old ones on the host.
    assert (both.argument_bytes, both.alias_bytes) == (here + 4 + tokens, here + 4)

    # Each layer's input, partitioned only along the batch: over four of the eight devices.
    inputs = LAYERS * BATCH * LENGTH * CONFIG.hidden_size * FLOAT
    # All layers read the rotations and the mask, which stay on the devices.
    assert both.residual_host_bytes == inputs
    assert both.receipt.host_bytes == inputs // 4
    assert both.host_bytes == inputs // 4 + moments
    assert both.to_dict()["host_bytes_per_host"] == 4 * both.host_bytes
    assert "host memory, per host" in str(both)


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x + nn.Dense(64, use_bias=False)(jnp.tanh(nn.Dense(64, use_bias=False)(x)))


ROWS = 2**26


@pytest.fixture(scope="module")
def large():
    """Inputs of 16 GiB for each of two layers, over eight devices."""
    model, x = nn.Sequential([Layer(), Layer()]), jax.ShapeDtypeStruct((ROWS, 64), jnp.float32)
    params = jax.eval_shape(model.init, jax.random.key(0), x)
    return rj.Workload(
        lambda p, x: (model.apply(p, x * 2) ** 2).mean(), params, (x,), Layer, mesh="data=8", shardings=(P(), P("data"))
    )


@needs_gpu_compiler
def test_the_devices_of_a_host_share_its_memory(large, monkeypatch):
    monkeypatch.setenv("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", "15")
    hosts = target("2x4xh200")
    report = rj.measure(large, "offload_inputs", hosts)
    each = 2 * ROWS * 64 * FLOAT // 8
    assert report.host_bytes == each < 15 * 2**30 < report.host_bytes_per_host == 4 * each
    assert report.host_warning is None
    traps = {finding.trap: finding for finding in rj.doctor(large, "offload_inputs", hosts).findings}
    assert "16.0 GiB" in traps["pinned_pool"].problem and "host_memory" not in traps

    small = replace(hosts, host_memory_bytes=each - 1)
    warning = rj.measure(large, "offload_inputs", small).host_warning
    assert warning == host_shortage(each, small) and "the 4 devices of a host need 16.0 GiB" in warning
    traps = {finding.trap: finding for finding in rj.doctor(large, "offload_inputs", small).findings}
    assert traps["host_memory"].remedy == "Offload less, or use more hosts"
    assert f"warning: {warning[:40]}" in str(rj.measure(large, "offload_inputs", small))


def test_an_offloaded_optimizer_may_be_inside_a_chain_on_a_mesh():
    optimizer = optax.chain(optax.clip(1.0), rj.offload_optimizer(optax.adam(1e-3)))
    job = small_llama(MESH, optimizer=optimizer)
    away = [leaf for leaf in jax.tree.leaves(job.step("off").arguments) if compat.is_on_host(leaf)]
    # Both moments of every parameter, none of the parameters themselves.
    assert len(away) == 2 * len(jax.tree.leaves(job.params))
    assert sum(leaf.size for leaf in away) == 2 * sum(leaf.size for leaf in jax.tree.leaves(job.params))
