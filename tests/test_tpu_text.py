"""What is read from XLA:TPU's compiled text: cycles, trip counts, prefetches, and collectives in parts and between slices."""

from __future__ import annotations

import itertools
import json
import operator
import re
import subprocess
import sys

import pytest

from remat_jax.hardware import target
from remat_jax.hardware.rates import Rates
from remat_jax.memory.compile.backends import backend_of, tpu
from remat_jax.memory.compile.process import _remedy
from remat_jax.memory.hlo.scalars import trip_count
from remat_jax.memory.hlo.text import parse
from remat_jax.memory.step_time.collectives import read_collectives
from remat_jax.memory.step_time.schedule import StepTime, step_time

V5E, SLICES = target("4xv5e"), target("2xv5e-4")
RATES = Rates.of(V5E)
CLOCK = 1.5e9


def cycles(number: int) -> str:
    return f'backend_config={{"window_config":{{"estimated_cycles":"{number}"}}}}'


def timed(text: str, name: str = "4xv5e") -> StepTime:
    return step_time(text, target(name))


KERNELS = f"""
%inside (p: f32[1024]) -> f32[1024] {{
  %p = f32[1024]{{0}} parameter(0)
  ROOT %n = f32[1024]{{0}} negate(%p)
}}
ENTRY %main (x: f32[4096,1024]) -> f32[1024] {{
  %x = f32[4096,1024]{{1,0}} parameter(0)
  %start = ((f32[4096,1024]{{1,0}}), f32[1024,1024]{{1,0:S(1)}}, u32[]{{:S(2)}}) slice-start(%x), slice={{[0:1024], [0:1024]}}
  %work = f32[1024]{{0}} fusion(%x), kind=kLoop, calls=%inside, {cycles(750)}
  %done = f32[1024,1024]{{1,0:S(1)}} slice-done(%start)
  %same = f32[1024,1024]{{1,0:S(1)}} custom-call(%done), custom_call_target="ConcatBitcast"
  ROOT %last = f32[1024]{{0}} fusion(%same), kind=kLoop, calls=%inside, {cycles(1500)}
}}
"""


def test_kernels_take_their_cycles_and_wait_for_what_is_prefetched() -> None:
    time = timed(KERNELS)
    assert time.compute_seconds == pytest.approx(2250 / CLOCK)
    prefetched = 4 * 2**20 / RATES.hbm_bytes_per_s
    assert time.seconds == pytest.approx(prefetched + 1500 / CLOCK) and prefetched > 750 / CLOCK
    assert (time.overlap.out.count, time.exchanges.count, time.untimed) == (0, 0, ())


def test_attributes_with_line_breaks_belong_to_their_instruction() -> None:
    broken = KERNELS.replace(
        'target="ConcatBitcast"', 'target="ConcatBitcast", frontend_attributes={metadata={\n"a": "}{"\n  b = 3\n}}'
    )
    assert timed(broken) == timed(KERNELS) and parse(broken).entry.root.name == "last"


LOOP = """
%body (s: (s32[])) -> (s32[]) {{
  %s = (s32[]) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %step = s32[] constant({step})
  %next = s32[] add(%i, %step)
  ROOT %t = (s32[]) tuple(%next)
}}
%condition (s: (s32[])) -> pred[] {{
  %s = (s32[]) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %c = s32[] {counter}
  %end = s32[] constant({end})
  ROOT %goes = pred[] compare(%{left}, %{right}), direction={direction}
}}
ENTRY %main (x: s32[]) -> (s32[]) {{
  %x = s32[] parameter(0)
  %begin = s32[] constant({begin})
  %t = (s32[]) tuple(%begin)
  ROOT %loop = (s32[]) while(%t), condition=%condition, body=%body
}}
"""
DIRECTIONS = {"LT": operator.lt, "LE": operator.le, "GT": operator.gt, "GE": operator.ge, "NE": operator.ne}


def counted(begin: int, step: int, end: int, direction: str, *, turned: bool = False, counter: str = "copy(%i)") -> int:
    left, right = ("end", "c") if turned else ("c", "end")
    text = LOOP.format(begin=begin, step=step, end=end, direction=direction, left=left, right=right, counter=counter)
    return trip_count(parse(text).entry.root, unknown=-1)


def test_loops_are_counted_as_they_run() -> None:
    seen = 0
    for direction, begin, step, end, turned in itertools.product(DIRECTIONS, (0, 3), (-2, 1, 3), (-3, 0, 7, 8), (False, True)):
        value, runs = begin, 0
        while runs < 50 and DIRECTIONS[direction](*((end, value) if turned else (value, end))):
            value, runs = value + step, runs + 1
        answer = counted(begin, step, end, direction, turned=turned)
        assert answer == (runs if runs < 50 else -1), (direction, begin, step, end, turned)
        seen += 0 < runs < 50
    assert seen > 50
    assert counted(0, 1, 9, "LT", counter="add(%i, %i)") == -1, "the counter itself is not compared"


def part(name: str, target: str) -> str:
    call = f', custom_call_target="{target}"' if target else ""
    return f"""
%{name} (p: f32[256,1024]) -> f32[1024,1024] {{
  %p = f32[256,1024]{{1,0}} parameter(0)
  %all = f32[1024,1024]{{1,0}} all-gather(%p), channel_id=7, replica_groups=mesh['a'=4] {{'a'}}, dimensions={{0}}
  ROOT %r = f32[1024,1024]{{1,0}} custom-call(%all){call}
}}"""


PARTS = f"""
{part("begins", "AsyncCollectiveStart")}
{part("async_collective_fusion.1", "")}
{part("ends", "AsyncCollectiveDone")}
%all-reduce-scatter.1 (p: f32[1024,1024]) -> f32[256,1024] {{
  %p = f32[1024,1024]{{1,0}} parameter(0)
  %sum = f32[1024,1024]{{1,0}} all-reduce(%p), channel_id=8, replica_groups={{{{0,1,2,3}}}}, to_apply=%add
  ROOT %r = f32[256,1024]{{1,0}} slice(%sum), slice={{[0:256], [0:1024]}}
}}
ENTRY %main (x: f32[256,1024]) -> f32[256,1024] {{
  %x = f32[256,1024]{{1,0}} parameter(0)
  %start = f32[1024,1024]{{1,0}} fusion(%x), kind=kCustom, calls=%begins
  %work = f32[1024,1024]{{1,0}} fusion(%start), kind=kOutput, calls=%async_collective_fusion.1, {cycles(15000)}
  %end = f32[1024,1024]{{1,0}} fusion(%work), kind=kCustom, calls=%ends
  ROOT %part = f32[256,1024]{{1,0}} fusion(%end), kind=kCustom, calls=%all-reduce-scatter.1
}}
"""


def test_a_collective_in_parts_runs_once_beside_compute() -> None:
    counts = {each.kind: (each.count, each.bytes) for each in read_collectives(PARTS)}
    assert counts == {"all-gather": (1, 4 * 2**20), "reduce-scatter": (1, 4 * 2**20)}
    time, links = timed(PARTS), RATES.links
    assert links is not None
    # Four chips in a square, no axis closed to a ring: half of the rate of each of two axes.
    each = links.seconds("all-gather", 4 * 2**20, 4)
    assert each is not None and time.exchanges.seconds == pytest.approx(2 * each)
    assert time.compute_seconds == pytest.approx(15000 / CLOCK) and time.seconds == pytest.approx(2 * each)


SPARSE = 'async_execution_thread="sparsecore"'
SPARSE_CORE = f"""
%gathers (p: f32[256,1024], t: token[]) -> f32[1024,1024] {{
  %t = token[] parameter(1)
  %p = f32[256,1024]{{1,0}} parameter(0)
  ROOT %all = f32[1024,1024]{{1,0}} all-gather(%p), channel_id=7, replica_groups=mesh['a'=4] {{'a'}}, dimensions={{0}}
}}, execution_thread="sparsecore"
%copies (p: f32[1024,1024]) -> f32[1024,1024] {{
  %p = f32[1024,1024]{{1,0}} parameter(0)
  ROOT %c = f32[1024,1024]{{0,1}} copy(%p)
}}, execution_thread="sparsecore"
%formats (p: f32[1024,1024], t: token[]) -> f32[1024,1024] {{
  %t = token[] parameter(1)
  %p = f32[1024,1024]{{1,0}} parameter(0)
  %begin = ((f32[1024,1024]{{1,0}}), f32[1024,1024]{{0,1}}, u32[]) call-start(%p), {SPARSE}, to_apply=%copies
  ROOT %end = f32[1024,1024]{{0,1}} call-done(%begin)
}}, execution_thread="sparsecore"
ENTRY %main (x: f32[256,1024], y: f32[1024,1024]) -> f32[1024,1024] {{
  %x = f32[256,1024]{{1,0}} parameter(0)
  %y = f32[1024,1024]{{1,0}} parameter(1)
  %now = s32[] custom-call(), custom_call_target="PrepareAsyncCallStart"
  %token = token[] custom-call(%now), custom_call_target="PrepareAsyncCallDone"
  %gather = ((f32[256,1024]{{1,0}}, token[]), f32[1024,1024]{{1,0}}) call-start(%x, %token), {SPARSE}, to_apply=%gathers
  %format = ((f32[1024,1024]{{1,0}}, token[]), f32[1024,1024]{{0,1}}) call-start(%y, %token), {SPARSE}, to_apply=%formats
  %work = f32[1024,1024]{{1,0}} fusion(%y), kind=kLoop, calls=%copies, {cycles(15000)}
  %formatted = f32[1024,1024]{{0,1}} call-done(%format)
  ROOT %gathered = f32[1024,1024]{{1,0}} call-done(%gather)
}}
"""


def test_what_the_sparsecore_runs_is_beside_compute() -> None:
    (gather,) = read_collectives(SPARSE_CORE)
    assert (gather.kind, gather.count, gather.bytes) == ("all-gather", 1, 4 * 2**20)
    time, links = timed(SPARSE_CORE), RATES.links
    assert links is not None
    each = links.seconds("all-gather", 4 * 2**20, 4)
    assert each is not None and time.exchanges.seconds == pytest.approx(each)
    work, format_seconds = 15000 / CLOCK, 2 * 4 * 2**20 / RATES.hbm_bytes_per_s
    assert format_seconds > work, "compute waits for the copy, which began before it"
    assert time.compute_seconds == pytest.approx(work) and time.untimed == ()
    assert time.seconds == pytest.approx(max(format_seconds, each))


@pytest.mark.parametrize(
    ("transfer", "kind"),
    [("ALL_REDUCE", "all-reduce"), ("ONE_TO_ONE", "collective-permute"), ("BROADCAST", "collective-broadcast")],
)
def test_a_transfer_between_slices_is_a_collective_on_the_network(transfer: str, kind: str) -> None:
    meets = f'_xla_host_transfer_rendezvous="a_0",_xla_megascale_transfer_type="{transfer}"'
    text = f"""
ENTRY %main (x: f32[262144]) -> f32[262144] {{
  %x = f32[262144]{{0}} parameter(0)
  %token = token[] after-all()
  %sent = (f32[262144]{{0}}, u32[], token[]) send(%x, %token), channel_id=1, frontend_attributes={{{meets}}}
  %got = (f32[262144]{{0}}, u32[], token[]) recv(%token), channel_id=2, frontend_attributes={{{meets}}}
  %done = (f32[262144]{{0}}, token[]) recv-done(%got), channel_id=2
  ROOT %y = f32[262144]{{0}} get-tuple-element(%done), index=0
}}"""
    (collective,) = read_collectives(text)
    assert (collective.kind, collective.count, collective.bytes) == (kind, 1, 2**20)
    links = Rates.of(SLICES).links
    assert links is not None
    time = timed(text, "2xv5e-4")
    assert time.seconds == pytest.approx(links.seconds(kind, 2**20, 2, hosts=2)) and not time.untimed


def test_devices_are_numbered_along_the_first_axis() -> None:
    """`slices.axes_between` takes the place of a device from its number on the mesh."""
    described = target("v5e-16")
    backend = backend_of(described)
    script = (
        "import json, sys; from remat_jax.memory.compile import child\n"
        "print(json.dumps([each.coords[:2] for each in child.devices(json.loads(sys.argv[1]))]))"
    )
    request = json.dumps({"topology": backend.topology(described)})
    run = subprocess.run(
        [sys.executable, "-c", script, request], capture_output=True, text=True, env=backend.environment(described)
    )
    assert json.loads(run.stdout) == [[x, y] for y in range(4) for x in range(4)]


def test_a_kernel_that_exceeds_the_memory_of_the_core_is_no_step_that_exceeds_the_device() -> None:
    hbm = (
        "RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory on HBM, the total memory required for HLO temporaries"
    )
    spaces = "RESOURCE_EXHAUSTED: Ran out of memory in memory space {}. Used 16.55G of 15.75G"
    vmem = "RESOURCE_EXHAUSTED: Allocation (size=268435456) would exceed memory (size=134217728) :: [space=vmem, scoped]"
    refused = [bool(re.search(tpu._NO_ROOM, text)) for text in (hbm, spaces.format("hbm"), spaces.format("vmem"), vmem)]
    assert refused == [True, True, False, False]
    assert "smaller blocks" in _remedy(vmem, 1) and "ran out of memory" not in _remedy(vmem, 1)
