"""Inputs that several blocks read stay on the device: bytes in closed form, gradients bit for bit, one copy in the compiled
step.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

import remat_jax as rj
from remat_jax import compat
from remat_jax.core import shared
from remat_jax.planning.problem import describe, kept_bytes
from tests.small_models import Linear, assert_bit_equal, assert_same, from_host, to_host, values

BATCH, TOKENS, WIDTH, LAYERS = 2, 5, 4, 3
X = 4 * BATCH * TOKENS * WIDTH
"""Bytes of a layer's input, of a mask, and of an encoder's output."""
MASK = 4 * BATCH * TOKENS * TOKENS
STATES = X


class Layer(nn.Module):
    """Attention with an additive mask; all arguments are inputs."""

    @nn.compact
    def __call__(self, x: Any, mask: Any, states: Any = None) -> Any:
        q, k, v = (Linear(WIDTH, name=name)(x if name == "q" or states is None else states) for name in "qkv")
        return x + jax.nn.softmax(q @ jnp.swapaxes(k, -1, -2) + mask) @ v


class Encoder(nn.Module):
    """Layers that read one mask, computed from the input; the last layers add the input to their output."""

    scanned: bool = False

    @nn.compact
    def __call__(self, x: Any) -> Any:
        mask = jnp.where(x @ jnp.swapaxes(x, -1, -2) > 0, 0.0, -1.0).astype(x.dtype)
        if not self.scanned:
            for index in range(LAYERS):
                x = x + Layer(name=f"layers_{index}")(x, mask)
            return x
        scan = nn.scan(
            lambda layer, x, mask: (x + layer(x, mask), None),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            in_axes=nn.broadcast,
            length=LAYERS,
        )
        return scan(Layer(name="layers"), x, mask)[0]


class Translator(nn.Module):
    """A decoder whose layers all read the encoder's output, which is differentiated."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        states, mask = Encoder(name="encoder")(jnp.cos(x)), jnp.tril(jnp.ones((BATCH, TOKENS, TOKENS), x.dtype) * x[:, :, :1])
        for index in range(LAYERS):
            x = Layer(name=f"decoder_{index}")(x, mask, states)
        return x


def workload(model: nn.Module, **options: Any) -> rj.Workload:
    x = jax.ShapeDtypeStruct((BATCH, TOKENS, WIDTH), jnp.float32)
    params = jax.eval_shape(model.init, jax.random.key(0), x)
    return rj.Workload(lambda p, x: jnp.sum(jnp.sin(model.apply(p, x))), params, (x,), Layer, **options)


@pytest.fixture
def scans_offload(monkeypatch: pytest.MonkeyPatch) -> None:
    # Some JAX versions refuse it for GPUs; nothing is compiled for a GPU here.
    monkeypatch.setattr(compat, "refuse_miscompiled_offload", lambda: None)


def totals(job: rj.Workload, policy: Any) -> tuple[int, list[tuple[int, int | None]]]:
    table = rj.residuals(job, policy)
    return table.host_bytes, [(array.bytes, array.blocks) for array in table.shared]


@pytest.mark.parametrize("policy", ["offload_inputs", "offload: *:input#*", "1 × full | 2 × offload_inputs"])
def test_a_mask_that_all_layers_read_is_kept_once_and_their_own_inputs_leave(policy: str) -> None:
    job = workload(Encoder())
    table = rj.residuals(job, policy)
    # A `jit` inside decides before it is differentiated.
    inner = rj.Workload(jax.jit(job.loss), job.params, job.batch, Layer)
    assert table.host_bytes == rj.residuals(inner, policy).host_bytes == (2 if "full" in policy else 3) * X
    assert [(array.bytes, array.blocks) for array in table.shared] == [(MASK, LAYERS)]
    masks = [row for row in table if row.shape == (BATCH, TOKENS, TOKENS) and row.dtype == "float32"]
    assert [(row.bytes, row.count, row.action) for row in masks if row.action != "recompute"] == [(MASK, 1, "save")]


def test_a_decoder_that_reads_an_encoders_output() -> None:
    table = rj.residuals(workload(Translator()), "offload_inputs")
    # The encoder's own inputs, and the decoder's; the encoder's output and both masks stay.
    assert table.host_bytes == 2 * LAYERS * X
    assert [(array.bytes, array.blocks) for array in table.shared] == [(MASK, 3), (MASK, 3), (STATES, 3)]
    assert "decoder_0:input#2, 160 B read by 3 blocks, stays on the device" in str(table)


@pytest.mark.parametrize("policy", ["offload_inputs", "3 × offload_inputs"])
def test_a_mask_that_a_scan_broadcasts(policy: str, scans_offload: None) -> None:
    host, kept = totals(workload(Encoder(scanned=True)), policy)
    assert (host, kept) == (LAYERS * X, [(MASK, None)])


WEIGHTS, ROWS = values(LAYERS, WIDTH, WIDTH), values(TOKENS, WIDTH)


def fetched(gradient: Callable[..., Any], *args: Any) -> int:
    """The number of arrays like `ROWS` that a gradient fetches from the host."""
    return from_host(gradient, *args).count(ROWS.shape)


def test_one_block_that_is_given_an_array_three_times_fetches_it_once() -> None:
    block = rj.remat(lambda q, k, v, w: jnp.tanh(q @ w) * k + v, "offload_inputs")

    def loss(w: Any, x: Any) -> Any:
        for index in range(LAYERS):
            x = block(x, x, x, w[index])
        return jnp.sum(x)

    assert fetched(jax.grad(loss), WEIGHTS, ROWS) == LAYERS <= len(to_host(jax.grad(loss), WEIGHTS, ROWS))


def test_two_gradients_of_one_function_each_decide_for_themselves() -> None:
    block = rj.remat(lambda x, w: jnp.tanh(jnp.tanh(x @ w) @ w), "offload_inputs")

    def both(w: Any, x: Any) -> Any:
        first = jax.grad(lambda w: jnp.sum(block(x, w * 1)))(w)
        return jax.grad(lambda w: jnp.sum(block(x, w * 2)))(w + first)

    # The first gradient ends before the second reads the input.
    assert fetched(both, WEIGHTS[0], ROWS) == 2


def test_where_all_that_a_policy_offloads_is_shared_the_receipt_says_so() -> None:
    receipt = rj.measure(workload(Encoder()), "offload: *:input#1").receipt
    assert receipt is not None and receipt.offered_bytes == 0
    assert receipt.warnings[0].startswith("the policy offloads nothing that the backward pass reads; inputs that several")
    assert [(array.bytes, array.blocks) for array in receipt.shared] == [(MASK, LAYERS)]
    printed = str(rj.measure(workload(Encoder()), "offload_inputs"))
    assert "stays on the device" in printed and "200 B read by 3 blocks" in printed


def test_the_compiled_step_copies_no_mask() -> None:
    report = rj.measure(workload(Encoder()), "offload_inputs", target="h200")
    assert report.receipt is not None and report.overlap is not None
    assert report.overlap.out.bytes == report.overlap.back.bytes == report.receipt.offered_bytes == LAYERS * X


@pytest.mark.parametrize("scanned", [False, True])
def test_the_planner_counts_what_the_table_counts(scanned: bool, scans_offload: None) -> None:
    job = workload(Encoder(scanned))
    described = describe(job, "h200")
    for policy in ("offload_inputs", "offload: *:input#1, *:input#0"):
        assert kept_bytes(described, policy) == (0, rj.residuals(job, policy).host_bytes) == (0, LAYERS * X)
    assert all("input#1" not in name for kind in described.kinds for name in kind.residuals)


def test_gradients_are_those_under_full(x64: None) -> None:
    x = values(BATCH, TOKENS, WIDTH)

    def gradient(model: nn.Module, policy: str) -> Callable[..., Any]:
        loss = rj.checkpoint_blocks(lambda params, x: jnp.sum(jnp.sin(model.apply(params, x))), {Layer: policy})
        return jax.grad(jax.jit(loss), argnums=(0, 1))

    def ways(gradient: Any, params: Any, x: Any) -> Any:
        batched = jax.vmap(gradient, (None, 0))(params, jnp.stack([x, 2 * x]))
        return batched, jax.jvp(gradient, (params, x), (params, x))

    params = jax.jit(Translator().init)(jax.random.key(0), x)
    gradients = [gradient(Translator(), policy) for policy in ("offload_inputs", "full")]
    assert_same(*(jax.jit(ways, static_argnums=0)(function, params, x) for function in gradients))
    # Compiled, XLA fuses the two programs differently; run one by one, their operations have the same bits.
    params = jax.jit(Encoder().init)(jax.random.key(0), x)
    with jax.disable_jit():
        assert_bit_equal(*(gradient(Encoder(), policy)(params, x) for policy in ("offload_inputs", "full")))


def test_no_trace_is_kept_alive() -> None:
    job = workload(Encoder())
    fn = rj.checkpoint_blocks(job.loss, {Layer: "offload_inputs"})
    before = set(shared._readings)
    with jax.checking_leaks():
        jax.jit(jax.grad(fn)).lower(job.params, *job.batch)
    gc.collect()
    assert set(shared._readings) <= before


def test_a_dead_trace_is_not_taken_for_a_new_one() -> None:
    """A trace without a gradient counted as another reader of `data` if the next trace had its id."""
    data, w = jnp.ones((3, 4)), jnp.ones((4, 4))
    for _ in range(10):
        block = rj.remat(lambda x, w: jnp.sin(x @ w) * jnp.exp(x), "offload_inputs")

        def loss(w: Any, block: Any = block) -> Any:
            return jnp.sum(block(data, jnp.sin(w)))

        jax.eval_shape(loss, w)
        assert to_host(jax.grad(loss), w) == [(3, 4), (4, 4)]
