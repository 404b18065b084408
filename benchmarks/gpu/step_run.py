"""One policy on the device: `python -m benchmarks.gpu.step_run JOB` runs training steps and prints one line of JSON."""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.gpu import kernels
from benchmarks.gpu.child import answer_with
from benchmarks.gpu.jax_run import compiled_bytes
from benchmarks.gpu.steps import StepJob

SERIES = 3
"""How many series of steps are timed."""


def run(job: StepJob) -> dict[str, Any]:
    """Compile, run and measure. Time and memory do not depend on the numbers as long as they are finite."""
    step = job.step()
    # Compile before anything is on the device: autotuning's memory then stays below the step's own peak.
    jitted = jax.jit(step.function, donate_argnums=step.donate_argnums, compiler_options=job.compiler_options)
    compiled = jitted.lower(*step.arguments).compile()
    trained, state, frozen, *batch = filled(step.arguments)
    seconds = []
    jax.block_until_ready((trained, state, batch))
    for count in (job.warm_up, *[job.steps] * SERIES):
        started = time.perf_counter()
        # As in training, the host starts the next step while the device runs: only the last step of a series is waited for.
        for _ in range(count):
            trained, state, loss = compiled(trained, state, frozen, *batch)
        jax.block_until_ready((trained, state, loss))
        seconds.append((time.perf_counter() - started) / count)
    memory = jax.local_devices()[0].memory_stats() or {}
    timed = seconds[1:]
    if job.kernels is not None:
        events = kernels.record(lambda: compiled(trained, state, frozen, *batch))
        kernels.write(Path(job.kernels), compiled.as_text(), events)
    return compiled_bytes(compiled) | {
        "measured_peak_bytes": memory.get("peak_bytes_in_use"),
        "step_seconds": statistics.median(timed),
        "seconds": timed,
        "loss": float(loss),
    }


def filled(arguments: Any) -> Any:
    """Arrays of the arguments' shapes and dtypes, made on their device: small normal numbers for two axes or more, bytes for
    integers, ones for other parameters, zeros for an optimizer's state.
    """
    trained, state, *others = arguments
    made = jax.tree.map(_random, (trained, *others))
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), state)
    return (made[0], zeros, *made[1:])


def _random(leaf: Any) -> jax.Array:
    key = jax.random.key(0)
    if jnp.issubdtype(leaf.dtype, jnp.integer):
        return jax.random.randint(key, leaf.shape, 0, 256, leaf.dtype)
    if len(leaf.shape) < 2:
        return jnp.ones(leaf.shape, leaf.dtype)
    return 0.02 * jax.random.normal(key, leaf.shape, leaf.dtype)


if __name__ == "__main__":
    answer_with(run, StepJob.from_json)
