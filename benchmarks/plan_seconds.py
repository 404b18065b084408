"""How long planning takes: Llama 3 8B with Adam, layers scanned, 2 × 4096 tokens, for one H200, at several budgets.

    python -m benchmarks.plan_seconds                      at 65, 70, 75, 80, 85 and 90 % of its memory
    python -m benchmarks.plan_seconds 85% --layers 64      one budget, with 64 layers

Each budget is planned with an empty cache. `first fit` is the time until the first step that fits was known.
"""

from __future__ import annotations

import argparse
import dataclasses
import multiprocessing
import os
import resource
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import optax

import remat_jax as rj
from benchmarks.figures import markdown
from examples.models import llama
from examples.models.functions import cross_entropy
from remat_jax.memory.compile.process import end_idle

SHARES = ("65%", "70%", "75%", "80%", "85%", "90%")


def decoder(layers: int, optimizer: optax.GradientTransformation | None = None) -> rj.Workload:
    """One training step of the decoder, with Adam unless another optimizer is given."""
    config = dataclasses.replace(llama.LlamaConfig.llama3_8b(), num_layers=layers)
    model = llama.Llama(config, scan=True, param_dtype=jnp.bfloat16)
    tokens = jax.ShapeDtypeStruct((2, 4096), jnp.int32)
    params = jax.eval_shape(model.init, jax.random.key(0), tokens)["params"]

    def loss(params: Any, tokens: jax.Array, targets: jax.Array) -> jax.Array:
        return cross_entropy(model.apply({"params": params}, tokens), targets)

    return rj.Workload(
        loss, params, (tokens, tokens), llama.LlamaBlock, optimizer=optimizer or optax.adam(1e-4), name="Llama 3 8B"
    )


def compiler_seconds() -> float:
    """Processor seconds of all compile processes so far; ends the idle ones, because only ended processes count."""
    end_idle()
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime


def row(budget: str, layers: int) -> tuple[str, ...]:
    """The time that planning at one budget takes, and the plan's figures."""
    begin, processor, first = time.perf_counter(), time.process_time(), [0.0]
    compilers = compiler_seconds()

    def note_first_fit(text: str, done: int, of: int) -> None:
        if "best so far" in text and not first[0]:
            first[0] = time.perf_counter() - begin

    plan = rj.plan(decoder(layers), budget, "h200", progress=note_first_fit)
    seconds = time.perf_counter() - begin
    best = plan.best_named
    return (
        budget,
        f"{seconds:.0f} s",
        f"{first[0] or seconds:.0f} s",
        f"{time.process_time() - processor:.0f} s",
        f"{compiler_seconds() - compilers:.0f} s",
        str(len(plan.tried)),
        f"{plan.seconds * 1e3:.0f} ms",
        f"{plan.device_bytes / 2**30:.1f} of {plan.budget / 2**30:.1f} GiB",
        f"{best.name}, {best.seconds * 1e3:.0f} ms" if best is not None and best.seconds is not None else "none fits",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("budgets", nargs="*", default=SHARES)
    parser.add_argument("--layers", type=int, default=32)
    options = parser.parse_args()
    columns = ["budget", "wall", "first fit", "own processor", "compilers", "compiled", "step", "device", "best named policy"]
    rows = []
    for budget in options.budgets:
        # Each budget has its own process, so it uses no step that another budget compiled.
        with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
            os.environ["XDG_CACHE_HOME"] = folder
            rows.append(process.submit(row, budget, options.layers).result())
    print(markdown(columns, rows))


if __name__ == "__main__":
    main()
