"""The processor seconds that remat_jax's own Python takes to trace under a policy, to measure and to plan.

    python -m benchmarks.tracing                             everything below
    python -m benchmarks.tracing --layers 12 --scanned 2 4   shorter stacks

Tracing is compared with the same model under a handwritten `nn.remat`; the two alternate, and the shortest of three runs
counts. `measure` is compared with the time of XLA's own processes for the same step. The time of a plan is given for scanned
stacks of 4 and of 64 layers, in total and per compiled step. A plan of unrolled layers is compared with one `measure` of them,
also in wall-clock time.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from rich.console import Console
from rich.table import Table

import remat_jax as rj
from benchmarks.plan_seconds import compiler_seconds, decoder
from remat_jax.memory.compile.process import end_idle

POLICIES = {
    "full": None,
    "dots_with_no_batch_dims": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "offload_dot_with_no_batch_dims": jax.checkpoint_policies.offload_dot_with_no_batch_dims("device", "pinned_host"),
}
_RUNS = 3


class Block(nn.Module):
    """A layer of a transformer."""

    width: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        h = nn.LayerNorm()(x)
        x = x + nn.MultiHeadDotProductAttention(8)(h, h)
        return x + nn.Dense(self.width)(nn.gelu(nn.Dense(4 * self.width)(nn.LayerNorm()(x))))


class Stack(nn.Module):
    """Unrolled layers of the class `block`."""

    layers: int
    block: type = Block

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for index in range(self.layers):
            x = self.block(256, name=f"block_{index}")(x)
        return x


BATCH = jax.ShapeDtypeStruct((4, 128, 256), jnp.float32)


def processor(run: Callable[[], Any]) -> float:
    """Processor seconds of this process that `run()` takes."""
    gc.collect()
    begin = time.process_time()
    run()
    return time.process_time() - begin


def tracing(layers: int, policy: str) -> tuple[float, float]:
    """Seconds to trace and lower a step under our policy, and with handwritten `nn.remat`."""
    plain, by_hand = Stack(layers), Stack(layers, nn.remat(Block, policy=POLICIES[policy]))
    params = jax.eval_shape(plain.init, jax.random.key(0), BATCH)

    def seconds(model: Stack, ours: bool) -> float:
        def loss(params: Any, x: jax.Array) -> jax.Array:
            return jnp.mean(model.apply(params, x) ** 2)

        under = rj.checkpoint_blocks(loss, {Block: policy}) if ours else loss
        return processor(lambda: jax.jit(jax.value_and_grad(under)).lower(params, BATCH))

    turns = [(seconds(plain, True), seconds(by_hand, False)) for _ in range(_RUNS)]
    return min(ours for ours, _ in turns), min(hand for _, hand in turns)


def unrolled(layers: int) -> rj.Workload:
    """A training step of unrolled layers."""
    model = Stack(layers)
    params = jax.eval_shape(model.init, jax.random.key(0), BATCH)
    return rj.Workload(
        lambda p, x: jnp.mean(model.apply(p, x) ** 2), params, (BATCH,), Block, optimizer=optax.adam(1e-3), name="stack"
    )


def measuring(layers: int) -> tuple[float, float]:
    """Processor seconds of this process, and of XLA's processes, to measure a step under `full`."""
    job = unrolled(layers)
    before = compiler_seconds()
    python = processor(lambda: rj.measure(job, "full", "h200"))
    return python, compiler_seconds() - before


def planning(job: rj.Workload) -> tuple[float, float, float, float, int]:
    """Wall-clock and processor seconds of measuring `full` and planning for 1.2 × its memory; the count of compiled steps."""
    reports, plans = [], []
    with without_answers():
        measured = clocked(lambda: reports.append(rj.measure(job, "full", "h200")))
    budget = round(1.2 * reports[0].device_bytes)
    with without_answers():
        planned = clocked(lambda: plans.append(rj.plan(job, budget, "h200")))
    return *measured, *planned, max(1, len(plans[0].tried))


@contextlib.contextmanager
def without_answers() -> Iterator[None]:
    """A context with an empty cache folder and new compile processes."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder
        end_idle()
        yield


def clocked(run: Callable[[], Any]) -> tuple[float, float]:
    """Wall-clock seconds, and processor seconds of this process, that `run()` takes."""
    begin = time.perf_counter()
    python = processor(run)
    return time.perf_counter() - begin, python


def print_plans(console: Console, layers: int, scanned: tuple[int, int]) -> None:
    """Print plans of scanned stacks, and a plan of an unrolled stack compared with one `measure` of it."""
    table = Table("plan of", "our Python", "compiled", "for each step", title="scanned layers, an 8B decoder's")
    totals = []
    for count in scanned:
        *_, python, compiled = planning(decoder(count, optimizer=optax.sgd(1e-4)))
        totals.append((python, python / compiled))
        table.add_row(f"{count} layers", f"{python:.2f} s", str(compiled), f"{python / compiled:.2f} s")
    (few, few_each), (many, many_each) = totals
    table.add_row("ratio", f"{many / few:.2f}", "", f"{many_each / few_each:.2f}")
    console.print(table)
    wall, python, plan_wall, plan_python, compiled = planning(unrolled(layers))
    table = Table("unrolled layers", "the clock", "our Python", title=f"{layers} layers")
    table.add_row("one measure", f"{wall:.1f} s", f"{python:.1f} s")
    table.add_row(f"a plan, {compiled} steps compiled", f"{plan_wall:.1f} s", f"{plan_python:.1f} s")
    table.add_row("ratio", f"{plan_wall / wall:.2f}", f"{plan_python / python:.2f}")
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--scanned", type=int, nargs=2, default=(4, 64), help="layers of the two scanned stacks")
    parser.add_argument("--only", choices=("tracing", "measuring", "planning"))
    options = parser.parse_args()
    console = Console()
    if options.only in (None, "tracing"):
        table = Table("policy", "ours", "nn.remat by hand", "ratio", title=f"trace and lower {options.layers} unrolled layers")
        tracing(2, "full")  # the first trace of a process imports modules
        for policy in POLICIES:
            ours, hand = tracing(options.layers, policy)
            table.add_row(policy, f"{ours:.2f} s", f"{hand:.2f} s", f"{ours / hand:.2f}")
        console.print(table)
    layers = options.layers * 2 // 3
    if options.only in (None, "measuring"):
        with without_answers():
            python, compiler = measuring(layers)
        console.print(
            f"measure {layers} unrolled layers: {python:.1f} s of our Python, {compiler:.1f} s of XLA: {python / compiler:.2f}"
        )
    if options.only in (None, "planning"):
        print_plans(console, layers, tuple(options.scanned))


if __name__ == "__main__":
    main()
