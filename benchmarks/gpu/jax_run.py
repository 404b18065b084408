"""One row of JAX: `python -m benchmarks.gpu.jax_run JOB` trains the Flax decoder and prints one line of JSON."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import resource
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.traverse_util import unflatten_dict

import remat_jax as rj
from benchmarks.gpu.child import answer_with
from benchmarks.gpu.gradients import compare_and_keep
from benchmarks.gpu.job import ADAM, MICRO_BATCHES, Job, load_arrays
from examples.models import linen, weights
from remat_jax.core import tied_chain as overlap


def workload(job: Job) -> rj.Workload:
    """The training step of the decoder, on shapes."""
    size = job.size
    model = linen.ByteDecoder(
        d_model=size.d_model,
        nhead=size.heads,
        num_layers=size.layers,
        max_len=size.length,
        scan=job.form == "scan",
        param_dtype=jnp.dtype(size.dtype),
    )
    tokens = jax.ShapeDtypeStruct((size.batch, size.length), jnp.int32)
    params = jax.eval_shape(model.init, jax.random.key(0), tokens)["params"]

    def loss(params: Any, tokens: Any, targets: Any) -> Any:
        return model.apply({"params": params}, tokens, targets, method="loss")

    return rj.Workload(loss, params, (tokens, tokens), blocks=linen.DecoderLayer, optimizer=optimizer_of(job))


def optimizer_of(job: Job) -> Any:
    """Adam, or Adam with its state in host memory."""
    adam = optax.adam(**ADAM)
    return rj.offload_optimizer(adam) if job.variant == "host_optimizer" else adam


def step_of(job: Job) -> Any:
    """The training step under the job's policy, in micro-batches if its mode asks for them."""
    whole = workload(job)
    plain = whole.step(job.policy)
    if job.variant == "unlinked":
        return dataclasses.replace(plain, function=unlinked(plain.function))
    if job.variant != "accumulate":
        return plain

    def summed(params: Any, tokens: Any, targets: Any) -> Any:
        return whole.loss(params, tokens, targets) * tokens.size, tokens.size

    gradient = rj.accumulate_gradients(whole.with_policy(summed, job.policy), MICRO_BATCHES)

    def step(params: Any, state: Any, _: Any, tokens: Any, targets: Any) -> Any:
        loss, gradients = gradient(params, tokens, targets)
        updates, state = optax.adam(**ADAM).update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss

    return dataclasses.replace(plain, function=step)


def unlinked(function: Any) -> Any:
    """`function` with each block tied to its place in the schedule, but not linked to the next block (`core/tied_chain.py`)."""

    def alone(*args: Any) -> Any:
        with overlap.unlinked():
            return function(*args)

    return alone


def link_rates() -> list[float]:
    """Bytes per second of a copy of 1 GiB to pinned host memory, and of a copy back: the best of three."""
    device = jax.local_devices()[0]
    array = jax.block_until_ready(jnp.zeros(2**28, jnp.float32))
    rates = []
    for kind in ("pinned_host", "device"):
        where, best = jax.sharding.SingleDeviceSharding(device, memory_kind=kind), math.inf
        for _ in range(3):
            started = time.perf_counter()
            moved = jax.block_until_ready(jax.device_put(array, where))
            best = min(best, time.perf_counter() - started)
        array = moved
        rates.append(array.nbytes / best)
    return rates


@contextlib.contextmanager
def precision(dtype: str) -> Any:
    """Compute in `dtype`: JAX needs x64 for float64, and on GPUs rounds float32 matmuls to TF32, which PyTorch does not."""
    with jax.enable_x64(dtype == "float64"), jax.default_matmul_precision("default" if dtype == "bfloat16" else "highest"):
        yield


def run(job: Job) -> dict[str, Any]:
    """Compile, train and measure one mode; returns the fields of its row."""
    with precision(job.size.dtype):
        step = step_of(job)
        started = time.perf_counter()
        # Compile before anything is on the device: autotuning's memory then stays below the step's own peak.
        arguments = jax.tree.map(placed, step.arguments)
        compiled = jax.jit(step.function, donate_argnums=step.donate_argnums).lower(*arguments).compile()
        fields = {"compile_seconds": time.perf_counter() - started} | compiled_bytes(compiled)
        trained, gradients = train(job, compiled)
        if job.device == "cuda" and "offload" in job.policy:
            fields["link_bytes_per_second"] = link_rates()
        return fields | trained | compare_and_keep(job, gradients)


def placed(leaf: Any) -> Any:
    """An argument in the host memory of a described device, placed in this machine's host memory."""
    if getattr(leaf, "memory_space", None) != jax.memory.Space.Host:
        return leaf
    host = jax.sharding.SingleDeviceSharding(jax.local_devices()[0], memory_kind="pinned_host")
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=host)


def compiled_bytes(compiled: Any) -> dict[str, int]:
    """The compiler's figures of the executable that runs; host memory separately."""
    sizes = compiled.memory_analysis()

    def one(name: str) -> int:
        return int(getattr(sizes, f"{name}_size_in_bytes"))

    return {
        "compiled_device_bytes": one("argument") + one("output") - one("alias") + one("temp"),
        "compiled_host_bytes": one("host_temp") + one("host_argument") + one("host_output") - one("host_alias"),
    }


def train(job: Job, compiled: Any) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The figures of the training steps, and the gradients of the first step under the unrolled decoder's names."""
    params = jax.tree.map(jnp.asarray, initial_params(job))
    state = optimizer_of(job).init(params)
    batches = [tuple(map(jnp.asarray, batch)) for batch in job.batches()]
    losses, first_moment, started = [], None, 0.0
    for index, batch in enumerate(batches):
        if index <= job.warm_up:
            # The timed steps are started one after the other, and only the last is waited for, as in training.
            jax.block_until_ready((params, state, batches))
            started = time.perf_counter()
        params, state, loss = compiled(params, state, {}, *batch)
        losses.append(loss)
        if first_moment is None:
            first_moment = jax.device_get(state[0].mu)
    jax.block_until_ready((params, state))
    seconds = (time.perf_counter() - started) / job.steps
    memory = jax.local_devices()[0].memory_stats() or {}
    gradients = weights.flatten(weights.unstack_layers(first_moment))
    scale = 1 / (1 - ADAM["b1"])
    for name, moment in gradients.items():
        gradients[name] = moment * np.asarray(scale, moment.dtype)
    fields = {
        "measured_peak_bytes": memory.get("peak_bytes_in_use"),
        "host_peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "seconds": [seconds],
        "losses": [float(loss) for loss in losses],
    }
    return fields, gradients


def initial_params(job: Job) -> Any:
    """The shared weights as the parameter tree of the job's form."""
    flat = load_arrays(Path(job.folder, "weights.npz"), job.size.dtype)
    tree = unflatten_dict(flat, sep="/")
    return weights.stack_layers(tree) if job.form == "scan" else tree


if __name__ == "__main__":
    answer_with(run)
