"""Optimizer offload compiled for an H200: the state is in host memory and updated in place, and its device bytes are freed."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import remat_jax as rj
from remat_jax.hardware import target
from remat_jax.memory.compile.compiler import compile_programs
from remat_jax.memory.compile.exporting import export_step
from remat_jax.memory.compile.sizes import Sizes
from remat_jax.memory.measure import measure_many
from tests.workloads import Perceptron, needs_gpu_compiler, perceptrons

WIDTH, LAYERS = 1024, 6
KERNEL = 4 * WIDTH * 4 * WIDTH
"""Bytes of the largest leaf of an unrolled stack; a scanned leaf has six of them."""


def workload(tx: Any, *, scan: bool = False, rows: int = 256, **options: Any) -> rj.Workload:
    return perceptrons(rows, WIDTH, layers=LAYERS, scanned=scan, optimizer=tx, **options)


def sizes(jobs: dict[str, rj.Workload], policy: str = "full", target_name: str = "h200") -> dict[str, Sizes]:
    described = target(target_name)
    return compile_programs(
        [export_step(key, job.step(policy), described) for key, job in jobs.items()], described, timeout=300
    )


@functools.cache
def parameter_bytes() -> int:
    return sum(4 * leaf.size for leaf in jax.tree.leaves(workload(None).params))


@needs_gpu_compiler
@pytest.mark.parametrize(("name", "scan", "rows"), [("adam", True, 4096), ("momentum", False, 256)])
def test_the_device_gives_back_what_is_moved(name, scan, rows):
    tx = optax.adam(1e-3) if name == "adam" else optax.sgd(1e-3, momentum=0.9)
    offloaded = rj.offload_optimizer(tx)
    compiled = sizes({"plain": workload(tx, scan=scan, rows=rows), "offloaded": workload(offloaded, scan=scan, rows=rows)})
    moved = offloaded.placement(workload(None, scan=scan).params).host_bytes
    largest = KERNEL * (LAYERS if scan else 1)
    assert moved == parameter_bytes() * (2 if name == "adam" else 1)
    assert compiled["plain"].host == 0 and compiled["offloaded"].host == moved
    assert compiled["offloaded"].host_temp == 0
    assert compiled["offloaded"].host_argument == compiled["offloaded"].host_output == compiled["offloaded"].host_alias == moved
    assert compiled["plain"].argument - compiled["offloaded"].argument == moved
    assert compiled["plain"].device - compiled["offloaded"].device >= moved - 2 * largest


@needs_gpu_compiler
def test_brought_back_all_at_once_the_state_frees_nothing_like_it():
    """The purpose of the ties: without them all fetches start together."""

    def untied(tx: Any) -> Any:
        def there(tree: Any, space: Any) -> Any:
            return jax.tree.map(lambda leaf: jax.device_put(leaf, space) if leaf.ndim else leaf, tree)

        def update(updates: Any, state: Any, params: Any = None) -> Any:
            updates, state = tx.update(updates, there(state, jax.memory.Space.Device), params)
            return updates, there(state, jax.memory.Space.Host)

        return optax.GradientTransformation(lambda params: there(tx.init(params), jax.memory.Space.Host), update)

    tx = optax.adam(1e-3)
    streamed = rj.offload_optimizer(tx)
    jobs = {"plain": workload(tx), "streamed": workload(streamed), "untied": workload(untied(tx))}
    # As in a train step that knows only optax: update, then apply_updates.
    jobs["two calls"] = workload(optax.GradientTransformation(streamed.init, streamed.update))
    compiled = sizes(jobs)
    freed = {key: compiled["plain"].device - memory.device for key, memory in compiled.items()}
    assert compiled["untied"].host == compiled["two calls"].host == compiled["streamed"].host == 2 * parameter_bytes()
    assert freed["untied"] < 0.4 * 2 * parameter_bytes()
    assert freed["streamed"] > 0.95 * 2 * parameter_bytes()
    # All updates are kept until the end, in the gradients' buffers.
    assert freed["untied"] < freed["two calls"] <= freed["streamed"] - 0.5 * parameter_bytes()


@needs_gpu_compiler
def test_a_norm_of_all_gradients_frees_the_state_where_the_blocks_are_tied():
    """Nothing else keeps XLA from delaying the weight gradients of an unrolled stack."""
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))
    jobs = {"plain": workload(tx, rows=8192), "offloaded": workload(rj.offload_optimizer(tx), rows=8192)}
    tied = sizes(jobs, "offload_inputs")
    assert tied["offloaded"].host - tied["plain"].host == 2 * parameter_bytes()
    assert tied["plain"].device - tied["offloaded"].device >= 2 * parameter_bytes() - 2 * KERNEL


@pytest.mark.versions
@needs_gpu_compiler
def test_half_of_it_and_without_donation():
    half = rj.offload_optimizer(optax.adam(1e-3), 0.5)
    compiled = sizes({"half": workload(half), "kept": workload(rj.offload_optimizer(optax.adam(1e-3)), donate=False)})
    moved = parameter_bytes()
    assert half.placement(workload(None).params).host_bytes == compiled["half"].host == moved
    assert compiled["half"].argument == 4 * 256 * WIDTH + 2 * moved + 4
    # No buffer is reused: the old and the new state are both on the host.
    assert (compiled["kept"].host_argument, compiled["kept"].host_output, compiled["kept"].host_alias) == (
        2 * moved,
        2 * moved,
        0,
    )
    assert compiled["kept"].host == 4 * moved and compiled["kept"].argument == 4 * 256 * WIDTH + moved + 4


@needs_gpu_compiler
def test_the_receipt_of_a_policy_counts_residuals_only():
    jobs = [workload(tx, rows=4096) for tx in (optax.adam(1e-3), rj.offload_optimizer(optax.adam(1e-3)))]
    (plain,), (offloaded,) = (measure_many(job, ["offload_inputs"], "h200") for job in jobs)
    residuals = LAYERS * 4096 * WIDTH * 4
    assert plain.receipt.host_bytes == offloaded.receipt.host_bytes == plain.residual_host_bytes == residuals
    assert plain.host_bytes == residuals and offloaded.host_bytes == residuals + 2 * parameter_bytes()
    assert not any("offered" in warning for warning in offloaded.receipt.warnings)


@needs_gpu_compiler
def test_a_finished_step_keeps_the_memory_of_its_arguments():
    tx = rj.offload_optimizer(optax.adam(1e-3))
    job = workload(tx)
    step = job.step("off")
    finished = rj.Workload.from_step(step.function, *step.arguments, blocks=Perceptron, donate_argnums=(0, 1))
    assert rj.measure(finished, "full", "h200").host_bytes == 2 * parameter_bytes()
    small = {"kernel": jnp.ones((8, 4))}
    state = tx.init(small)
    concrete = rj.Workload.from_step(lambda s, p: tx.update(p, s, p), state, small, blocks=Perceptron)
    spaces = [getattr(leaf, "memory_space", None) for leaf in jax.tree.leaves(concrete.step("off").arguments)]
    assert spaces.count(jax.memory.Space.Host) == 2


def test_on_a_cpu_there_is_one_memory():
    compiled = sizes({"offloaded": workload(rj.offload_optimizer(optax.adam(1e-3)))}, target_name="cpu")["offloaded"]
    assert compiled.host == 0 and compiled.argument == 4 * 256 * WIDTH + 3 * parameter_bytes() + 4
