"""Offloading in a model of several scans: what all rounds of a scan read stays where it is, and the device gives back the rest."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest

import remat_jax as rj
from examples.models import pi0
from examples.models.pi0_config import Pi0Config
from examples.models.siglip import SiglipBlock
from tests.small_models import assert_same, to_host

WIDTH, LAYERS, ROWS, LENGTH, WORDS = 256, 8, 16, 512, 40000


def attend(weights: Any, x: Any, context: Any, bias: Any) -> Any:
    """A block of plain functions: attention to `context`, and a product of its own."""
    query, key = x @ weights["query"], context @ weights["key"]
    scores = jax.nn.softmax(jnp.einsum("btd,bsd->bts", query, key) + bias)
    return x + jnp.tanh(jnp.einsum("bts,bsd->btd", scores, context) @ weights["out"])


def stack(layers: int = LAYERS, width: int = WIDTH) -> dict[str, Any]:
    return {name: jax.ShapeDtypeStruct((layers, width, width), jnp.float32) for name in ("query", "key", "out")}


def encoder_and_decoder(params: Any, tokens: Any, visible: Any) -> Any:
    """Two scans of `jax.checkpoint` around plain functions; the decoder's rounds all read what the encoder gives."""
    bias = jnp.where(visible, 0.0, -1e9)
    block = jax.checkpoint(attend)
    start = params["words"][tokens]
    seen, _ = jax.lax.scan(lambda x, weights: (block(weights, x, x, bias), None), start, params["encoder"])
    written, _ = jax.lax.scan(lambda x, weights: (block(weights, x, seen, bias), None), jnp.sin(start), params["decoder"])
    return jnp.mean(written**2)


def arguments(layers: int = LAYERS, width: int = WIDTH, words: int = WORDS, rows: int = ROWS, length: int = LENGTH) -> Any:
    table = jax.ShapeDtypeStruct((words, width), jnp.float32)
    params = {"words": table, "encoder": stack(layers, width), "decoder": stack(layers, width)}
    return params, jax.ShapeDtypeStruct((rows, length), jnp.int32), jax.ShapeDtypeStruct((rows, length, length), jnp.bool_)


def test_an_encoder_and_a_decoder_give_back_what_is_on_the_host() -> None:
    params, *batch = arguments()
    full, offload = (
        rj.measure(rj.Workload(rj.replan(encoder_and_decoder, policy), params, tuple(batch), "*", optimizer=optax.adam(1e-3)),
                   "off", "h200")
        for policy in ("full", "offload_inputs")
    )
    carried = LAYERS * ROWS * LENGTH * WIDTH * 4
    assert offload.host_bytes == 2 * carried
    assert full.device_bytes - offload.device_bytes >= 0.9 * offload.host_bytes
    assert offload.receipt is not None and offload.receipt.offered_bytes == offload.receipt.host_bytes == 2 * carried
    assert offload.overlap is not None and offload.overlap.out.bytes == offload.overlap.back.bytes == 2 * carried


def test_x() -> None:
    pass
