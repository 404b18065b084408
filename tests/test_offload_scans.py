"""Offload in a model of several scans: arrays that all rounds read stay on the device, and all other offloaded bytes are
freed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import remat_jax as rj
from remat_jax import compat
from remat_jax.errors import UnsupportedError
from remat_jax.hardware import target as target_named
from remat_jax.memory.compile.exporting import export_step
from tests.small_models import assert_same, to_host, values

LAYERS, ROWS, LENGTH, WIDTH, WORDS = 8, 16, 512, 256, 40000
CARRIED = LAYERS * ROWS * LENGTH * WIDTH * 4


def attend(weights: Any, x: Any, context: Any, bias: Any) -> Any:
    """A block of plain functions: attention to `context`, and a product."""
    scores = jnp.einsum("btd,bsd->bts", x @ weights["query"], context)
    mixed = jnp.einsum("bts,bsd->btd", jax.nn.softmax(scores + bias), context)
    return x + jnp.tanh(mixed @ weights["out"])


def encode(weights: Any, x: Any) -> Any:
    return x + jnp.tanh(x @ weights["query"]) @ weights["out"]


def encoder_and_decoder(params: Any, tokens: Any, visible: Any) -> Any:
    """Two scans over `jax.checkpoint`; all rounds of the decoder read the encoder's output and one mask."""
    bias = jnp.where(visible, 0.0, -1e9).astype(params["words"].dtype)
    start = params["words"][tokens]
    seen, _ = jax.lax.scan(lambda x, weights: (jax.checkpoint(encode)(weights, x), None), start, params["encoder"])
    last, _ = jax.lax.scan(
        lambda x, weights: (jax.checkpoint(attend)(weights, x, seen, bias), None), jnp.sin(start), params["decoder"]
    )
    return jnp.mean(last**2)


def structs() -> tuple[Any, tuple[Any, ...]]:
    stack = {name: jax.ShapeDtypeStruct((LAYERS, WIDTH, WIDTH), jnp.float32) for name in ("query", "out")}
    words = jax.ShapeDtypeStruct((WORDS, WIDTH), jnp.float32)
    tokens = jax.ShapeDtypeStruct((ROWS, LENGTH), jnp.int32)
    return {"words": words, "encoder": stack, "decoder": stack}, (tokens, jax.ShapeDtypeStruct((ROWS, LENGTH, LENGTH), bool))


def measured(policy: str) -> rj.MemoryReport:
    params, batch = structs()
    loss = rj.replan(encoder_and_decoder, policy)
    return rj.measure(rj.Workload(loss, params, batch, "*", optimizer=optax.adam(1e-3)), "off", "h200")


def test_an_encoder_and_a_decoder_give_back_what_is_on_the_host() -> None:
    full, offload = measured("full"), measured("offload_inputs")
    assert offload.host_bytes == 2 * CARRIED
    assert full.device_bytes - offload.device_bytes >= 0.9 * offload.host_bytes
    assert offload.receipt is not None and offload.overlap is not None
    assert offload.receipt.offered_bytes == offload.receipt.host_bytes == 2 * CARRIED
    assert offload.receipt.returned_bytes == full.device_bytes - offload.device_bytes and full.receipt is None
    assert offload.overlap.out.bytes == offload.overlap.back.bytes == 2 * CARRIED
    # The backward pass of the decoder is the peak: no gradient of the encoder or the table exists yet.
    assert not [buffer for buffer in offload.live if buffer.phase == "backward" and buffer.shape.startswith(f"f32[{WORDS}")]


@jax.checkpoint
def region(w: Any, x: Any, context: Any) -> Any:
    return x @ w + jnp.tanh(x @ w * 2) * context


def hand_on(params: Any, x: Any) -> Any:
    def body(carry: Any, w: Any) -> Any:
        return (region(w, *carry), carry[1]), None

    return jnp.sum(jax.lax.scan(body, (x, jnp.sin(x)), params[0])[0][0])


def scan_in_scan(params: Any, x: Any) -> Any:
    fixed = jnp.cos(x)

    def group(x: Any, weights: Any) -> Any:
        inner = jnp.sin(x)
        return jax.lax.scan(lambda x, w: (region(w, x, inner * fixed), None), x, weights)[0], None

    return jnp.sum(jax.lax.scan(group, x, params)[0])


def unrolled(params: Any, x: Any) -> Any:
    for w in params[0]:
        x = region(w, jnp.cos(x), jnp.sin(x))
    return jnp.sum(x)


@pytest.mark.parametrize(
    ("loss", "sent"),
    [
        (hand_on, 1),  # What the rounds hand on unchanged is kept once: JAX itself makes it a constant of the scan.
        (scan_in_scan, 2),  # What differs in any of the scans is offloaded.
        (unrolled, 4),  # Outside of scans every input is offloaded.
    ],
)
def test_inputs_that_differ_in_a_round_are_offloaded(x64: None, loss: Callable[..., Any], sent: int) -> None:
    x, params = values(2, 3, 5), values(2, 2, 5, 5, seed=1)
    assert to_host(jax.grad(rj.replan(loss, "offload_inputs")), params, x) == [x.shape] * sent


@rj.block
def inner_layer(weights: Any, x: Any) -> Any:
    return x + jnp.tanh(jnp.sin(x @ weights["up"])) @ weights["down"]


@rj.block
def last_layer(weights: Any, x: Any) -> Any:
    return x + jnp.cos(x @ weights["up"]) @ weights["down"]


@rj.block
def period(weights: Any, x: Any) -> Any:
    inner, last = weights
    x, _ = jax.lax.scan(lambda x, layer: (inner_layer(layer, x), None), x, inner)
    return last_layer(last, x)


def periods(weights: Any, x: Any) -> Any:
    return jnp.mean(jax.lax.scan(lambda x, weights: (period(weights, x), None), x, weights)[0] ** 2)


NESTED = {
    "inputs": {inner_layer: "offload_inputs", last_layer: "full"},
    "arrays": {inner_layer: "offload: *:sin#*", last_layer: "full"},
    "by layer": {inner_layer: "6 x offload_inputs"},
    "inside a block": {period: "offload: *:tanh#*"},
}
IN_THE_OUTER_SCAN = {"last": {inner_layer: "full", last_layer: "offload_inputs"}, "period": {period: "offload_inputs"}}


@pytest.mark.versions
@pytest.mark.parametrize("name", [*NESTED, *IN_THE_OUTER_SCAN])
def test_offload_in_a_scan_inside_a_scan_is_refused_except_on_cpus(
    name: str, monkeypatch: pytest.MonkeyPatch, x64: None
) -> None:
    """XLA for GPUs and TPUs ends with an internal error; on a CPU the gradient is that of the plain function."""
    layers = {"up": jnp.ones((2, 3, 8, 16)) / 8, "down": jnp.ones((2, 3, 16, 8)) / 8}
    weights, x = (layers, jax.tree.map(lambda leaf: leaf[:, 0], layers)), jnp.ones((4, 8))
    policies = {**NESTED, **IN_THE_OUTER_SCAN}[name]
    gradient = jax.grad(rj.checkpoint_blocks(periods, policies))
    if name in ("by layer", "inside a block", "period"):
        assert_same(jax.jit(gradient)(weights, x), jax.jit(jax.grad(periods))(weights, x))
    step = rj.Workload(periods, weights, (x,), tuple(policies)).step(policies)
    refused: Any = pytest.raises(UnsupportedError, match=r"(inner_layer|period).*in a scan inside another scan")
    is_refused = name in NESTED
    for target in ("h100", "v5e"):
        with refused if is_refused else contextlib.nullcontext():
            export_step(name, step, target_named(target))
    monkeypatch.setattr(compat, "has_accelerator", lambda: True)
    monkeypatch.setattr(compat, "refuse_miscompiled_offload", lambda: None)
    with refused if is_refused else contextlib.nullcontext():
        jax.eval_shape(jax.grad(rj.checkpoint_blocks(periods, policies)), weights, x)
