"""Linked blocks: a block's copies run while the next block computes, and nothing else changes."""

from __future__ import annotations

import contextlib
import functools
import gc
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import remat_jax as rj
from remat_jax.core import tied_chain as overlap
from remat_jax.cost.count import matmuls
from remat_jax.hardware import target
from remat_jax.memory.hlo.copies import Overlap
from tests.gpu_text import Compiled, compile_for_h200
from tests.overlap_at_rates import read_overlap
from tests.small_models import Attention, Mlp, assert_same, equations, make_loss, to_host

OFFLOADS = ("offload_inputs", "offload: *tanh*; save: @dots")


def plain(w: Any, x: Any) -> Any:
    return x + jnp.tanh(jnp.tanh(x @ w) @ w)


def links(fn: Any, *args: Any) -> list[int]:
    """For each differentiated tied block, the number of arrays that it takes from the block before."""
    # A new function each time, because JAX caches traces.
    traced_equations = equations(lambda *args: jax.jvp(fn, args, args), *args)
    return [len(eqn.params["before"]) for eqn, _ in traced_equations if eqn.primitive.name == "tied_linear"]


def stack(block: Any, between: Any = lambda x: x, layers: int = 3) -> Any:
    def loss(w: Any, x: Any) -> Any:
        for index in range(layers):
            x = between(block(w * (1 + index), x))
        return jnp.sum(jnp.sin(x))

    return loss


def arrays() -> tuple[Any, Any]:
    random = np.random.default_rng(0)
    dtype = jnp.float64 if jax.config.jax_enable_x64 else jnp.float32
    return jnp.asarray(random.normal(size=(4, 4)) / 2, dtype), jnp.asarray(random.normal(size=(3, 4)), dtype)


@pytest.mark.parametrize("policy", OFFLOADS)
def test_consecutive_blocks_of_a_model_are_linked(policy: str) -> None:
    loss, params, x = make_loss(layers=4)
    fn = rj.checkpoint_blocks(loss, {Mlp: policy})
    assert links(fn, params, x) == [0, 1, 1, 1]
    with overlap.unlinked():
        assert links(fn, params, x) == [0, 0, 0, 0]
    # While a `jit` is traced, it is unknown whether it will be differentiated.
    assert links(jax.jit(fn), params, x) == [0, 0, 0, 0]


def test_blocks_that_do_not_follow_each_other_are_tied_to_their_own_place() -> None:
    w, x = arrays()
    block = rj.remat(plain, "offload_inputs")
    assert links(stack(block), w, x) == [0, 2, 2]
    assert links(stack(block, between=lambda x: x * 2), w, x) == [0, 0, 0]
    assert links(stack(jax.jit(block)), w, x) == [0, 0, 0]
    assert links(stack(lambda w, x: jax.lax.cond(x[0, 0] > 0, lambda: block(w, x), lambda: x)), w, x) == [0, 0, 0]
    assert links(stack(lambda w, x: jax.lax.scan(lambda x, _: (block(w, x), None), x, None, length=2)[0]), w, x) == []
    assert links(stack(rj.remat(plain, "full")), w, x) == []


def test_a_block_of_long_ago_is_left_alone() -> None:
    w, x = arrays()
    block = rj.remat(plain, "offload_inputs")
    joined = rj.remat(lambda w, x, skip: plain(w, x) + skip, "offload_inputs")

    def u_net(w: Any, x: Any) -> Any:
        skips = []
        for _ in range(3):
            skips.append(x := block(w, x))
            x = x * 1.1
        for _ in range(3):
            x = joined(w, x * 1.1, skips.pop())
        return jnp.sum(x)

    # Linked to the third block, the fourth would fetch it at once; the fifth and sixth would fetch arrays that are needed much
    # later. All six read the weights, which stay on the device.
    assert links(u_net, w, x) == [0, 0, 0, 1, 0, 0]
    assert_same(jax.jit(jax.grad(u_net))(w, x), jax.grad(u_net)(w, x), 1e-5)

    def two_streams(w: Any, x: Any) -> Any:
        left, right = x, 2 * x
        for _ in range(3):
            left, right = block(w, left), block(w, right)
        return jnp.sum(left * right)

    assert links(two_streams, w, x) == [0, 0, 2, 1, 1, 1]

    def two_heads(w: Any, x: Any) -> Any:
        x = block(w, x)
        return jnp.sum(block(w, x) * block(2 * w, x) + x)

    assert links(two_heads, w, x) == [0, 2, 0], "what is on the host has one taker"


def test_blocks_that_look_alike_from_outside_are_told_apart() -> None:
    w, x = arrays()
    once = rj.remat(lambda w, x: x + jax.jit(lambda w, x: jnp.tanh(x @ w))(w, x), "offload: *tanh*")
    twice = rj.remat(lambda w, x: x + jax.jit(lambda w, x: jnp.tanh(jnp.tanh(x @ w) @ w))(w, x), "offload: *tanh*")
    assert links(lambda w, x: jnp.sum(twice(w, twice(w, once(w, once(w, x))))), w, x) == [0, 1, 1, 2]


def test_a_block_without_a_derivative_along_every_input_is_linked_along_the_others(x64: None) -> None:
    w, x = arrays()

    def scaled(w: Any, x: Any, s: Any) -> Any:
        twice = jax.pure_callback(lambda s: np.asarray(s) * 2, jax.ShapeDtypeStruct(s.shape, s.dtype), s)
        return x + jnp.tanh(x @ w) * twice

    def loss(block: Any) -> Any:
        return lambda w, x: jnp.sum(block(w, block(w, x, jnp.ones(4)), jnp.ones(4)) ** 2)

    linked = loss(rj.remat(scaled, "offload_inputs"))
    assert_same(jax.jit(jax.grad(linked))(w, x), jax.grad(loss(scaled))(w, x))
    assert links(linked, w, x) == [0, 3]
    with pytest.raises(ValueError, match="Pure callbacks do not support JVP"):
        jax.jit(jax.grad(lambda s: loss(lambda w, x, _: rj.remat(scaled, "offload_inputs")(w, x, s))(w, x)))(jnp.ones(4))


def test_where_ops_run_one_by_one_nothing_is_linked(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("linked")

    monkeypatch.setattr(overlap, "_run_linked", refuse)
    w, x = arrays()
    linked = stack(rj.remat(plain, "offload_inputs"))
    jax.grad(linked)(w, x)
    with pytest.raises(AssertionError, match="linked"):
        jax.jit(jax.grad(linked))(w, x)


def test_a_number_that_is_put_on_the_device_is_no_array_of_the_block(x64: None) -> None:
    w, x = arrays()
    body = lambda w, x: x + jnp.tanh(x @ w) * jax.device_put(2.0)  # noqa: E731
    linked = stack(rj.remat(body, "offload_inputs"))
    assert_same(jax.jit(jax.grad(linked))(w, x), jax.grad(stack(body))(w, x))


def as_root(fn: Any, x: Any) -> Any:
    solve = lambda fn, v: v - fn(v)  # noqa: E731
    return jax.lax.custom_root(lambda v: v + fn(v) - x, x, solve, lambda linear, v: v / linear(jnp.ones_like(v)))


@pytest.mark.parametrize(
    ("inside", "policy"),
    [("vmap", "offload_inputs"), ("root", "save: @dots; offload: *"), ("a call that fails", "offload_inputs")],
)
def test_no_trace_is_kept_alive_by_an_integer_output(inside: str, policy: str) -> None:
    block, (w, x) = rj.remat(lambda w, x, i: (plain(w, x), i + 1), policy), arrays()
    way = {"vmap": lambda fn, x: jax.vmap(fn)(jnp.stack([x, x])), "root": as_root}.get(inside)

    def loss(w: Any, x: Any) -> Any:
        def layers(x: Any) -> Any:
            x, i = block(w, *block(w, x, jnp.arange(3)))
            jax.debug.print("{}", i)
            if way is None:
                raise FileNotFoundError
            return x + i[0]

        return jnp.sum(way(layers, x) if way else layers(x))

    with jax.checking_leaks(), contextlib.nullcontext() if way else pytest.raises(FileNotFoundError):
        jax.jit(jax.grad(loss, (0, 1))).lower(w, x)
    gc.collect()
    assert not any(link.outputs or link.values for link in overlap._links.get())


def with_masks(w: Any, x: Any) -> Any:
    return x + jnp.where(x @ w > 0, jnp.tanh(x @ w), 0) @ w


SHAPES = {
    "skipped over": lambda block: (
        lambda w, x: jnp.sum(functools.reduce(lambda x, _: x + block(w, block(w, x)), range(2), x) ** 2)
    ),
    "used twice": lambda block: lambda w, x: jnp.sum(block(w, (y := block(w, x))) * y + block(2 * w, y)),
    "two streams": lambda block: lambda w, x: jnp.sum(block(w, block(w, x)) * block(2 * w, block(3 * w, x))),
    "not differentiated first": lambda block: (
        lambda w, x: jnp.sum(block(w, block(jax.lax.stop_gradient(w), x.astype(int) + 0.0)))
    ),
    "stopped between": lambda block: lambda w, x: jnp.sum(block(w, jax.lax.stop_gradient(block(w, x))) ** 2),
    "jitted block": lambda block: stack(jax.jit(block)),
    "in a branch": lambda block: (
        lambda w, x: jnp.sum(
            (lambda y: jax.lax.cond(y[0, 0] > 0, lambda: block(w, block(w, y)), lambda: y * 2))(block(w, x)) ** 2
        )
    ),
    "loop behind": lambda block: (
        lambda w, x: jnp.sum(jax.lax.scan(lambda c, _: (block(w, c), None), block(w, block(w, x)), None, length=2)[0] ** 2)
    ),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_any_way_of_putting_blocks_together(shape: str, x64: None) -> None:
    w, x = arrays()
    ours, theirs = (SHAPES[shape](block) for block in (rj.remat(with_masks, "offload_inputs"), with_masks))
    for way in (lambda f: jax.grad(f, (0, 1)), lambda f: lambda w, x: jax.jvp(lambda w: jax.grad(f, (0, 1))(w, x), (w,), (w,))):
        assert_same(jax.jit(way(ours))(w, x), way(theirs)(w, x))


def test_links_cost_no_matmul_and_move_nothing_more() -> None:
    loss, params, x = make_loss(Attention, layers=3)
    gradient = jax.jit(jax.grad(rj.checkpoint_blocks(loss, {Attention: "offload_inputs"}), (0, 1)))
    with overlap.unlinked():
        alone = matmuls(gradient, params, x), to_host(gradient, params, x)
    gradient.clear_cache()
    assert (matmuls(gradient, params, x), to_host(gradient, params, x)) == alone


SCRIPT = """
import remat_jax as rj
from remat_jax.core import tied_chain as overlap

def plain(x, w):
    return x + jax.nn.gelu(x @ w[0].astype(jnp.bfloat16)) @ w[1].astype(jnp.bfloat16)

block = rj.remat(plain, "offload_dot_with_no_batch_dims")

def loss(ws, x):
    for w in ws:
        x = block(x, w)
    return (x.astype(jnp.float32) ** 2).mean()

LAYERS = 3
arguments = [(struct((1024, 4096)), struct((4096, 1024)))] * LAYERS, struct((16384, 1024), jnp.bfloat16)
keep("linked", jax.grad(loss), *arguments)
with overlap.unlinked():
    keep("alone", lambda *args: jax.grad(loss)(*args), *arguments)
"""

DECODER = """
from examples.models.linen import ByteDecoder, DecoderLayer

model = ByteDecoder(d_model=512, nhead=8, num_layers=3, max_len=512)
tokens = struct((16, 512), jnp.int32)
params = jax.tree.map(lambda leaf: struct(leaf.shape, leaf.dtype), jax.eval_shape(model.init, jax.random.key(0), tokens))
for name, policies in {
    "dots": {DecoderLayer: "offload_dot_with_no_batch_dims"},
    "last kept": {"*layers_2": "full", DecoderLayer: "offload_inputs"},
}.items():
    loss = rj.checkpoint_blocks(lambda p, x, y: model.apply(p, x, y, method="loss"), policies)
    keep(name, jax.grad(loss), params, tokens, tokens)
"""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Compiled]:
    """The modules of both scripts, which share the imports and the kernels of one process."""
    return compile_for_h200(tmp_path_factory.mktemp("compiled"), SCRIPT + DECODER)


def read(compiled: Compiled, hbm_bytes_per_s: float = math.inf, host_link_bytes_per_s: float = 50e9) -> Overlap:
    rates = {"flops_per_s": 790e12, "hbm_bytes_per_s": hbm_bytes_per_s, "host_link_bytes_per_s": host_link_bytes_per_s}
    return read_overlap(compiled.text, target("h200"), **rates)


def test_compute_covers_all_of_the_copies_that_it_can(compiled: dict[str, Compiled]) -> None:
    overlaps = {name: read(compiled[name]) for name in ("linked", "alone")}
    copy, layers = 2 * 16384 * 4096, 3
    assert {name: compiled[name].host_temp for name in overlaps} == dict.fromkeys(overlaps, layers * copy)
    # One more copy is in flight.
    assert compiled["linked"].temp <= compiled["alone"].temp + copy + 2**16
    matmul = 2 * 16384 * 1024 * 4096 / 790e12
    seconds = layers * copy / 50e9
    # Forward, all but the first matmul; backward, the four of each block except the first.
    assert overlaps["linked"].out.covered == pytest.approx((2 * layers - 1) * matmul / seconds, rel=1e-6)
    assert overlaps["linked"].back.covered == pytest.approx(4 * (layers - 1) * matmul / seconds, rel=1e-6)
    assert overlaps["linked"].out.covered == pytest.approx(overlaps["linked"].out.coverable)
    assert overlaps["linked"].back.covered == pytest.approx(overlaps["linked"].back.coverable)
    # Without links, one matmul of each block.
    assert overlaps["alone"].out.covered == pytest.approx(layers * matmul / seconds, rel=1e-6)
    assert overlaps["alone"].back.covered == pytest.approx(layers * matmul / seconds, rel=1e-6)


def test_a_decoders_copies_are_spread_over_its_compute(compiled: dict[str, Compiled]) -> None:
    overlaps = {name: read(compiled[name], 4.8e12) for name in ("dots", "last kept")}
    x = 4 * 16 * 512 * 512
    assert {name: compiled[name].host_temp for name in overlaps} == {"dots": 3 * 9 * x, "last kept": 2 * x}
    # Four copies per block, which take longer than its compute: some copy always runs.
    assert overlaps["dots"].back.count == 12
    assert overlaps["dots"].back.covered >= 0.99 * overlaps["dots"].back.coverable
    assert overlaps["dots"].out.covered >= 0.99 * overlaps["dots"].out.coverable
    # With a faster link compute covers each copy, except those of the last block.
    assert read(compiled["dots"], 4.8e12, 400e9).back.covered == pytest.approx(2 / 3, rel=0.02)
    # If the last block keeps its residuals, its backward pass covers the first copy.
    assert overlaps["last kept"].back.covered == pytest.approx(1)
    # Its kept arrays and two copies in flight, and one block's working set: three attention matrices (not four), twice the
    # inside of the feed-forward, and four arrays of the width.
    working_set = 3 * 8 * x + 2 * 4 * x + 4 * x
    assert compiled["last kept"].temp <= working_set + 4 * x
