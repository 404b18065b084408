"""The doctor raises no false alarm on correct workloads, each under a suitable policy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

import remat_jax as rj
from examples.models import linen as linen_models
from examples.models import nnx as nnx_models
from tests.small_models import Attention, Mlp, Stack, make_loss
from tests.workloads import struct

POLICIES = jax.checkpoint_policies
TOKENS = jax.ShapeDtypeStruct((2, 8), jnp.int32)


def stack(block: Any = Mlp, *, scanned: bool = False, layers: int = 3, **options: Any) -> rj.Workload:
    loss, params, x = make_loss(block, scanned=scanned, layers=layers)
    return rj.Workload(loss, params, (x,), block, **options)


def decoder(**fields: Any) -> rj.Workload:
    model = linen_models.ByteDecoder(d_model=16, nhead=2, num_layers=3, max_len=8, **fields)
    params = jax.eval_shape(model.init, jax.random.key(0), TOKENS)["params"]

    def loss(params: Any, tokens: Any, targets: Any) -> Any:
        return model.apply({"params": params}, tokens, targets, method="loss")

    return rj.Workload(loss, params, (TOKENS, TOKENS), linen_models.DecoderLayer, optimizer=optax.adam(1e-3))


def nnx_decoder(**fields: Any) -> rj.Workload:
    model = nnx.eval_shape(
        lambda: nnx_models.ByteDecoder(d_model=16, nhead=2, num_layers=3, max_len=8, rngs=nnx.Rngs(0), **fields)
    )
    return rj.Workload.from_nnx(model, lambda model, *batch: model.loss(*batch), (TOKENS, TOKENS), nnx_models.DecoderLayer)


def with_dropout() -> rj.Workload:
    class Block(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            return x + nn.Dropout(0.5, deterministic=False)(nn.Dense(4)(jnp.tanh(x)))

    model, x, key = Stack(Block), struct(2, 4), jax.random.key(0)
    params = jax.eval_shape(lambda key: model.init({"params": key, "dropout": key}, jnp.ones((2, 4))), key)
    return rj.Workload(lambda p, x, key: model.apply(p, x, rngs={"dropout": key}).sum(), params, (x, key), Block)


def half_precision() -> rj.Workload:
    class Block(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            return x + nn.Dense(4, dtype=jnp.bfloat16)(nn.gelu(nn.Dense(16, dtype=jnp.bfloat16)(x)))

    return stack(Block, scanned=True)


def finished_step() -> rj.Workload:
    loss, params, x = make_loss(layers=3)
    optimizer = optax.sgd(0.1)

    def step(params: Any, state: Any, x: Any) -> Any:
        gradients = jax.grad(loss)(params, x)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    return rj.Workload.from_step(jax.jit(step), params, optimizer.init(params), x, blocks=Mlp, donate_argnums=(0, 1))


def own_checkpoints(policy: Any, *, scan: bool) -> rj.Workload:
    """A model of plain functions, with `jax.checkpoint` around each layer."""

    def layer(x: Any, w: Any) -> Any:
        return x + jnp.tanh(checkpoint_name(checkpoint_name(x, "layer_in") @ w, "product")), None

    def loss(params: Any, x: Any) -> Any:
        checkpointed = jax.checkpoint(layer, policy=policy)
        if scan:
            return jax.lax.scan(checkpointed, x, params)[0].sum()
        for w in params:
            x, _ = checkpointed(x, w)
        return x.sum()

    return rj.Workload(loss, struct(3, 4, 4), (struct(2, 4),), "layers*")


OFFLOAD_INPUT = POLICIES.save_and_offload_only_these_names(
    names_which_can_be_saved=["product"],
    names_which_can_be_offloaded=["layer_in"],
    offload_src="device",
    offload_dst="pinned_host",
)
CLEAN: dict[str, tuple[Callable[[], rj.Workload], Any]] = {
    "scanned": (lambda: stack(Attention, scanned=True), "full"),
    "a policy of JAX's": (lambda: stack(Attention), POLICIES.dots_with_no_batch_dims_saveable),
    "a mapping that keeps the last block": (
        lambda: stack(optimizer=optax.adam(1e-3)),
        {"layer_2": "full", Mlp: "offload_inputs"},
    ),
    "decoder, scanned, offloaded": (lambda: decoder(scan=True), "offload_dot_with_no_batch_dims"),
    "NNX, scanned, everything": (lambda: nnx_decoder(scan=True), "everything"),  # keeps a form of its norms' scales
    "NNX, unrolled, by name": (nnx_decoder, "offload: *ffn/up:dot_general*; save: @dots_with_no_batch_dims"),
    "dropout": (with_dropout, "full"),
    "bfloat16 of float32 parameters": (half_precision, "dots"),
    "finished step": (finished_step, "dots"),
    "plain functions": (lambda: own_checkpoints(None, scan=False), "off"),
    "plain functions, scanned, offloaded": (lambda: own_checkpoints(OFFLOAD_INPUT, scan=True), "off"),
    "nn.remat": (lambda: stack(nn.remat(Attention, policy=POLICIES.dots_saveable), scanned=True), "off"),
    "no checkpoint": (stack, "off"),
}


@pytest.mark.parametrize("name", CLEAN)
def test_a_clean_workload_has_no_finding(name):
    make, policy = CLEAN[name]
    diagnosis = rj.doctor(make(), policy)
    assert diagnosis.ok, str(diagnosis)
    assert (diagnosis.regions > 0) == (name != "no checkpoint")


def test_equal_layers_are_one_region_whatever_their_keys_and_the_inputs_that_they_ignore() -> None:
    """Flax folds another number into each layer's random key; each Haiku layer takes the parameters of all layers."""
    haiku = pytest.importorskip("haiku")

    class Layer(haiku.Module):
        def __call__(self, x: Any) -> Any:
            return x + haiku.dropout(haiku.next_rng_key(), 0.5, haiku.Linear(4)(jnp.tanh(x)))

    net = haiku.transform(lambda x: Layer(name="b")(Layer(name="a")(x)).sum())
    x, key = jax.ShapeDtypeStruct((2, 4), jnp.float32), jax.random.PRNGKey(0)
    job = rj.Workload(net.apply, jax.eval_shape(net.init, key, x), (key, x), Layer)
    assert [rj.doctor(each, "full").regions for each in (job, with_dropout())] == [1, 1]
