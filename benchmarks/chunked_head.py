"""`python -m benchmarks.chunked_head`: device memory of Llama 3 8B with its head and loss in chunks, compiled for a GPU.

    python -m benchmarks.chunked_head                               8 × 1024 tokens, policy full, one H200
    python -m benchmarks.chunked_head --batch 2 --length 4096       where the scores of attention hold the peak

Adam, parameters in bfloat16, layers scanned, 128,256 words. Nothing is run. The last lines are the advice of the first row on
its head and its attention, estimated by the report and compiled by the doctor. The modelled step is that of the compiled
schedule, at the rates that programs reach on the target.
"""

from __future__ import annotations

import argparse
from typing import Any

import jax
import jax.numpy as jnp
import optax
from rich.console import Console
from rich.table import Table

import remat_jax as rj
from examples.models import llama
from examples.models.functions import cross_entropy
from remat_jax.memory.advice import HEAD, SCORES
from remat_jax.report import format_bytes


def decoder(batch: int, length: int, chunks: int) -> rj.Workload:
    """One training step whose head and loss run in so many chunks of the sequence; one chunk is the head as it is."""
    config = llama.LlamaConfig.llama3_8b()
    model = llama.Llama(config, scan=True, param_dtype=jnp.bfloat16)
    tokens = jax.ShapeDtypeStruct((batch, length), jnp.int32)
    params = jax.eval_shape(model.init, jax.random.key(0), tokens)["params"]

    def head_loss(kernel: jax.Array, hidden: jax.Array, targets: jax.Array) -> jax.Array:
        return cross_entropy(hidden @ kernel, targets) * targets.size

    def loss(params: Any, tokens: jax.Array, targets: jax.Array) -> jax.Array:
        hidden = model.apply({"params": params}, tokens, logits=False)
        total = rj.in_chunks(head_loss, chunks, axis=(None, 1, 1))(params["lm_head"]["kernel"], hidden, targets)
        return total / targets.size

    return rj.Workload(loss, params, (tokens, tokens), llama.LlamaBlock, optimizer=optax.adam(1e-4), name="Llama 3 8B")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="h200")
    parser.add_argument("--policy", default="full")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--chunks", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    options = parser.parse_args()
    table = Table("chunks", "device", "of it temp", "less than one chunk", "modelled step")
    first = None
    for chunks in options.chunks:
        report = rj.measure(decoder(options.batch, options.length, chunks), options.policy, options.target)
        first = first or report
        seconds = "" if report.seconds is None else f"{report.seconds * 1e3:.0f} ms"
        sizes = (report.device_bytes, report.temp_bytes, first.device_bytes - report.device_bytes)
        table.add_row(str(chunks), *map(format_bytes, sizes), seconds)
    Console(width=100).print(table)
    diagnosis = rj.doctor(decoder(options.batch, options.length, options.chunks[0]), options.policy, options.target)
    for one in (*(first.advice if first else ()), *diagnosis.advice):
        if one.what in (HEAD, SCORES):
            print(f"{one.what}: {format_bytes(one.bytes)} less ({'compiled' if one.compiled else 'estimated'})")


if __name__ == "__main__":
    main()
