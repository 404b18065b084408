"""`python -m benchmarks.predict_memory`: how well saved bytes predict the compiled memory of random policies on scanned
stacks.
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import remat_jax as rj
from benchmarks.predictor import Predictor, compile_policies, full_plus_residuals, random_policies
from benchmarks.record import ROOT, provenance, text_table, write_json
from remat_jax import compat
from remat_jax.hardware import target as target_named

DTYPE = jnp.bfloat16
CALIBRATION_SEED, POLICY_SEED = 1, 2
DECODER, MLP_ROWS = {"width": 1024, "heads": 16, "batch": 4, "length": 1024, "vocab": 4096}, 8192


class MlpBlock(nn.Module):
    """LayerNorm, up, GELU, down, added to the input."""

    width: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        normed = nn.LayerNorm(dtype=DTYPE, param_dtype=DTYPE, name="norm")(x)
        hidden = nn.gelu(nn.Dense(4 * self.width, dtype=DTYPE, param_dtype=DTYPE, name="up")(normed))
        return x + nn.Dense(self.width, dtype=DTYPE, param_dtype=DTYPE, name="down")(hidden)


class DecoderBlock(nn.Module):
    """RMSNorm, causal attention, RMSNorm, gated feed-forward, as in Llama; `attention` is `xla` or `pallas`."""

    width: int
    heads: int
    attention: str

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        def dense(features: int, name: str) -> nn.Dense:
            return nn.Dense(features, use_bias=False, dtype=DTYPE, param_dtype=DTYPE, name=name)

        normed = nn.RMSNorm(dtype=DTYPE, param_dtype=DTYPE, name="norm1")(x)
        q, k, v = (dense(self.width, name)(normed).reshape(*x.shape[:2], self.heads, -1) for name in "qkv")
        if self.attention == "pallas":
            mixed = compat.attention_kernel()(q, k, v, segment_ids=None, sm_scale=q.shape[-1] ** -0.5, causal=True)
        else:
            mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="xla")
        x = x + dense(self.width, "out")(mixed.reshape(x.shape))
        normed = nn.RMSNorm(dtype=DTYPE, param_dtype=DTYPE, name="norm2")(x)
        hidden = 8 * self.width // 3 // 64 * 64
        return x + dense(self.width, "down")(nn.silu(dense(hidden, "gate")(normed)) * dense(hidden, "up")(normed))


class Stack(nn.Module):
    """`layers` blocks under `nn.scan`; with `vocab`, tokens in and logits out."""

    block: Any
    layers: int
    width: int
    vocab: int = 0

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        if self.vocab:
            x = nn.Embed(self.vocab, self.width, dtype=DTYPE, param_dtype=DTYPE, name="embed")(x)
        scan = nn.scan(
            lambda block, x, _: (block(x), None), variable_axes={"params": 0}, split_rngs={"params": True}, length=self.layers
        )
        x = scan(self.block(name="layers"), x, None)[0]
        if not self.vocab:
            return x
        x = nn.RMSNorm(dtype=DTYPE, param_dtype=DTYPE, name="norm")(x)
        return nn.Dense(self.vocab, use_bias=False, dtype=DTYPE, param_dtype=DTYPE, name="head")(x)


def decoder(attention: str, layers: int) -> rj.Workload:
    """A language model whose blocks have `attention`, with Adam; nothing is allocated."""
    sizes = DECODER
    block = functools.partial(DecoderBlock, sizes["width"], sizes["heads"], attention)
    model = Stack(block, layers, sizes["width"], sizes["vocab"])
    tokens = jax.ShapeDtypeStruct((sizes["batch"], sizes["length"]), jnp.int32)

    def loss(params: Any, tokens: jax.Array, targets: jax.Array) -> jax.Array:
        logits = model.apply(params, tokens).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()

    params = jax.eval_shape(model.init, jax.random.key(0), tokens)
    return rj.Workload(loss, params, (tokens, tokens), DecoderBlock, optimizer=optax.adam(1e-3), name=f"decoder, {attention}")


def deep_mlp(layers: int) -> rj.Workload:
    """A deep perceptron with Adam."""
    width = DECODER["width"]
    model, x = Stack(functools.partial(MlpBlock, width), layers, width), jax.ShapeDtypeStruct((MLP_ROWS, width), DTYPE)
    params = jax.eval_shape(model.init, jax.random.key(0), x)
    loss = lambda params, x: jnp.mean(model.apply(params, x).astype(jnp.float32) ** 2)  # noqa: E731
    return rj.Workload(loss, params, (x,), MlpBlock, optimizer=optax.adam(1e-3), name="deep MLP")


MODELS: dict[str, Callable[[int], rj.Workload]] = {
    "mlp": deep_mlp,
    "pallas": functools.partial(decoder, "pallas"),
    "xla": functools.partial(decoder, "xla"),
}


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.predict_memory", description=__doc__)
    parser.add_argument("--output", type=Path, default=ROOT / "build" / "benchmarks", help="folder for predict_memory.json")
    parser.add_argument("--only", choices=MODELS, action="append", help="one of the models; may be given again")
    parser.add_argument("--policies", type=int, default=50, help="random policies for each model, beside the calibration")
    parser.add_argument("--calibration", type=int, default=9, help="random policies to calibrate with")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--target", default="h200")
    options = parser.parse_args(arguments)
    if options.policies < 1 or options.layers < 2 or options.calibration < 0:
        parser.error("--policies must be 1 or more, --layers 2 or more, --calibration 0 or more")
    return options


def compare(workload: rj.Workload, short: rj.Workload, target: str, policies: int, calibration: int) -> list[dict[str, Any]]:
    """One row per random policy that is not in the calibration: its compiled temp bytes, and each method's prediction.

    Args:
        short: the same workload with two layers, for the method `two layers`.
    """
    drawn = random_policies(workload, policies, POLICY_SEED)
    predictor = Predictor(workload, target, calibration, seed=CALIBRATION_SEED)
    full = rj.residuals(workload, "full")
    full_temp = predictor.predict_from(full).temp_bytes
    sizes = compile_policies(workload, drawn, target_named(target), timeout=3600)
    of_two = compile_policies(short, [*drawn, "full"], target_named(target), timeout=3600)
    # The cost of the further layers in addition to the residuals of `full`: stacked gradients.
    growth = full_temp - of_two["full"].temp - full.device_bytes + rj.residuals(short, "full").device_bytes
    rows = []
    for policy in drawn:
        table = rj.residuals(workload, policy)
        prediction = predictor.predict_from(table)
        if prediction.compiled:
            continue  # the same program is in the calibration and would flatter the prediction
        report = sizes[policy]
        largest = [buffer for buffer in report.live if buffer.phase != "argument"][:6]
        rows.append(
            {
                "policy": policy,
                "temp_bytes": report.temp,
                "host_bytes": report.host_temp,
                "residual_device_bytes": table.device_bytes,
                "residual_host_bytes": table.host_bytes,
                "predicted": prediction.temp_bytes,
                "full + residuals": full_plus_residuals(full, full_temp, table),
                "two layers": of_two[policy].temp + growth + table.device_bytes - rj.residuals(short, policy).device_bytes,
                "largest": [[buffer.name, buffer.phase, buffer.shape, buffer.nbytes] for buffer in largest],
            }
        )
    return rows


WAYS = ("full + residuals", "predicted", "two layers")


def summary(rows: Sequence[dict[str, Any]], way: str) -> dict[str, float]:
    """Median, 95th percentile and worst of |predicted − compiled| as a share of the compiled temp bytes.

    >>> summary([{"temp_bytes": 100, "predicted": 90}, {"temp_bytes": 100, "predicted": 102}], "predicted")["worst"]
    0.1
    """
    errors = [abs(row[way] - row["temp_bytes"]) / row["temp_bytes"] for row in rows]
    return {
        "median": float(np.median(errors)),
        "p95": float(np.percentile(errors, 95)),
        "worst": max(errors),
    }


def table(results: dict[str, list[dict[str, Any]]]) -> str:
    """The results in plain text: model, method, number of policies, and the errors in per cent of the temp bytes."""
    lines = []
    for name, rows in results.items():
        for way in WAYS:
            shares = summary(rows, way)
            errors = tuple(f"{100 * shares[key]:.2f}" for key in ("median", "p95", "worst"))
            lines.append((f"{name}: {way}", str(len(rows)), *errors))
    return text_table(("model: way", "policies", "median %", "p95 %", "worst %"), lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Compile, predict, print the table, and return 0: tests and the note judge the errors."""
    options = parse(arguments)
    os.environ["JAX_PLATFORMS"] = "cpu"
    compat.keep_to_cpu_without_gpu()
    results: dict[str, list[dict[str, Any]]] = {}
    for name in options.only or MODELS:
        begin = time.perf_counter()
        workload = MODELS[name](options.layers)
        results[workload.name] = compare(workload, MODELS[name](2), options.target, options.policies, options.calibration)
        print(f"{workload.name}: {time.perf_counter() - begin:.0f} s", file=sys.stderr, flush=True)
        summaries = {model: {way: summary(rows, way) for way in WAYS} for model, rows in results.items()}
        record = {"provenance": provenance(), "options": vars(options) | {"output": str(options.output)}}
        write_json(options.output / "predict_memory.json", {**record, "summaries": summaries, "rows": results})
    print(f"Temp bytes of random policies, {options.layers} scanned layers, {options.target}, JAX {jax.__version__}:")
    print(table(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
