"""How much of the host copies compute covers in a compiled schedule, on texts whose answer is known."""

from __future__ import annotations

import math
from typing import Any

import pytest

from remat_jax.errors import UnsupportedError
from remat_jax.hardware import target
from remat_jax.hardware.products import Product
from remat_jax.hardware.rates import COPY_SECONDS, LAUNCH_SECONDS, Rates
from remat_jax.memory.hlo.slots import scanned_offload_is_miscompiled
from tests.overlap_at_rates import read_overlap

# A copy of 1000 bytes takes 10 s, a matmul 8 s, an element-wise operation on x 2 s.
RATES = {"flops_per_s": 250.0, "hbm_bytes_per_s": 1000.0, "host_link_bytes_per_s": 100.0}
HEAD = """HloModule m, is_scheduled=true
%gemm (p0: f32[10,10], p1: f32[10,10]) -> f32[10,10] {
  %p0 = f32[10,10]{1,0} parameter(0)
  %p1 = f32[10,10]{1,0} parameter(1)
  ROOT %dot = f32[10,10]{1,0} dot(%p0, %p1), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}
"""
START = "%{0} = (f32[250]{{0:S(5)}}, f32[250]{{0}}, u32[]) copy-start(%x)"
DONE = "%{0}.d = f32[250]{{0:S(5)}} copy-done(%{0})"
FETCH = "%{0} = (f32[250]{{0}}, f32[250]{{0:S(5)}}, u32[]) copy-start(%h)"
FETCHED = "%{0}.d = f32[250]{{0}} copy-done(%{0})"
MATMUL = "%{0} = f32[10,10]{{1,0}} fusion(%m, %m), kind=kCustom, calls=%gemm"
WORK = "%{0} = f32[250]{{0}} negate(%x)"


def overlap(*lines: tuple[str, str], head: str = HEAD, **rates: Any) -> Any:
    body = "\n".join(f"  {form.format(name)}" for form, name in lines)
    text = f"""{head}
ENTRY %main (x: f32[250], m: f32[10,10], h: f32[250]) -> f32[250] {{
  %x = f32[250]{{0}} parameter(0)
  %m = f32[10,10]{{1,0}} parameter(1)
  %h = f32[250]{{0:S(5)}} parameter(2)
{body}
  ROOT %end = f32[250]{{0}} bitcast(%x)
}}
"""
    return read_overlap(text, target("h200"), **{**RATES, **rates})


def test_a_copy_is_covered_by_what_stands_between_start_and_done() -> None:
    covered = overlap((WORK, "w"), (START, "a"), (MATMUL, "g"), (DONE, "a"), (MATMUL, "k"))
    assert (covered.out.count, covered.out.bytes, covered.out.seconds) == (1, 1000, 10.0)
    assert (covered.out.covered, covered.out.coverable) == (0.8, 0.8)
    assert (covered.compute_seconds, covered.step_seconds) == (18.0, 20.0)
    assert covered.back.bytes == 0 and covered.back.covered == 1.0


def test_copies_of_one_direction_wait_for_each_other_and_not_for_the_other_direction() -> None:
    both = overlap((START, "a"), (START, "b"), (MATMUL, "g"), (DONE, "a"), (MATMUL, "k"), (DONE, "b"))
    assert both.out.covered == pytest.approx(0.8) and both.step_seconds == 20.0
    apart = overlap((START, "a"), (FETCH, "b"), (MATMUL, "g"), (DONE, "a"), (FETCHED, "b"))
    assert apart.out.covered == apart.back.covered == 0.8 and apart.step_seconds == 10.0


def test_what_could_be_covered_is_at_most_all() -> None:
    covered = overlap((START, "a"), (DONE, "a"), (MATMUL, "g"), (MATMUL, "k"), (START, "b"), (DONE, "b"))
    assert (covered.out.covered, covered.out.coverable) == (0.0, 0.8)
    covered = overlap((START, "a"), (MATMUL, "g"), (MATMUL, "k"), (DONE, "a"))
    assert (covered.out.covered, covered.out.coverable) == (1.0, 1.0)


ROUND_TRIP = (
    (MATMUL, "made"),
    ("%o = (f32[10,10]{{1,0:S(5)}}, f32[10,10]{{1,0}}, u32[]) copy-start(%made)", ""),
    (MATMUL, "g"),
    ("%o.d = f32[10,10]{{1,0:S(5)}} copy-done(%o)", ""),
    ("%held = (f32[10,10]{{1,0}}, f32[10,10]{{1,0:S(5)}}) tuple(%g, %o.d)", ""),
    ("%h2 = f32[10,10]{{1,0:S(5)}} get-tuple-element(%held), index=1", ""),
    ("%i = (f32[10,10]{{1,0}}, f32[10,10]{{1,0:S(5)}}, u32[]) copy-start(%h2)", ""),
    ("%i.d = f32[10,10]{{1,0}} copy-done(%i)", ""),
    ("%read = f32[10,10]{{1,0}} fusion(%i.d, %m), kind=kCustom, calls=%gemm", ""),
    (MATMUL, "behind"),
)


def test_an_array_is_back_before_it_is_read_and_leaves_after_it_is_made() -> None:
    # 400 bytes each way, 4 seconds; one matmul of 8 seconds between the array's first and last use.
    covered = overlap(*ROUND_TRIP)
    assert (covered.out.covered, covered.back.covered, covered.back.coverable) == (1.0, 0.0, 0.0)
    assert (covered.covered, covered.coverable, covered.coverable_seconds) == (0.5, 0.5, 4.0)
    # On a link of half the rate 8 seconds are too few for both copies, whenever they start.
    slow = overlap(*ROUND_TRIP, host_link_bytes_per_s=50.0)
    assert (slow.out.covered, slow.covered, slow.coverable) == (1.0, 0.5, 0.5)
    # Arguments exist from the beginning; the copies run within the schedule.
    given = overlap((MATMUL, "first"), *[(form.replace("%made", "%m"), name) for form, name in ROUND_TRIP[1:]])
    assert (given.covered, given.coverable) == (0.5, 0.5)
    waiting = [ROUND_TRIP[place] for place in (0, 1, 3, 2, 4, 5, 6, 7, 8, 9)]
    assert overlap(*waiting).covered == 0.0


def test_an_array_that_is_fetched_twice_left_once() -> None:
    fetched = ROUND_TRIP[6:8]
    again = [(form.replace("%i", "%j"), name) for form, name in fetched]
    read = "%read = f32[10,10]{{1,0}} add(%i.d, %j.d)"
    held = [(ROUND_TRIP[4][0].replace("%g", "%made"), ""), ROUND_TRIP[5]]
    trip = [*ROUND_TRIP[:2], ROUND_TRIP[3], *held, *fetched, *again, (read, "")]
    covered = overlap((START, "a"), (MATMUL, "k"), (MATMUL, "l"), (DONE, "a"), *trip)
    # 10 + 4 seconds out and 8 back; of one array's copy out and of both copies back nothing can be covered.
    assert (covered.out.seconds, covered.back.seconds, covered.coverable_seconds) == (14.0, 8.0, 10.0)
    assert covered.covered == covered.coverable == pytest.approx(10 / 22)


def test_what_cannot_be_covered_is_missing_in_its_own_direction() -> None:
    """The other direction has spare time but cannot lend it: its link may be idle while this array waits."""
    late = [(form.replace("%g,", "%m,"), name) for form, name in (ROUND_TRIP[place] for place in (0, 1, 3, 4, 5, 6, 7, 8))]
    covered = overlap((START, "a"), (DONE, "a"), *late, (FETCH, "b"), (MATMUL, "k"), (MATMUL, "l"), (FETCHED, "b"))
    # 10 + 4 seconds each way. Out, 8 seconds of compute are available; back, there is plenty, but not for the late array.
    assert (covered.out.available_seconds, covered.back.available_seconds) == (8.0, 24.0)
    assert (covered.coverable_seconds, covered.back.covered_seconds) == (8.0 + 10.0, 10.0)


def test_rates_are_the_targets_unless_given() -> None:
    lines = (START, "a"), (MATMUL, "g"), (WORK, "w"), (DONE, "a")
    of_target = overlap(*lines, **dict.fromkeys(RATES))
    assert of_target.out.seconds == COPY_SECONDS + 1000 / 5.5e10
    # Two kernels start; one core computes the single tile of 64 × 64 of this small product, and its pipeline must fill.
    rates = Rates.of("h200")
    product = rates.product_seconds(Product("tensorfloat32", 1, 10, 10, 10))
    assert of_target.compute_seconds == pytest.approx(2 * LAUNCH_SECONDS + product + 2000 / 4.15e12)
    assert overlap(*lines, hbm_bytes_per_s=math.inf).compute_seconds == 8.0


def looped(offset: int, stride: int, index: str = "subtract(%last, %k)") -> str:
    config = f'{{"dynamic_slice_config":{{"loop_index":"0","byte_offset":"{offset}","byte_stride":"{stride}"}}}}'
    return f"""{HEAD}
%take (q0: f32[3,250], q1: s32[]) -> f32[1,250] {{
  %q0 = f32[3,250]{{1,0:S(5)}} parameter(0)
  %q1 = s32[] parameter(1)
  %zero = s32[] constant(0)
  ROOT %slice = f32[1,250]{{1,0}} dynamic-slice(%q0, %q1, %zero), dynamic_slice_sizes={{1,250}}, backend_config={config}
}}
%body (s: (s32[], f32[3,250], f32[10,10])) -> (s32[], f32[3,250], f32[10,10]) {{
  %s = (s32[], f32[3,250]{{1,0:S(5)}}, f32[10,10]{{1,0}}) parameter(0)
  %k = s32[] get-tuple-element(%s), index=0
  %stacked = f32[3,250]{{1,0:S(5)}} get-tuple-element(%s), index=1
  %m = f32[10,10]{{1,0}} get-tuple-element(%s), index=2
  %last = s32[] constant(2)
  %index = s32[] {index}
  %a = ((f32[3,250]{{1,0:S(5)}}, s32[]), f32[1,250]{{1,0}}, u32[]) fusion-start(%stacked, %index), kind=kCustom, calls=%take
  %g = f32[10,10]{{1,0}} fusion(%m, %m), kind=kCustom, calls=%gemm
  %a.d = f32[1,250]{{1,0}} fusion-done(%a)
  ROOT %t = (s32[], f32[3,250]{{1,0:S(5)}}, f32[10,10]{{1,0}}) tuple(%k, %stacked, %g)
}}
ENTRY %main (s0: (s32[], f32[3,250], f32[10,10])) -> f32[] {{
  %s0 = (s32[], f32[3,250]{{1,0:S(5)}}, f32[10,10]{{1,0}}) parameter(0)
  %w = (s32[], f32[3,250]{{1,0:S(5)}}, f32[10,10]{{1,0}}) while(%s0), condition=%c, body=%body, \
backend_config={{"known_trip_count":{{"n":"3"}},"dynamic_variables":[{{"tuple_index":"0","init":"0","step":"1"}}]}}
  ROOT %end = f32[] constant(0)
}}
"""


def test_a_slice_of_a_host_buffer_in_a_loop_is_a_copy_per_iteration() -> None:
    overlap = read_overlap(looped(2000, -1000), target("h200"), **{**RATES, "hbm_bytes_per_s": math.inf})
    assert (overlap.back.count, overlap.back.bytes, overlap.out.count) == (3, 3000, 0)
    assert overlap.back.covered == pytest.approx(0.8) and overlap.step_seconds == pytest.approx(30.0)


def test_the_slot_that_is_baked_in_is_compared_with_the_index_asked_for() -> None:
    assert scanned_offload_is_miscompiled(looped(0, 1000))
    assert not scanned_offload_is_miscompiled(looped(2000, -1000))
    assert not scanned_offload_is_miscompiled(looped(0, 1000, "copy(%k)"))
    with pytest.raises(UnsupportedError, match="'index' \\(custom-call\\) of 'body'"):
        scanned_offload_is_miscompiled(looped(0, 1000, "custom-call(%k)"))
