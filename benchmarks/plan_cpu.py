"""`python -m benchmarks.plan_cpu`: times plans and the fastest named policy that fits, on this machine's CPU.

The CPU is calibrated first. The model is the demo's, with scanned layers. In each round every step runs once, but the plan's
step twice: the difference is the noise of the machine. Run nothing else meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import remat_jax as rj
from benchmarks.record import ROOT, provenance, text_table, write_json
from examples.models import linen
from remat_jax.cost.calibrate import calibrate
from remat_jax.hardware import Target
from remat_jax.hardware import target as target_named
from remat_jax.report.tables import format_bytes

NAMED_WITHOUT_OFFLOAD = ("off", "full", "dots", "dots_with_no_batch_dims", "everything")
"""The named policies that offload nothing: a CPU has no separate host memory."""
SHARES = (0.15, 0.4, 0.65, 0.9)
LARGEST_RATIO = 1.02
"""The largest allowed ratio of a plan's time to the best named policy's, if the noise is not larger."""


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plan_cpu", description=__doc__)
    parser.add_argument("--output", type=Path, default=ROOT / "build" / "benchmarks", help="folder for plan_cpu.json")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=9, help="steps of each policy, at least 7 for figures to be kept")
    parser.add_argument("--calibrate", type=float, default=20.0, help="seconds for measuring the processor's rates")
    parser.add_argument(
        "--shares", type=float, nargs="+", default=SHARES, help="budgets, as shares of the way from full to off"
    )
    parser.add_argument("--show", type=Path, metavar="FILE", help="measure nothing: print the rows of this file")
    options = parser.parse_args(arguments)
    if min(options.layers, options.width // 8, options.batch, options.length, options.rounds) < 1:
        parser.error("--layers, --batch, --length and --rounds must be 1 or more, --width 8 or more")
    if not all(0 < share <= 1 for share in options.shares):
        parser.error("--shares must be above 0 and at most 1")
    return options


def job(options: argparse.Namespace) -> rj.Workload:
    """The byte-level decoder, scanned, with its parameters and a batch; a step computes the gradient."""
    model = linen.ByteDecoder(
        d_model=options.width, nhead=8, num_layers=options.layers, max_len=options.length, scan=True, param_dtype=jnp.float32
    )
    tokens = jax.random.randint(jax.random.key(0), (options.batch, options.length), 0, 256)
    params = model.init(jax.random.key(1), tokens)["params"]

    def loss(params: Any, tokens: jax.Array, targets: jax.Array) -> jax.Array:
        value: jax.Array = model.apply({"params": params}, tokens, targets, method="loss")
        return value

    return rj.Workload(loss, params, (tokens, tokens), linen.DecoderLayer, name="demo decoder, scanned")


def calibrated(seconds: float) -> Target:
    """This machine's processor with the rates that it reaches now."""
    return replace(target_named("cpu"), measured=calibrate(seconds=seconds).measured())


def runner(work: rj.Workload, policy: Any) -> Callable[[], float]:
    """A function that runs the compiled step under `policy` on random numbers and returns its seconds."""
    return compiled_runner(work, policy)[1]


def compiled_runner(work: rj.Workload, policy: Any) -> tuple[str, Callable[[], float]]:
    """The text of the compiled step, and the function of `runner`."""
    step = work.step(policy)
    keys = iter(jax.random.split(jax.random.key(2), len(jax.tree.leaves(step.arguments))))

    def filled(leaf: Any) -> jax.Array:
        if jnp.issubdtype(leaf.dtype, jnp.integer):
            return jax.random.randint(next(keys), leaf.shape, 0, 256).astype(leaf.dtype)
        return 0.05 * jax.random.normal(next(keys), leaf.shape, leaf.dtype)

    arguments = jax.tree.map(filled, step.arguments)
    compiled = jax.jit(step.function).lower(*arguments).compile()
    jax.block_until_ready(compiled(*arguments))

    def run() -> float:
        begin = time.perf_counter()
        jax.block_until_ready(compiled(*arguments))
        return time.perf_counter() - begin

    return compiled.as_text() or "", run


def in_turns(runs: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """The seconds of each of `runs` in every round. Every second round runs them in reverse order."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(rounds):
        for name in list(runs)[:: 1 if number % 2 == 0 else -1]:
            seconds[name].append(runs[name]())
    return seconds


def ratio(numerators: Sequence[float], denominators: Sequence[float]) -> tuple[float, float, float]:
    """The median of the ratios, round by round, and their lower and upper quartiles.

    >>> ratio([1.0, 2.0, 3.0, 4.0, 5.0], [1.0, 1.0, 1.0, 1.0, 1.0])
    (3.0, 2.0, 4.0)
    """
    ratios = sorted(numerator / denominator for numerator, denominator in zip(numerators, denominators, strict=True))
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
    return middle, low, high


def row(work: rj.Workload, target: Target, budget: int, sizes: Mapping[str, int], rounds: int) -> dict[str, Any]:
    """Times of one plan and of all named policies that fit; `slower` says whether the plan is slower beyond the noise."""
    plan = rj.plan(work, budget, target, timeout=600)
    fits = [name for name, size in sizes.items() if size <= budget]
    policy = "off" if plan.is_off else dict(plan.policies)
    planned = runner(work, policy)
    runs = {"plan": planned, **{name: runner(work, name) for name in fits}, "plan again": planned}
    seconds = in_turns(runs, rounds)
    medians = {name: statistics.median(taken) for name, taken in seconds.items()}
    best = min(fits, key=lambda name: medians[name])
    middle, low, high = ratio(seconds["plan"], seconds[best])
    noise = ratio(seconds["plan"], seconds["plan again"])
    return {
        "budget": budget,
        "device_bytes": plan.device_bytes,
        "policies": plan.texts,
        "best_named": best,
        "seconds": medians,
        "estimated": plan.seconds,
        "estimated_named": next(point.seconds for point in plan.named if point.name == best),
        "ratio": middle,
        "ratio_quartiles": [low, high],
        "noise_quartiles": list(noise[1:]),
        # The lower quartile must exceed the limit, so that one busy round does not count against a plan.
        "slower": low > max(LARGEST_RATIO, noise[2]),
        "rounds": seconds,
    }


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows in plain text."""
    lines = [
        (
            format_bytes(row["budget"]),
            f"{1e3 * row['seconds']['plan']:.1f}",
            row["best_named"],
            f"{1e3 * row['seconds'][row['best_named']]:.1f}",
            f"{row['ratio']:.3f}",
            "{:.3f}–{:.3f}".format(*row["ratio_quartiles"]),
            "{:.3f}–{:.3f}".format(*row["noise_quartiles"]),
            f"{row['estimated'] / row['estimated_named']:.3f}",
            "SLOWER" if row["slower"] else "yes",
        )
        for row in rows
    ]
    columns = ("budget", "plan ms", "best named", "its ms", "ratio", "inner half", "noise", "estimated", "holds")
    return text_table(columns, lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Calibrate, plan, run, print the table; 1 if a plan is slower than a named policy that fits."""
    options = parse(arguments)
    if options.show:
        record = json.loads(options.show.read_text(encoding="utf-8"))
        return show(record["rows"], record["provenance"]["versions"]["jax"])
    os.environ["JAX_PLATFORMS"] = "cpu"
    jax.config.update("jax_platforms", "cpu")
    target, work = calibrated(options.calibrate), job(options)
    sizes = {name: rj.measure(work, name, target).device_bytes for name in NAMED_WITHOUT_OFFLOAD}
    rows: list[dict[str, Any]] = []
    for share in options.shares:
        budget = sizes["full"] + round(share * (sizes["off"] - sizes["full"]))
        rows.append(row(work, target, budget, sizes, options.rounds))
        print(f"{format_bytes(budget)}: × {rows[-1]['ratio']:.3f}", file=sys.stderr, flush=True)
        settings = vars(options) | {"output": options.output.name}
        figures = {"measured": dict(target.measured), "sizes": sizes, "rows": rows}
        write_json(options.output / "plan_cpu.json", {"provenance": provenance(), "options": settings, **figures})
    return show(rows, jax.__version__)


def show(rows: Sequence[Mapping[str, Any]], version: str) -> int:
    """Print the table; 1 if a plan is slower than a named policy that fits."""
    print(f"Plans run on this processor, medians of {len(rows[0]['rounds']['plan'])} rounds, JAX {version}:")
    print(table(rows))
    return int(any(row["slower"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
