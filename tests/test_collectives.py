"""Collectives, counted in compiled texts, and the ones that recomputing repeats."""

from __future__ import annotations

import dataclasses
import textwrap

import optax

import remat_jax as rj
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
      ROOT %swapped = f32[2,4]{1,0} collective-permute(%out), source_target_pairs={{0,1},{1,0}}
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
    )


RAGGED = """
    ENTRY %main (x: f32[8,4], o: f32[8,4], n: s32[2]) -> f32[8,4] {
      %x = f32[8,4]{1,0} parameter(0)
      %o = f32[8,4]{1,0} parameter(1)
      %n = s32[2]{0} parameter(2)
      %sent = f32[8,4]{1,0} ragged-all-to-all(%x, %o, %n, %n, %n, %n), replica_groups={{0,1}}
      ROOT %told = f32[8,4]{1,0} collective-broadcast(%sent), replica_groups={{0,1}}
    }
"""


def test_a_ragged_exchange_sends_one_array():
    assert read_collectives(textwrap.dedent(RAGGED)) == (
        Collective("ragged-all-to-all", "other", 1, FLOAT * 8 * 4),
        Collective("collective-broadcast", "other", 1, FLOAT * 8 * 4),
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
