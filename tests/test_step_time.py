"""The modelled time of compiled steps, on texts whose answer is known: products, kernels, loops, exchanges."""

from __future__ import annotations

import importlib
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from jax.sharding import PartitionSpec as P

import remat_jax as rj
from remat_jax import compat
from remat_jax.cost.pallas import named_kernels
from remat_jax.errors import ArgumentError, TargetError, UnsupportedError
from remat_jax.hardware import target
from remat_jax.hardware.products import FILL, REUSE, Product, reached_share
from remat_jax.hardware.rates import Links, Rates
from remat_jax.memory.hlo.text import parse
from remat_jax.memory.step_time.collectives import largest_group
from remat_jax.memory.step_time.schedule import step_time
from tests.workloads import mean_square, struct

# A product runs at 1000 operations a second, memory at 100 bytes, a kernel takes 1 second to start.
RATES = Rates({"float32": 1000.0}, 100.0, launch_seconds=0.5, links=Links(100.0, 10.0, 0.25, 1.0))


def module(*lines: str, others: str = "") -> str:
    body = "\n".join(f"  {line}" for line in lines)
    return f"{others}\nENTRY %main (x: f32[10,10]) -> f32[10,10] {{\n  %x = f32[10,10]{{1,0}} parameter(0)\n{body}\n}}\n"


DOT = "%y = f32[10,10]{1,0} dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}"
GATHER = "f32[80,10]{1,0} all-gather(%x), replica_groups=[1,8]<=[8], dimensions={0}"


def test_a_kernel_takes_its_start_and_the_longer_of_operations_and_bytes() -> None:
    timed = step_time(module(DOT, "ROOT %z = f32[10,10]{1,0} negate(%y)"), target("h200"), RATES)
    # The product: 2000 operations, or 1200 bytes; the negation: 800 bytes.
    assert timed.seconds == timed.compute_seconds == (0.5 + 12) + (0.5 + 8)
    fast = step_time(module(DOT, "ROOT %z = f32[10,10]{1,0} negate(%y)"), target("h200"), replace(RATES, hbm_bytes_per_s=1e9))
    assert fast.seconds == pytest.approx(0.5 + 2 + 0.5)


def test_an_update_of_a_stack_that_runs_beside_others_moves_its_slice() -> None:
    """The newest JAX starts the fusion that copies a round's array into a scan's stack as an asynchronous computation."""
    shapes = "f32[4,10,10]{2,1,0}", "f32[1,10,10]{2,1,0}", "s32[]"
    given = [f"%p{index} = {shape} parameter({index})" for index, shape in enumerate(shapes)]
    update = [*given, f"ROOT %u = {shapes[0]} dynamic-update-slice(%p0, %p1, %p2, %p2, %p2)"]
    beside = [*given, f"ROOT %f = {shapes[0]} fusion(%p0, %p1, %p2), kind=kLoop, calls=%update"]
    others = "".join(
        f"%{name} (p0: f32[4,10,10], p1: f32[1,10,10], p2: s32[]) -> f32[4,10,10] {{\n  " + "\n  ".join(lines) + "\n}\n"
        for name, lines in (("update", update), ("beside", beside))
    )
    text = module(
        f"%stack = {shapes[0]} bitcast(%x)",
        f"%slice = {shapes[1]} bitcast(%x)",
        "%i = s32[] constant(0)",
        f"%start = (({', '.join(shapes)}), {shapes[0]}, s32[]) async-start(%stack, %slice, %i), calls=%beside",
        f"ROOT %done = {shapes[0]} async-done(%start)",
        others=others,
    )
    # The slice's 400 bytes and the index are read, the slice is written; the stack of 1600 bytes is not read.
    assert step_time(text, target("h200"), RATES).seconds == pytest.approx(0.5 + (400 + 4 + 400) / 100)


STACK, LAYER = "f32[4,10,10]{2,1,0}", "f32[1,10,10]{2,1,0}"
# Fusions of a stack of four arrays (p0, 1600 bytes) and one array (p1, 400 bytes): lines, bytes read, bytes written.
FUSIONS = {
    "a slice": ([f"ROOT %r = {LAYER} dynamic-slice(%p0, %p2)"], 400, 400),
    # XLA puts a bitcast around the stacks of a scan whose layout differs from that of the layer's array.
    "a slice of a bitcast": ([f"%b = {STACK} bitcast(%p0)", f"ROOT %r = {LAYER} dynamic-slice(%b, %p2)"], 400, 400),
    "a slice of a broadcast": ([f"%b = {STACK} broadcast(%p1)", f"ROOT %r = {LAYER} dynamic-slice(%b, %p2)"], 400, 400),
    "two slices": (
        [f"%a = {LAYER} dynamic-slice(%p0, %p2)", f"%b = {LAYER} slice(%p0)", f"ROOT %r = {LAYER} add(%a, %b)"],
        *(800, 400),
    ),
    "a slice and the whole": (
        [f"%a = {LAYER} dynamic-slice(%p0, %p2)", f"ROOT %r = ({LAYER}, {STACK}) tuple(%a, %p0)"],
        *(1600, 2000),
    ),
    "an update": ([f"ROOT %r = {STACK} dynamic-update-slice(%p0, %p1, %p2)"], 400, 400),
    "an update of a bitcast": (
        [f"%b = {STACK} bitcast(%p0)", f"%n = {LAYER} negate(%p1)", f"ROOT %r = {STACK} dynamic-update-slice(%b, %n, %p2)"],
        *(400, 400),
    ),
    # These are not in place.
    "an update of a negation": (
        [f"%b = {STACK} negate(%p0)", f"ROOT %r = {STACK} dynamic-update-slice(%b, %p1, %p2)"],
        *(2000, 1600),
    ),
    "a negation of an update": (
        [f"%u = {STACK} dynamic-update-slice(%p0, %p1, %p2)", f"ROOT %r = {STACK} negate(%u)"],
        *(2000, 1600),
    ),
    "nothing of an unused stack": ([f"%a = {STACK} negate(%p0)", f"ROOT %r = {LAYER} negate(%p1)"], 400, 400),
}


@pytest.mark.parametrize("what", FUSIONS)
def test_a_fusion_reads_only_the_elements_that_it_needs_and_updates_in_place(what) -> None:
    lines, read, written = FUSIONS[what]
    given = [f"%p0 = {STACK} parameter(0)", f"%p1 = {LAYER} parameter(1)", "%p2 = s32[] parameter(2)"]
    inside = "\n  ".join([*given, *lines])
    result = f"({LAYER}, {STACK})" if "tuple" in lines[-1] else lines[-1].split(" = ")[1].split("}")[0] + "}"
    text = module(
        f"%stack = {STACK} bitcast(%x)",
        f"%layer = {LAYER} bitcast(%x)",
        "%i = s32[] constant(0)",
        f"ROOT %f = {result} fusion(%stack, %layer, %i), kind=kLoop, calls=%fused",
        others=f"%fused (p0: f32[4,10,10], p1: f32[1,10,10], p2: s32[]) -> {result} {{\n  {inside}\n}}\n",
    )
    index = 4 if "%p2" in "".join(lines) else 0
    assert step_time(text, target("h200"), RATES).seconds == pytest.approx(0.5 + (read + index + written) / 100)


PAIR = "%pair = (f32[10,10]{1,0}, (f32[10,10]{1,0}, f32[5,10]{1,0})) fusion(%x), kind=kLoop, calls=%two"
TWO = """%two (p: f32[10,10]) -> (f32[10,10], (f32[10,10], f32[5,10])) {
  %p = f32[10,10]{1,0} parameter(0)
  %n = f32[10,10]{1,0} negate(%p)
  %h = f32[5,10]{1,0} slice(%n), slice={[0:5], [0:10]}
  %inner = (f32[10,10]{1,0}, f32[5,10]{1,0}) tuple(%n, %h)
  ROOT %t = (f32[10,10]{1,0}, (f32[10,10]{1,0}, f32[5,10]{1,0})) tuple(%n, %inner)
}
"""


def test_an_element_of_a_tuple_may_be_written_in_the_operand() -> None:
    """JAX 0.11.2 and later dump `%pair#1#0` for two `get-tuple-element`s."""
    product = "ROOT %y = f32[10,10] dot({}, {}), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}"
    lines = (
        "%a = f32[10,10]{1,0} get-tuple-element(%pair), index=0",
        "%b = (f32[10,10]{1,0}, f32[5,10]{1,0}) get-tuple-element(%pair), index=1",
        "%c = f32[10,10]{1,0} get-tuple-element(%b), index=0",
    )
    old = step_time(module(PAIR, *lines, product.format("%a", "%c"), others=TWO), target("h200"), RATES)
    new = step_time(module(PAIR, product.format("%pair#0", "%pair#1#0"), others=TWO), target("h200"), RATES)
    # The fusion reads 400 bytes and writes 1000. The matmul: 2000 operations, or 1200 bytes.
    assert new == old and new.seconds == (0.5 + 14) + (0.5 + 12)


@pytest.mark.parametrize("operand", ["%pair#2", "%pair#a", "%pair#0#0", "%x#0"])
def test_an_element_that_a_tuple_does_not_have_is_refused(operand: str) -> None:
    with pytest.raises(UnsupportedError, match="has no such element"):
        parse(module(PAIR, f"ROOT %y = f32[10,10]{{1,0}} negate({operand})", others=TWO))


def test_a_product_reaches_the_rate_of_its_tiles_and_rounds() -> None:
    # On one core tiles of 256 × 128 are the best: only the filling of their pipelines slows a short sum.
    assert reached_share(1, 256, 128, 1024, 1) == pytest.approx(1024 / (1024 + FILL) * (8192 + FILL) / 8192)
    # 64 × 64 numbers fill one tile of that size, whose rate is lower: it computes less per loaded number.
    small, large = (reuse / (reuse + REUSE) for reuse in (64 * 64 / 128, 256 * 128 / 384))
    assert reached_share(1, 64, 64, 8192, 1) == pytest.approx(small / large)
    # One tile more than there are cores takes another round of all cores, unless smaller tiles are faster.
    assert reached_share(133, 256, 128, 128, 132) < 0.75 * reached_share(132, 256, 128, 128, 132)
    # A single row still computes whole tiles; a long sum of few results is split among cores.
    assert reached_share(1, 1, 4096, 4096, 132) < 0.03
    assert reached_share(1, 64, 64, 8192, 132) > 6 * reached_share(1, 64, 64, 8192, 1) / 132
    assert (
        Rates({"bfloat16": 1e12}, 1.0, cores=132).product_seconds(Product("bfloat16", 1, 8192, 8192, 8192))
        == 2 * 8192**3 / 1e12
    )


def test_measured_products_count_instead_of_tiles() -> None:
    rates = Rates({"float32": 16.0}, 1.0, cores=4, products={"float32": {8: 16.0, 2: 4.0}})
    assert rates.product_seconds(Product("float32", 1, 2, 2, 2)) == 16 / 4
    assert rates.product_seconds(Product("bfloat16", 1, 64, 64, 64)) == 2 * 64**3 / 16, "beyond the curve its last rate"


def test_an_exchange_takes_its_links() -> None:
    links = RATES.links
    assert links is not None
    assert links.seconds("all-gather", 800.0, 8) == 3 * 0.25 + 7.0
    assert links.seconds("all-reduce", 800.0, 8) == 2 * (3 * 0.25 + 7.0)
    assert links.seconds("collective-permute", 800.0, 2, hosts=2) == 1.0 + 80.0
    assert links.seconds("reduce-scatter", 800.0, 8, hosts=2) == 2 * 0.25 + 1.0 + 700 / 40
    assert Links(100.0).seconds("all-gather", 800.0, 8, hosts=2) is None


def test_an_exchange_is_waited_for_or_runs_beside_compute() -> None:
    alone = step_time(module(f"ROOT %g = {GATHER}"), target("8xh200"), RATES)
    assert (alone.exchanges.count, alone.exchanges.bytes) == (1, 3200)
    assert alone.seconds == 3 * 0.25 + 3200 * 7 / 8 / 100 and alone.compute_seconds == 0
    start = "%s = (f32[10,10]{1,0}, f32[80,10]{1,0}) all-gather-start(%x), replica_groups=[1,8]<=[8], dimensions={0}"
    beside = step_time(module(start, DOT, "ROOT %g = f32[80,10]{1,0} all-gather-done(%s)"), target("8xh200"), RATES)
    assert beside.seconds == alone.seconds and beside.compute_seconds == 12.5
    assert beside.exchanges.covered_seconds == 12.5
    # Over two hosts, groups of four stay inside a host; one group of eight does not.
    inside = GATHER.replace("[1,8]<=[8]", "[2,4]<=[8]")
    assert step_time(module(f"ROOT %g = {inside}"), target("2x4xh200"), RATES).seconds == 2 * 0.25 + 3200 * 3 / 4 / 100
    across = step_time(module(f"ROOT %g = {GATHER}"), target("2x4xh200"), RATES)
    assert across.seconds == 2 * 0.25 + 1.0 + 3200 * 7 / 8 / 40


def test_every_round_of_a_loop_exchanges() -> None:
    body = f"""%body (s: (s32[], f32[10,10])) -> (s32[], f32[10,10]) {{
  %s = (s32[], f32[10,10]{{1,0}}) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %x = f32[10,10]{{1,0}} get-tuple-element(%s), index=1
  %g = {GATHER}
  ROOT %t = (s32[], f32[10,10]{{1,0}}) tuple(%i, %x)
}}
"""
    loop = (
        "%z = s32[] constant(0)",
        "%init = (s32[], f32[10,10]{1,0}) tuple(%z, %x)",
        "ROOT %w = (s32[], f32[10,10]{1,0}) while(%init), condition=%c, body=%body, "
        'backend_config={"known_trip_count":{"n":"3"}}',
    )
    timed = step_time(module(*loop, others=body), target("8xh200"), RATES)
    assert timed.exchanges.count == 3 and timed.seconds == 3 * (3 * 0.25 + 28.0)


def test_a_loop_inside_a_loop_runs_as_often_as_both_say() -> None:
    def loop(body: str, trips: int) -> str:
        given = f'body=%{body}, backend_config={{"known_trip_count":{{"n":"{trips}"}}}}'
        return f"ROOT %w = f32[10,10]{{1,0}} while(%x), condition=%c, {given}"

    bodies = {"inner": "ROOT %n = f32[10,10]{1,0} negate(%x)", "outer": loop("inner", 3)}
    others = "".join(
        f"%{name} (x: f32[10,10]) -> f32[10,10] {{\n  %x = f32[10,10]{{1,0}} parameter(0)\n  {root}\n}}\n"
        for name, root in bodies.items()
    )
    assert step_time(module(loop("outer", 2), others=others), target("h200"), RATES).seconds == 2 * 3 * (0.5 + 8)


def test_a_network_without_a_rate_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"all-gather.*network_bytes_per_s for several hosts"):
        step_time(module(f"ROOT %g = {GATHER}"), target("2x4xl4"))
    with pytest.raises(TargetError, match="has no hbm_bytes_per_s"):
        step_time(module(DOT), replace(target("h200"), hbm_bytes_per_s=None, reached={}))
    with pytest.raises(TargetError, match="device_bytes_per_s=0"):
        Links(0.0)


def test_what_nobody_knows_counts_its_bytes_and_is_told() -> None:
    call = 'ROOT %y = f32[10,10]{1,0} custom-call(%x), custom_call_target="mine"'
    timed = step_time(module(call), target("h200"), RATES)
    assert (timed.seconds, timed.untimed) == (0.5 + 8, ("mine",))
    assert step_time(module("ROOT %y = f32[10,10]{1,0} frobnicate(%x)"), target("h200"), RATES).untimed == ("frobnicate",)
    assert step_time(module(DOT), target("h200"), RATES).untimed == ()


def test_the_devices_of_a_group() -> None:
    assert largest_group("replica_groups={{0,4},{1,5}}", 8) == [0, 4]
    assert largest_group("replica_groups=[4,2]<=[2,4]T(1,0)", 8) == [0, 4]
    assert largest_group("source_target_pairs={{0,1},{3,4}}", 8) == [0, 1]


def test_a_pallas_kernel_says_its_operations_by_its_name() -> None:
    batch, length, heads, width = 1, 512, 2, 64
    x = struct(batch, length, heads, width, dtype=jnp.bfloat16)

    def kernels(causal: bool) -> dict[str, float]:
        def loss(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            return compat.attention_kernel()(q, k, v, segment_ids=None, causal=causal).astype(jnp.float32).sum()

        return named_kernels(jax.make_jaxpr(jax.grad(loss, argnums=(0, 1, 2)))(x, x, x))

    product = 2 * batch * heads * length * length * width
    full, causal = kernels(False), kernels(True)
    # This kernel computes the scores and their gradient twice in its backward pass: seven products where five suffice.
    assert (full["mha_forward"], full["mha_backward"]) == (2 * product, 7 * product)
    assert (causal["mha_forward"], causal["mha_backward"]) == (product, 3.5 * product)


def test_splash_attention_counts_the_blocks_that_its_mask_needs() -> None:
    kernel = importlib.import_module("jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_kernel")
    masks = importlib.import_module("jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_mask")
    batch, heads, length, width, block = 3, 2, 512, 128, 128
    names = ("block_q", "block_kv", "block_q_dkv", "block_kv_dkv", "block_kv_dkv_compute")
    sizes = kernel.BlockSizes(**dict.fromkeys(names, block), use_fused_bwd_kernel=True)
    x = jax.ShapeDtypeStruct((batch, heads, length, width), jnp.bfloat16)

    def kernels(mask: type, key_heads: int = heads) -> list[float]:
        of_heads = masks.MultiHeadMask([mask((length, length))] * heads)
        run = jax.vmap(kernel.make_splash_mha(mask=of_heads, head_shards=1, q_seq_shards=1, block_sizes=sizes))
        layer = jax.checkpoint(lambda q, k: run(q, k, k))
        loss = lambda q, k: jax.lax.scan(lambda q, _: (layer(q, k), None), q, length=2)[0].astype(jnp.float32).sum()  # noqa: E731
        key = jax.ShapeDtypeStruct((batch, key_heads, length, width), jnp.bfloat16)
        return sorted(named_kernels(jax.make_jaxpr(jax.grad(loss, argnums=(0, 1)))(x, key)).values())

    product = 2 * batch * heads * length * length * width
    assert kernels(masks.FullMask) == [2 * product, 5 * product]
    causal = [2 * product * 10 / 16, 5 * product * 10 / 16]  # 10 of 4 x 4 blocks
    assert kernels(masks.CausalMask) == kernels(masks.CausalMask, key_heads=1) == causal


def test_a_report_has_the_time_of_its_step() -> None:
    gpu = "l40s"
    report = rj.measure(mean_square(nn.Dense(1024), struct(2048, 1024, dtype=jnp.bfloat16), nn.Dense), "full", gpu)
    assert report.seconds is not None and report.seconds == report.compute_seconds and report.exchanges is None
    # At least the two products at the rate of a large product.
    assert report.seconds > 2 * 2 * 2048 * 1024 * 1024 / Rates.of(gpu).flops_per_s("tensorfloat32")
    assert report.to_dict()["seconds"] == report.seconds
    assumed = "flops" in report.assumed_rates
    assert assumed and (" to " in str(report)) and "assumed: flops" in str(report)


def test_a_step_without_a_time_says_why() -> None:
    """Two hosts of a GPU whose network has no rate: the sizes hold, and every report says what is missing."""
    job = mean_square(nn.Dense(64), struct(64, 64), nn.Dense, mesh={"data": 8}, shardings=(None, P("data")))
    message = "no step time: target='2x4xl4': .* the rate of the links between the devices is unknown"
    with pytest.warns(rj.RematWarning, match=message):
        report = rj.measure(job, "full", "2x4xl4")
    assert report.seconds is None and report.device_bytes > 0
    assert any("network_bytes_per_s" in warning for warning in report.warnings)
    assert "estimated step" in str(report) and "not known: target='2x4xl4'" in str(report)
    alone = mean_square(nn.Dense(64), struct(64, 64), nn.Dense)
    bare = replace(target("h200"), hbm_bytes_per_s=None, reached={})
    with pytest.warns(rj.RematWarning, match="no step time: target='h200' has no hbm_bytes_per_s"):
        assert rj.measure(alone, "full", bare).seconds is None
    on_cpu = rj.measure(alone, "full", "cpu")
    assert on_cpu.warnings == () and "not known: not modelled for a CPU" in str(on_cpu)


def test_an_assumed_latency_makes_a_range_only_where_it_matters() -> None:
    rates = replace(RATES, source={"launch_seconds": "assumed"})
    assert step_time(module(DOT), target("h200"), rates).assumed == (), "half a second of 12.5"
    assert step_time(module(DOT), target("h200"), replace(rates, launch_seconds=0.9)).assumed == ("launch_seconds",)
