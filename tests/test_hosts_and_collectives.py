"""What devices send each other, and the host memory that they share: collectives, partitioned offload, each host's sum."""

from __future__ import annotations

import dataclasses
import textwrap
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
from remat_jax.memory.compile.sizes import Sizes
from remat_jax.memory.step_time.collectives import Collective, executed, read_collectives
from remat_jax.reading import from_plain
from tests.mesh_models import BATCH, CONFIG, LAYERS, LENGTH, MESH, small_llama
from tests.workloads import needs_gpu_compiler

FLOAT = 4

TEXT = """
    %scattered (p: f32[8,4]) -> f32[2,4] {
      %p = f32[8,4]{1,0} parameter(0)
      ROOT %part = f32[2,4]{1,0} reduce-scatter(%p), dimensions={0}
    }

    %body (state: (s32[], f32[2,4], f32[3,4])) -> (s32[], f32[2,4], f32[3,4]) {
      %state = (s32[], f32[2,4]{1,0}, f32[3,4]{1,0}) parameter(0)
      %i = s32[] get-tuple-element(%state), index=0
      %a = f32[2,4]{1,0} get-tuple-element(%state), index=1
      %b = f32[3,4]{1,0} get-tuple-element(%state), index=2
      %start = ((f32[2,4]{1,0}, f32[3,4]{1,0}), (f32[8,4]{1,0}, f32[12,4]{1,0})) all-gather-start(%a, %b), dimensions={0}, \
metadata={op_name="jit(step)/transpose(jvp(Model))/while/body/checkpoint/rematted_computation/up/dot_general"}
      %done = (f32[8,4]{1,0}, f32[12,4]{1,0}) all-gather-done(%start)
      %whole = f32[8,4]{1,0} get-tuple-element(%done), index=0
      %scatter = ((f32[8,4]{1,0}), f32[2,4]{1,0}) async-start(%whole), calls=%scattered
      %new = f32[2,4]{1,0} async-done(%scatter)
      ROOT %next = (s32[], f32[2,4]{1,0}, f32[3,4]{1,0}) tuple(%i, %new, %b)
    }

    ENTRY %main (x: f32[2,4], y: f32[3,4], n: s32[]) -> f32[2,4] {
      %x = f32[2,4]{1,0} parameter(0)
      %y = f32[3,4]{1,0} parameter(1)
      %n = s32[] parameter(2)
      %sum = f32[2,4]{1,0} all-reduce(%x), metadata={op_name="jit(step)/jvp(Model)/head/dot_general"}
      %init = (s32[], f32[2,4]{1,0}, f32[3,4]{1,0}) tuple(%n, %sum, %y)
      %loop = (s32[], f32[2,4]{1,0}, f32[3,4]{1,0}) while(%init), condition=%cond, body=%body, \
metadata={op_name="jit(step)/transpose(jvp(Model))/while"}, backend_config={"known_trip_count":{"n":"5"}}
      %out = f32[2,4]{1,0} get-tuple-element(%loop), index=1
      %swapped = f32[2,4]{1,0} collective-permute(%out), source_target_pairs={{0,1},{1,0}}
      %sent = f32[2,4]{1,0} ragged-all-to-all(%x, %swapped, %n, %n, %n, %n), replica_groups={{0,1}}
      ROOT %told = f32[2,4]{1,0} collective-broadcast(%sent), replica_groups={{0,1}}
    }
"""


def test_loops_count_as_often_as_they_run_and_combined_calls_by_their_arrays():
    collectives = read_collectives(textwrap.dedent(TEXT))
    assert collectives == (
        Collective("all-gather", "recomputed", 5 * 2, 5 * FLOAT * (8 * 4 + 12 * 4)),
        # XLA made it from a sum and a slice; it has no name, and belongs to the phase of its loop.
        Collective("reduce-scatter", "backward", 5, 5 * FLOAT * 8 * 4),
        Collective("all-reduce", "forward", 1, FLOAT * 2 * 4),
        Collective("collective-permute", "other", 1, FLOAT * 2 * 4),
        Collective("ragged-all-to-all", "other", 1, FLOAT * 2 * 4),  # it sends one array
        Collective("collective-broadcast", "other", 1, FLOAT * 2 * 4),
    )


@needs_gpu_compiler
def test_a_recomputed_layer_gathers_no_weight_again():
    job = small_llama(MESH, optimizer=optax.sgd(1e-3))
    reports = {policy: rj.measure(job, policy, "8xh200") for policy in ("off", "full")}
    sent = {policy: executed(report.collectives) for policy, report in reports.items()}
    gathers = {
        collective.phase: collective.count for collective in reports["full"].collectives if collective.kind == "all-gather"
    }
    behind = {phase: count for phase, count in gathers.items() if phase in ("recomputed", "backward")}
    # The recomputation and the gradient read the same gathered weights; under off the gradient alone reads them.
    assert sent["full"]["all-gather"] == sent["off"]["all-gather"]
    # From JAX 0.12 on XLA names them after the other of the two.
    assert behind in ({"recomputed": 7 * LAYERS}, {"backward": 7 * LAYERS})
    again = {kind: (count - sent["off"][kind][0], size - sent["off"][kind][1]) for kind, (count, size) in sent["full"].items()}
    # The sum after the attention is repeated, because the feed-forward's gradient needs it; nobody reads the sum after that.
    stream = BATCH // 4 * LENGTH * CONFIG.hidden_size * FLOAT
    assert {kind: difference for kind, difference in again.items() if difference != (0, 0)} == {
        "all-reduce": (LAYERS, LAYERS * stream)
    }
    # At the peak the weights of recomputed layers are gathered.
    whole = [buffer for buffer in reports["full"].live if buffer.collective == "all-gather" and buffer.phase != "forward"]
    assert reports["full"].exchanged_bytes >= sum(buffer.nbytes for buffer in whole) >= CONFIG.hidden_size**2 // 2 * FLOAT
    assert "all-gather" in str(reports["full"]) and "at the peak, exchanged" in str(reports["full"])


def test_sizes_remember_what_is_sent():
    sizes = Sizes(1, 2, 3, 4, 5, 6, 7, 8, collectives=(Collective("all-gather", "forward", 2, 10),))
    assert from_plain(Sizes, dataclasses.asdict(sizes)) == sizes


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
