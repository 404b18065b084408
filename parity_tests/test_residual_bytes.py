"""Bytes that the graph keeps between the passes: JAX under scan and PyTorch side by side.

PyTorch: the storages that the graph holds, without parameters, but with an argument that the graph keeps. PyTorch's first
block keeps the batch itself; a scan stacks a copy of the batch with the inputs of the other layers. JAX: the arrays that
leave the forward pass for the backward pass, without parameters and batch.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest
import torch
from flax import nnx

import remat_jax as rj
import torch_ref
from examples import pytorch
from parity_tests import support as s
from remat_jax.memory.residuals import kept_residuals

BATCH, TIME, WIDTH, LAYERS, VOCAB = 3, 64, 64, 4, 256
SIZES = {"num_layers": LAYERS, "d_model": WIDTH, "nhead": 4}
STREAM = BATCH * TIME * WIDTH * 4
LOGITS = BATCH * TIME * VOCAB * 4
# Outside the blocks the loss keeps the difference for the mean square; the decoder keeps its head's input and, for the cross
# entropy, one array of the logits' shape.
AROUND = {"DecoderStack": STREAM, "ByteDecoder": STREAM + LOGITS}
BYTES = {"checkpoint": (LAYERS * STREAM, 0), "offload": (0, LAYERS * STREAM)}


class Kept(NamedTuple):
    device: int
    host: int


@functools.cache
def torch_kept(kind: str, mode: str) -> Kept:
    model, flags = getattr(pytorch, kind)(**SIZES, **_length(kind)), torch_ref.mode_flags(mode)
    if kind == "ByteDecoder":
        tokens = torch.zeros(BATCH, TIME, dtype=torch.long)
        saved = torch_ref.saved_for_backward(lambda x, y: model.loss(x, y, **flags), tokens, tokens)
    else:
        x = torch.zeros(BATCH, TIME, WIDTH, requires_grad=True)
        saved = torch_ref.saved_for_backward(lambda x, y: s.mean_squared(model(x, **flags), y), x, x.detach())
    return Kept(saved.device_bytes + saved.input_bytes, saved.host_bytes)


def _length(kind: str) -> dict[str, int]:
    return {"max_len": TIME} if kind == "ByteDecoder" else {}


@functools.cache
def job(kind: str, framework: str, scan: bool) -> rj.Workload:
    """The training loss of a model that is never allocated."""
    make, block = getattr(s.MODULES[framework], kind), s.block_of(kind, framework)
    options: dict[str, Any] = SIZES | _length(kind) | {"scan": scan}
    x = jax.ShapeDtypeStruct((BATCH, TIME), jnp.int32)
    if kind == "DecoderStack":
        x = jax.ShapeDtypeStruct((BATCH, TIME, WIDTH), jnp.float32)
    if framework == "nnx":
        model = nnx.eval_shape(lambda: make(**options, rngs=nnx.Rngs(0)))
        loss = (lambda m, x, y: m.loss(x, y)) if kind == "ByteDecoder" else (lambda m, x, y: s.mean_squared(m(x), y))
        return rj.Workload.from_nnx(model, loss, (x, x), block)
    model = make(**options)
    params = jax.eval_shape(model.init, jax.random.key(0), x)

    def linen_loss(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        if kind == "ByteDecoder":
            return model.apply(params, x, y, method="loss")
        return s.mean_squared(model.apply(params, x), y)

    return rj.Workload(linen_loss, params, (x, x), block)


def jax_kept(kind: str, framework: str, policy: str, scan: bool = True) -> Kept:
    table = kept_residuals(job(kind, framework, scan), policy)
    return Kept(table.device_bytes, table.host_bytes)


def agree(kept: Kept, expected: Kept) -> bool:
    """Whether both are within 1 % of the expected bytes; no expected host bytes means exactly none."""
    return all(abs(a - b) <= 0.01 * b for a, b in zip(kept, expected, strict=True))


forms = pytest.mark.parametrize("framework", ["linen", "nnx"])
kinds = pytest.mark.parametrize("kind", AROUND)


@kinds
@forms
@pytest.mark.parametrize("mode", ["checkpoint", "offload"])
def test_scanned_layers_keep_what_pytorch_keeps(kind: str, framework: str, mode: str) -> None:
    """PyTorch keeps the inputs of its blocks, and around them what `AROUND` says."""
    kept, expected = jax_kept(kind, framework, mode), torch_kept(kind, mode)
    assert agree(expected, Kept(BYTES[mode][0] + AROUND[kind], BYTES[mode][1]))
    assert agree(kept, expected), (kept, expected)
    assert kept.host == expected.host == BYTES[mode][1]


@forms
@pytest.mark.parametrize("mode", ["checkpoint", "offload"])
def test_unrolled_layers_keep_the_same_but_for_a_copy_of_the_batch(framework: str, mode: str) -> None:
    device, host = torch_kept("DecoderStack", mode)
    batch = STREAM if mode == "checkpoint" else 0
    assert jax_kept("DecoderStack", framework, mode, scan=False) == Kept(device - batch, host)
