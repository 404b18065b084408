"""`python -m benchmarks.steps_cpu`: times twelve steps on this CPU, and compares them with the time model calibrated for it.

The models are a decoder, scanned and unrolled, a deep MLP and a convolutional net. Each runs without checkpoints, fully
recomputed, and with its matrix products (in the net, its convolutions) saved. The three steps alternate. The exit status is 1
if the rank correlation of estimated and measured seconds is below 0.9, or if the ratio to the step without checkpoints has a
median error above 10 %. Run nothing else meanwhile.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

import remat_jax as rj
from benchmarks.gpu.judge import judged
from benchmarks.gpu.steps import Shape, workload
from benchmarks.plan_cpu import calibrated, compiled_runner, in_turns
from benchmarks.record import ROOT, provenance, text_table, write_json
from remat_jax.errors import RematError
from remat_jax.hardware import Target
from remat_jax.memory.step_time.schedule import step_time
from remat_jax.planning.problem import describe, extra_seconds

CORRELATION, RATIO_ERROR = 0.9, 0.1
KEPT = {"conv": "save: @primitive:conv_general_dilated"}
"""The policy of a model's third step; a model that is not listed saves its matrix products."""


class Convolutions(nn.Module):
    """A residual block of two convolutions and a norm."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        made = nn.gelu(nn.Conv(2 * x.shape[-1], (3, 3), name="up")(nn.LayerNorm(name="norm")(x)))
        return x + nn.Conv(x.shape[-1], (3, 3), name="down")(made)


class ConvNet(nn.Module):
    """A stack of unrolled `Convolutions`."""

    layers: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for index in range(self.layers):
            x = Convolutions(name=f"layers_{index}")(x)
        return x


def conv_net(layers: int, width: int, batch: int, side: int) -> rj.Workload:
    """A gradient step of a convolutional net on square images."""
    model, x = ConvNet(layers), jax.ShapeDtypeStruct((batch, side, side, width), jnp.float32)
    params = jax.eval_shape(model.init, jax.random.key(0), x)
    return rj.Workload(lambda params, x: jnp.mean(model.apply(params, x) ** 2), params, (x,), Convolutions, name="conv net")


def models(small: bool) -> dict[str, rj.Workload]:
    """The four models; `small` models take milliseconds.

    Steps of different models differ by a factor of about two, because the ranks of equally long steps would be noise.
    """
    if small:
        shapes = dict.fromkeys(("scanned", "unrolled", "mlp"), Shape(2, 32, 2, 16))
        return {name: workload(name, shape, jnp.float32) for name, shape in shapes.items()} | {"conv": conv_net(2, 8, 2, 8)}
    shapes = {"scanned": Shape(6, 256, 4, 256), "unrolled": Shape(6, 384, 4, 256), "mlp": Shape(6, 384, 4, 128)}
    return {name: workload(name, shape, jnp.float32) for name, shape in shapes.items()} | {"conv": conv_net(4, 48, 4, 32)}


def rows_of(model: str, work: rj.Workload, target: Target, rounds: int) -> list[dict[str, Any]]:
    """One model's three steps: measured, and estimated from the traced step and, if it can be parsed, the compiled step."""
    described = describe(work, target)
    policies = {"off": "off", "full": "full", "kept": KEPT.get(model, "dots_with_no_batch_dims")}
    made = {name: compiled_runner(work, policy) for name, policy in policies.items()}
    seconds = in_turns({name: run for name, (_, run) in made.items()}, rounds)
    rows = []
    for name, policy in policies.items():
        estimated = {"traced": described.base_seconds + extra_seconds(described, policy)}
        if (compiled := _compiled_seconds(made[name][0], target)) is not None:
            estimated["compiled"] = compiled
        measured = statistics.median(seconds[name])
        rows.append(
            {"model": model, "policy": name, "estimated_seconds": estimated, "step_seconds": measured, "device_bytes": 0}
        )
    return rows


def _compiled_seconds(text: str, target: Target) -> float | None:
    try:
        return step_time(text, target).seconds
    except RematError:
        return None


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows in milliseconds, and as ratios to the step without a checkpoint."""
    plain = {row["model"]: row for row in rows if row["policy"] == "off"}
    lines = []
    for row in rows:
        base, keys = plain[row["model"]], ("traced", "compiled")
        times = [row["step_seconds"], *(row["estimated_seconds"].get(key) for key in keys)]
        bases = [base["step_seconds"], *(base["estimated_seconds"].get(key) for key in keys)]
        shown = [f"{1e3 * value:.1f}" if value is not None else "" for value in times]
        shown += [f"{value / other:.3f}" if value and other else "" for value, other in zip(times, bases, strict=True)]
        lines.append((f"{row['model']}, {row['policy']}", *shown))
    columns = ("model, policy", "measured ms", "traced ms", "compiled ms", "measured × off", "traced × off", "compiled × off")
    return text_table(columns, lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Calibrate, run, print the table; 1 if the traced estimate, by which plans are searched, fails."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.steps_cpu", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, default=ROOT / "build" / "benchmarks", help="folder for steps_cpu.json")
    parser.add_argument("--rounds", type=int, default=9, help="steps of each policy")
    parser.add_argument("--calibrate", type=float, default=20.0, help="seconds for measuring the processor's rates")
    parser.add_argument("--small", action="store_true", help="small models, for trying it out")
    options = parser.parse_args(arguments)
    if options.rounds < 1 or not options.calibrate > 0:
        parser.error("--rounds must be 1 or more, --calibrate positive")
    os.environ["JAX_PLATFORMS"] = "cpu"
    jax.config.update("jax_platforms", "cpu")
    target, rows = calibrated(options.calibrate), []
    for model, work in models(options.small).items():
        rows += rows_of(model, work, target, options.rounds)
        print(f"{model}: {1e3 * rows[-3]['step_seconds']:.1f} ms without a checkpoint", file=sys.stderr, flush=True)
    scores = judged(rows)
    data = {"provenance": provenance(), "measured": dict(target.measured), "judged": scores, "rows": rows}
    write_json(options.output / "steps_cpu.json", data)
    print(table(rows))
    for key, correlation in scores["rank_correlation"].items():
        print(
            f"{key}: rank correlation {correlation:.3f}, ratio to no checkpoint off by {100 * scores['ratio_error'][key]:.1f} %"
        )
    holds = scores["rank_correlation"]["traced"] >= CORRELATION and scores["ratio_error"]["traced"] <= RATIO_ERROR
    print(f"{CORRELATION} and {100 * RATIO_ERROR:.0f} % {'hold' if holds else 'do not hold'} of the traced estimate.")
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
