"""Costs of remat_jax relative to handwritten checkpoints, measured in one run: tracing, FLOPs, compiled memory, step time."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

import remat_jax as rj
from benchmarks.peers import INPUT, Contender, Setting
from benchmarks.record import text_table
from examples.demo.jax_rows import KEEP_BARRIERS
from remat_jax.cost.count import flops
from remat_jax.errors import UnsupportedError
from remat_jax.hardware import target
from remat_jax.memory.compile.compiler import compile_programs
from remat_jax.memory.compile.exporting import export_step

TRACES, STEPS = 3, 9
# The largest allowed ratio of compiled temporary memory to the peer's: the same bytes for a GPU, and 2 % more for the CPU,
# where the order of XLA's passes moves some buffers.
LIMITS = {"h200": 1.0, "cpu": 1.02}


@dataclasses.dataclass
class Measured:
    """The figures of one contender; a figure that was not measured is None."""

    setting: str
    contender: str
    is_ours: bool
    trace_seconds: float | None = None
    matmul_flops: int | None = None
    cpu_temp_bytes: int | None = None
    h200_temp_bytes: int | None = None
    step_seconds: float | None = None


FIGURES = ("trace_seconds", "matmul_flops", "cpu_temp_bytes", "h200_temp_bytes", "step_seconds")


def measure(setting: Setting, group: Sequence[Contender], say: Callable[[str], None]) -> list[Measured]:
    """All figures of the contenders of one setting; timed runs alternate."""
    rows = [Measured(str(setting), contender.name, contender.is_ours) for contender in group]
    say(f"{setting}: tracing")
    for row, contender, seconds in zip(rows, group, _trace_seconds(group), strict=True):
        row.trace_seconds = seconds
        row.matmul_flops = flops(jax.value_and_grad(contender.loss), contender.params, _input())
    # XLA's CPU compiler does not schedule unrolled blocks for memory, and an offload moves nothing on a CPU.
    if setting.scan and setting.policy == "full":
        say(f"{setting}: compiling for the CPU")
        for row, size in zip(rows, _temp_bytes(group, "cpu"), strict=True):
            row.cpu_temp_bytes = size
    say(f"{setting}: compiling for an H200")
    try:
        for row, size in zip(rows, _temp_bytes(group, "h200"), strict=True):
            row.h200_temp_bytes = size
    except UnsupportedError as error:
        say(str(error))
    if setting.policy == "full":
        say(f"{setting}: running")
        for row, seconds in zip(rows, _step_seconds(group), strict=True):
            row.step_seconds = seconds
    return rows


def _input() -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(INPUT, jnp.float32)


def _trace_seconds(group: Sequence[Contender]) -> list[float]:
    """The shortest of several traces of each contender, all without JAX's caches: disturbances only add time."""

    def once(contender: Contender) -> float:
        jax.clear_caches()  # a second trace of a wrapper around one function would come from a cache
        started = time.perf_counter()
        jax.make_jaxpr(jax.value_and_grad(contender.loss))(contender.params, _input())
        return time.perf_counter() - started

    return [min(times) for times in zip(*([once(contender) for contender in group] for _ in range(TRACES)), strict=True)]


def _temp_bytes(group: Sequence[Contender], name: str) -> list[int]:
    """Temporary device memory of a donated training step; all contenders are compiled in one process."""
    described, programs = target(name), []
    for contender in group:
        job = rj.Workload(contender.loss, contender.params, (_input(),), blocks="*", optimizer=optax.adam(1e-3))
        programs.append(export_step(contender.key, job.step("off"), described))
    sizes = compile_programs(programs, described, timeout=300)
    return [sizes[contender.key].temp for contender in group]


def _step_seconds(group: Sequence[Contender]) -> list[float]:
    """The median time of a gradient on this CPU; the contenders alternate, so that a slow spell hits all of them."""
    x = jax.random.normal(jax.random.key(0), INPUT)
    runs: list[Any] = []
    for contender in group:
        params = jax.tree.map(lambda leaf: jnp.full(leaf.shape, 0.01, leaf.dtype), contender.params)
        compiled = jax.jit(jax.value_and_grad(contender.loss)).lower(params, x).compile(compiler_options=KEEP_BARRIERS)
        jax.block_until_ready(compiled(params, x))
        runs.append((compiled, params))
    rounds: list[list[float]] = []
    for _ in range(STEPS):
        rounds.append([])
        for compiled, params in runs:
            started = time.perf_counter()
            jax.block_until_ready(compiled(params, x))
            rounds[-1].append(time.perf_counter() - started)
    return [statistics.median(times) for times in zip(*rounds, strict=True)]


# --- what the figures say ---------------------------------------------------------------------------------------------


def ratios(row: Measured, peer: Measured) -> dict[str, float | None]:
    """Each figure divided by that of the peer.

    >>> a, b = Measured("s", "rj.remat", True, matmul_flops=6), Measured("s", "nn.remat", False, matmul_flops=6)
    >>> ratios(a, b)["matmul_flops"]
    1.0
    """
    pairs = {name: (getattr(row, name), getattr(peer, name)) for name in FIGURES}
    return {name: mine / theirs if mine is not None and theirs else None for name, (mine, theirs) in pairs.items()}


def problems(row: Measured, peer: Measured) -> list[str]:
    """Where remat_jax costs too much: other FLOPs than the peer's, or more compiled memory. Time is not judged."""
    if not row.is_ours:
        return []
    ratio, excesses = ratios(row, peer), []
    if ratio["matmul_flops"] != 1:
        excesses.append(f"matmul FLOPs {row.matmul_flops} against {peer.matmul_flops} of {peer.contender}")
    for name, limit in LIMITS.items():
        temp = ratio[f"{name}_temp_bytes"]
        if temp is not None and temp > limit:
            excesses.append(f"{name} temp is {temp:.4f} × that of {peer.contender}, at most {limit} is right")
    return [f"{row.setting} {row.contender}: {each}" for each in excesses]


def table(groups: Sequence[Sequence[Measured]]) -> str:
    """The ratios in plain text; the first row of each group is the peer, with its figures in their units."""
    columns = ("setting and contender", "trace", "matmul FLOPs", "temp on CPU", "temp on H200", "step")
    rows = []
    for group in groups:
        peer = group[0]
        figures = (_unit(peer.trace_seconds, 1e3, "ms"), _unit(peer.matmul_flops, 1e-9, "GFLOP"))
        figures += (_unit(peer.cpu_temp_bytes, 1e-6, "MB"), _unit(peer.h200_temp_bytes, 1e-6, "MB"))
        rows.append((f"{peer.setting}: {peer.contender}", *figures, _unit(peer.step_seconds, 1e3, "ms")))
        for row in group[1:]:
            ratio = ratios(row, peer)
            cells = ("-" if ratio[name] is None else f"× {ratio[name]:.3f}" for name in FIGURES)
            rows.append((f"  {row.contender}", *cells))
    return text_table(columns, rows)


def _unit(value: float | None, factor: float, unit: str) -> str:
    return "-" if value is None else f"{value * factor:.1f} {unit}"
