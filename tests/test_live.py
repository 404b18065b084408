"""Live buffers at the peak, by module: the names of operators, XLA's dumps, and a compilation for an H200."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest

import remat_jax as rj
from remat_jax.errors import UnsupportedError
from remat_jax.memory.hlo.live import Schedule, module_path, named_arguments
from remat_jax.report.tables import render
from tests.small_models import Stack
from tests.workloads import mean_square, perceptrons, struct


@pytest.mark.parametrize(
    ("op_name", "expected"),
    [
        ("jit(f)/jvp(Model.loss)/Model/layers_0/ffn/up/dot_general", ("Model/layers_0/ffn/up", "dot_general", "forward")),
        ("jit(f)/transpose(jvp(blk/ffn))/add_any", ("blk/ffn", "add_any", "backward")),
        (
            "jit(call)/call_exported/jit(flat)/transpose(jvp(Model.loss))/Model/while/body/closed_call/layers.body/layers/"
            "layers.body/layers/checkpoint/rematted_computation/jvp(layers.body)/layers/attn/softmax/div",
            ("Model/layers/attn/softmax", "div", "recomputed"),
        ),
        ("jit(f)/Model/layers_3/Model/layers_3/ffn/mul", ("Model/layers_3/ffn", "mul", "other")),
        ("jit(flat)/mul", ("", "mul", "other")),
        ("jit(f)/jvp(M)/M/body/while/body/remat(checkpoint)/branch_1_fun/x/add", ("M/body/x", "add", "forward")),
        ("", ("", "", "other")),
    ],
)
def test_the_path_in_an_operators_name(op_name: str, expected: tuple[str, str, str]) -> None:
    assert module_path(op_name) == expected


PROGRAM = """\
HloModule jit_f, is_scheduled=true

%body (state: (s32[], f32[4,8], f32[4,3,8])) -> (s32[], f32[4,8], f32[4,3,8]) {
  %state = (s32[], f32[4,8]{1,0}, /*index=2*/f32[4,3,8]{2,1,0}) parameter(0)
  %k = s32[] get-tuple-element(%state), index=0
  %x = f32[4,8]{1,0} get-tuple-element(%state), index=1
  %stack = f32[4,3,8]{2,1,0} get-tuple-element(%state), index=2
  %y = f32[4,8]{1,0} fusion(%x), kind=kLoop, metadata={op_name="jit(f)/jvp(M)/M/while/body/layer/tanh"}
  %kept = f32[4,3,8]{2,1,0} fusion(%stack, %y, %k), kind=kLoop, metadata={op_name="jvp(M)/while/body/dynamic_update_slice"}
  ROOT %next = (s32[], f32[4,8]{1,0}, f32[4,3,8]{2,1,0}) tuple(%k, %y, %kept)
}

ENTRY %main (w: f32[8,8], x: f32[4,8]) -> f32[4,8] {
  %w = f32[8,8]{1,0} parameter(0), metadata={op_name="args[0]"}
  %x0 = f32[4,8]{1,0} parameter(1), metadata={op_name="args[1]"}
  %init = (s32[], f32[4,8]{1,0}, f32[4,3,8]{2,1,0}) tuple(%c, %x0, %zeros)
  %loop = (s32[], f32[4,8]{1,0}, f32[4,3,8]{2,1,0}) while(%init), condition=%cond, body=%body
  %host = f32[4,3,8]{2,1,0:S(5)} copy(%loop), metadata={op_name="jit(f)/jvp(M)/M/layer/copy"}
  ROOT %out = f32[4,8]{1,0} get-tuple-element(%loop), index=1
}
"""
ASSIGNMENT = """\
BufferAssignment:
allocation 0: size 256, parameter 0, shape |f32[8,8]| at ShapeIndex {}:
 value: <1 w @0> (size=256,offset=0): f32[8,8]{1,0}
allocation 1: size 1000, preallocated-temp:
 value: <2 loop{1} (phi) @0> (size=128,offset=0): f32[4,8]{1,0}
 value: <3 loop{2} (phi) @0> (size=384,offset=128): f32[4,3,8]{2,1,0}
 value: <4 state{2} (phi) @0> (size=384,offset=128): f32[4,3,8]{2,1,0}
 value: <5 late @0> (size=100,offset=512): f32[25]{0}
allocation 2: size 5000, color 5, preallocated-temp:
 value: <6 host @5> (size=5000,offset=0): f32[4,3,8]{2,1,0:S(5)}
"""
RANGES = """\
HloLiveRange (max 9):
  InstructionSequence:
    0:w
  BufferLiveRange:
    w{}:0-9
    loop{1}:1-5
    loop{2}:1-5
    state{2}:2-4
    late{}:7-9
    host{}:6-9
  Live ranges at 7 (peak):
    host{}: 5000 bytes (cumulative: 5000 bytes)
"""


def test_the_peak_is_the_devices_and_a_loops_state_is_named_by_what_the_loop_writes() -> None:
    live = Schedule(PROGRAM, ASSIGNMENT, RANGES).at_peak()
    assert [(buffer.name, buffer.phase, buffer.nbytes, buffer.shape) for buffer in live] == [
        ("M/layer:tanh", "forward", 384, "f32[4,3,8]"),  # once, though it also has a name inside the loop
        ("args[0]", "argument", 256, "f32[8,8]"),
        ("M/layer:tanh", "forward", 128, "f32[4,8]"),
    ]
    named = named_arguments(live, ["parameters/w/kernel"])
    assert [(buffer.name, buffer.module) for buffer in named if buffer.phase == "argument"] == [
        ("parameters/w/kernel", "parameters")
    ]


def test_a_stack_that_a_loop_writes_under_another_shape_is_named_by_what_the_loop_writes() -> None:
    shaped = PROGRAM.replace("%kept = f32[4,3,8]{2,1,0} fusion", "%kept = f32[12,8]{1,0} fusion")
    shaped = shaped.replace("  ROOT %next", "  %shaped = f32[4,3,8]{2,1,0} bitcast(%kept)\n  ROOT %next").replace(
        "%kept)\n}", "%shaped)\n}"
    )
    assert "tuple(%k, %y, %shaped)" in shaped
    largest = Schedule(shaped, ASSIGNMENT, RANGES).at_peak()[0]
    assert (largest.name, largest.phase, largest.nbytes) == ("M/layer:tanh", "forward", 384)


EXCHANGING = """\
%summed (a: f32[8,8], b: f32[8]) -> (f32[2,8], f32[2]) {
  %a = f32[8,8]{1,0} parameter(0)
  %b = f32[8]{0} parameter(1)
  ROOT %scatter = (f32[2,8]{1,0}, f32[2]{0}) reduce-scatter(%a, %b), dimensions={0}, to_apply=%add
}

ENTRY %main (w: f32[2,8], v: f32[8]) -> f32[2,8] {
  %w = f32[2,8]{1,0} parameter(0), metadata={op_name="args[0]"}
  %v = f32[2]{0} parameter(1), metadata={op_name="args[1]"}
  %flat = f32[16]{0} bitcast(%w)
  %start = ((f32[16]{0}, f32[2]{0}), (f32[64]{0}, f32[8]{0})) all-gather-start(%flat, %v), dimensions={0}
  %done = (f32[64]{0}, f32[8]{0}) all-gather-done(%start)
  %whole = f32[64]{0} get-tuple-element(%done), index=0
  %other = f32[64]{0} copy(%whole)
  %grads = (f32[8,8]{1,0}, f32[8]{0}) fusion(%whole, %other), kind=kLoop
  %grad = f32[8,8]{1,0} get-tuple-element(%grads), index=0
  %last = f32[8]{0} get-tuple-element(%grads), index=1
  %sum = ((f32[8,8]{1,0}, f32[8]{0}), (f32[2,8]{1,0}, f32[2]{0})) async-start(%grad, %last), calls=%summed
  %after = (f32[2,8]{1,0}, f32[2]{0}) async-done(%sum)
  ROOT %out = f32[2,8]{1,0} get-tuple-element(%after), index=0
}
"""
PLACES = {"w": 64, "v": 8, "start{1,0}": 256, "start{1,1}": 32, "other": 256, "grads{0}": 256, "grads{1}": 32}


def test_what_a_collective_gives_or_takes_is_told() -> None:
    values = [
        f"allocation {number}: size {nbytes}, preallocated-temp:\n value: <{number} {name} @0> (size={nbytes},offset=0): f32[]"
        for number, (name, nbytes) in enumerate(PLACES.items())
    ]
    # Later the scattered array is in the copy's buffer.
    values.insert(list(PLACES).index("other") + 1, " value: <9 scatter{0} @0> (size=256,offset=0): f32[64]")
    spans = [f"    {name if '{' in name else name + '{}'}:0-8" for name in PLACES] + ["    scatter{0}:9-9"]
    live = Schedule(EXCHANGING, "\n".join(values), "\n".join(spans)).at_peak()
    assert sorted((buffer.nbytes, buffer.collective) for buffer in live if buffer.phase != "argument") == [
        (32, "all-gather"),
        (32, "reduce-scatter"),
        (256, ""),  # a copy of a gathered array
        (256, "all-gather"),
        (256, "reduce-scatter"),
    ]
    assert sorted((buffer.name, buffer.collective) for buffer in live if buffer.phase == "argument") == [
        ("args[0]", "all-gather"),
        ("args[1]", "all-gather"),
    ]


class Block(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.Dense(256, name="down")(jnp.tanh(nn.Dense(1024, name="up")(x)))


@pytest.mark.parametrize("scan", [False, True])
def test_an_h200s_peak_is_told_by_module(scan: bool) -> None:
    job = mean_square(Stack(Block, 4, scan), struct(4096, 256), Block, optimizer=optax.adam(1e-3))
    report = rj.measure(job, "full", target="h200")
    alive = sum(buffer.nbytes for buffer in report.live)
    assert 0.97 * report.device_bytes <= alive <= report.device_bytes
    assert [buffer.nbytes for buffer in report.live] == sorted((buffer.nbytes for buffer in report.live), reverse=True)
    stream = 4096 * 256 * 4
    by_module = report.live_bytes_by_module
    # The inputs of all blocks but the first are outputs of the block before; the first input is the batch.
    kept = {module: nbytes for (module, phase), nbytes in by_module.items() if phase == "forward"}
    if scan:
        # JAX 0.12 no longer reports who filled the stack of inputs.
        assert kept.get("Stack/layers/down", 0) + kept.get("Stack", 0) >= 4 * stream
    else:
        assert {f"Stack/layer_{index}/down" for index in range(2)} <= set(kept)
        assert all(kept[f"Stack/layer_{index}/down"] == stream for index in range(2))
    assert by_module["batch[0]", "argument"] == stream
    # Unrolled, some are already updated in place by then; JAX 0.12 copies them for the backward pass.
    parameters = 4 * (2 * 256 * 1024 + 1024 + 256) * 4
    assert by_module["parameters", "argument"] <= parameters
    assert sum(nbytes for (module, _), nbytes in by_module.items() if module == "parameters") > 0.5 * parameters
    assert "backward" in {phase for _, phase in by_module}
    shown = render(report.live_table(2))
    assert f"{len(by_module) - 2} more" in shown and shown.count("MiB") >= 3


def test_flags_that_have_xla_write_down_one_program_alone_take_nothing_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """MaxText sets this flag when its configuration is read."""
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_hlo_module_re=jit_train_step")
    report = rj.measure(rj.Workload(lambda w, x: jnp.tanh(x @ w).sum(), struct(64, 64), (struct(64, 64),), "*"), "off", "h200")
    assert sum(buffer.nbytes for buffer in report.live) >= 3 * 64 * 64 * 4 and report.seconds is not None


def test_several_devices_are_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"target='8xh100' has 8 devices.*ask for one device"):
        rj.measure(perceptrons(2), "full", target="8xh100")
