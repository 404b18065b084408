"""Unrolled offload against the same policy under scan, on described GPUs: device temp, bytes on the host, and overlap.

python docs/notes/unrolled_and_scanned.py [h200 h100 a100] [--model MLP --model decoder --model "decoder, NNX"]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax import nnx

import remat_jax as rj
from examples.models import nnx as in_nnx
from examples.models.linen import ByteDecoder, DecoderLayer

LAYERS = 12
POLICIES = ("offload_inputs", "offload_dot_with_no_batch_dims", "offload: {up}; save: @dots_with_no_batch_dims")
Form = Callable[[bool], rj.Workload]


class Block(nn.Module):
    """A residual MLP block: bfloat16 arithmetic, float32 parameters, no biases."""

    @nn.compact
    def __call__(self, x: jax.Array, _: Any = None) -> tuple[jax.Array, None]:  # noqa: D102
        y = nn.gelu(nn.Dense(4096, use_bias=False, dtype=jnp.bfloat16)(x))
        return x + nn.Dense(1024, use_bias=False, dtype=jnp.bfloat16)(y), None


class Stack(nn.Module):
    """A stack of blocks, unrolled or scanned."""

    scan: bool

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:  # noqa: D102
        if self.scan:
            scanned = nn.scan(Block, variable_axes={"params": 0}, split_rngs={"params": True}, length=LAYERS)
            return scanned()(x, None)[0]
        for _ in range(LAYERS):
            x = Block()(x)[0]
        return x


def mlp(scan: bool) -> rj.Workload:
    """A training step of the MLP stack on 16384 rows of width 1024."""
    model, x = Stack(scan), jax.ShapeDtypeStruct((16384, 1024), jnp.bfloat16)
    params = jax.eval_shape(model.init, jax.random.key(0), x)
    return rj.Workload(
        lambda p, x: (model.apply(p, x).astype(jnp.float32) ** 2).mean(), params, (x,), Block, optimizer=optax.adam(1e-3)
    )


def decoder(scan: bool) -> rj.Workload:
    """The byte decoder of the examples, Linen, float32, 16 × 512 tokens, width 512."""
    model = ByteDecoder(d_model=512, nhead=8, num_layers=LAYERS, max_len=512, scan=scan)
    tokens = jax.ShapeDtypeStruct((16, 512), jnp.int32)
    params = jax.eval_shape(model.init, jax.random.key(0), tokens)
    return rj.Workload(
        lambda p, x, y: model.apply(p, x, y, method="loss"), params, (tokens, tokens), DecoderLayer, optimizer=optax.adam(1e-3)
    )


def decoder_nnx(scan: bool) -> rj.Workload:
    """The same decoder in NNX."""
    tokens = jax.ShapeDtypeStruct((16, 512), jnp.int32)
    model = nnx.eval_shape(
        lambda: in_nnx.ByteDecoder(d_model=512, nhead=8, num_layers=LAYERS, max_len=512, scan=scan, rngs=nnx.Rngs(0))
    )
    return rj.Workload.from_nnx(
        model, lambda m, x, y: m.loss(x, y), (tokens, tokens), blocks=in_nnx.DecoderLayer, optimizer=optax.adam(1e-3)
    )


# Name → the model, and the selector of the residual that the third policy offloads.
MODELS: dict[str, tuple[Form, str]] = {
    "MLP": (mlp, "*Dense_0*"),
    "decoder": (decoder, "*ffn/up*"),
    "decoder, NNX": (decoder_nnx, "*ffn/up*"),
}


def rows(targets: list[str], models: list[str]) -> Iterator[str]:
    """The rows of the table, one for each target, model and policy."""
    for target in targets:
        for name in models:
            model, up = MODELS[name]
            for policy in (text.format(up=up) for text in POLICIES):
                scanned, unrolled = (rj.measure(model(scan), policy, target) for scan in (True, False))
                block = (unrolled.residual_device_bytes + unrolled.residual_host_bytes) / LAYERS
                found = unrolled.overlap
                shares = [f"{100 * one.covered:.1f} of {100 * one.coverable:.1f}" for one in (found.out, found.back, found)]
                megabytes = [f"{value / 1e6:.0f}" for value in (scanned.temp_bytes, unrolled.temp_bytes, block)]
                hosts = [str(value) for value in (unrolled.host_bytes, unrolled.receipt.offered_bytes)]
                yield " | ".join([jax.__version__, target, name, policy, *megabytes, *hosts, *shares])


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("targets", nargs="*")
    parser.add_argument("--model", action="append", choices=MODELS)
    options = parser.parse_args()
    head = "JAX", "target", "model", "policy", "scanned MB", "unrolled MB", "a block MB", "on host", "offered"
    head += "out %", "back %", "both %"
    print("|", " | ".join(head), "|")
    print("|" + " --- |" * len(head))
    for row in rows(options.targets or ["h200", "h100", "a100"], options.model or list(MODELS)):
        print("|", row, "|", flush=True)


if __name__ == "__main__":
    main()
