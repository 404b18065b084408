"""Gradients and memory of both frameworks on a GPU. A few gradient tests run the same code on the CPU too.

On a GPU every run is a separate process: the frameworks do not share the memory, and a peak belongs to one run.
"""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.gpu import child, jax_run, torch_run
from benchmarks.gpu import modes as driver
from benchmarks.gpu.job import SMALL, Job, Size, load_arrays, make_weights, save_arrays
from remat_jax.parity import TOLERANCES, float64_error, judge

on_gpu = pytest.mark.gpu
RUNS = {"jax": jax_run.run, "torch": torch_run.run}
PLAIN = ("torch", "eager", "off")
TORCH = [("torch", "eager", mode) for mode in ("checkpoint", "offload")]
POLICIES = ("off", "checkpoint", "offload", "dots", "offload_dot_with_no_batch_dims")
JAX = [("jax", form, mode) for form in ("unrolled", "scan") for mode in POLICIES]
SECONDS = 300.0


def on_devices(cases: list[Any], on_cpu: list[Any]) -> Any:
    """The cases on the GPU, and some on the CPU, where the parity matrix covers all of them in one process."""
    parameters = [pytest.param(*case, "cpu", id="-".join((*case, "cpu"))) for case in on_cpu]
    parameters += [pytest.param(*case, "cuda", id="-".join((*case, "cuda")), marks=on_gpu) for case in cases]
    return pytest.mark.parametrize(("framework", "form", "mode", "device"), parameters)


# Activations of several gigabytes beside 0.6 GB of weights and optimizer state, so that a mode's effect is visible.
LARGE = Size(layers=8, d_model=1024, heads=8, batch=16, length=512)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("exchange")


def run(folder: Path, framework: str, form: str, mode: str, size: Size, device: str) -> dict[str, Any]:
    """One row; its gradients are in the folder under its name."""
    size_folder = folder / f"{size.dtype}-{size.layers}-{size.d_model}"
    size_folder.mkdir(exist_ok=True)
    if not (size_folder / "weights.npz").exists():
        save_arrays(size_folder / "weights.npz", make_weights(size))
    kept = f"{framework}-{form}-{mode}-{device}.npz"
    job = Job(size, form, mode, str(size_folder), keep_gradients=kept, device=device, warm_up=1, steps=1)
    if device == "cpu":
        return RUNS[framework](job) | {"gradients": size_folder / kept}
    environment = driver.JAX_ON_GPU if framework == "jax" else driver.ON_CPU
    answer = child.run_child(driver.MODULES[framework], job, SECONDS, environment)
    assert "error" not in answer, answer["error"]
    return answer | {"gradients": size_folder / kept}


@functools.cache
def gradients(folder: Path, framework: str, form: str, mode: str, dtype: str, device: str) -> dict[str, np.ndarray]:
    size = dataclasses.replace(SMALL, dtype=dtype)
    return load_arrays(run(folder, framework, form, mode, size, device)["gradients"], dtype)


def reference(folder: Path) -> dict[str, np.ndarray]:
    """PyTorch's plain gradients in float64, on the CPU."""
    return gradients(folder, *PLAIN, "float64", "cpu")


@on_devices([*JAX, *TORCH, PLAIN], [("jax", "unrolled", "offload"), TORCH[1]])
def test_every_gradient_agrees_in_float64(folder: Path, framework: str, form: str, mode: str, device: str) -> None:
    grads = gradients(folder, framework, form, mode, "float64", device)
    assert len(grads) == 12 * SMALL.layers + 4
    error, worst = float64_error(reference(folder), grads)
    assert error <= TOLERANCES["float64"].value, worst


@on_devices(JAX, [("jax", "scan", "offload")])
def test_every_gradient_passes_the_parity_rule_in_float32(
    folder: Path, framework: str, form: str, mode: str, device: str
) -> None:
    plain = gradients(folder, *PLAIN, "float32", device)
    grads = gradients(folder, framework, form, mode, "float32", device)
    assert [row for row in judge(reference(folder), grads, plain, "float32") if not row.passed] == []


@functools.cache
def memory(folder: Path, framework: str, form: str, mode: str) -> dict[str, Any]:
    return run(folder, framework, form, mode, LARGE, "cuda")


@on_gpu
@pytest.mark.parametrize(("framework", "form", "mode"), JAX)
def test_the_device_needs_what_the_compiler_says(folder: Path, framework: str, form: str, mode: str) -> None:
    row = memory(folder, framework, form, mode)
    # Above the executable's own need: the batches of the other steps, and the allocator's rounding.
    assert row["compiled_device_bytes"] * 0.95 <= row["measured_peak_bytes"]
    assert row["measured_peak_bytes"] <= row["compiled_device_bytes"] * 1.05 + 2**26


@on_gpu
@pytest.mark.parametrize("form", ["unrolled", "scan"])
def test_checkpointing_and_offload_give_device_memory_back(folder: Path, form: str) -> None:
    modes = ("off", "dots", "checkpoint", "offload", "offload_dot_with_no_batch_dims")
    rows = {mode: memory(folder, "jax", form, mode) for mode in modes}
    peak = {mode: row["measured_peak_bytes"] for mode, row in rows.items()}
    tokens_by_width = LARGE.layers * LARGE.tokens * LARGE.d_model * 2  # bytes of all blocks' inputs, bfloat16
    assert peak["checkpoint"] < peak["dots"] < peak["off"]
    assert rows["offload"]["compiled_host_bytes"] == tokens_by_width
    # In a block qkv, the output projection, up and down: (3 + 1 + 4 + 1) · d_model per token.
    assert rows["offload_dot_with_no_batch_dims"]["compiled_host_bytes"] == pytest.approx(9 * tokens_by_width, rel=0.02)
    assert peak["offload_dot_with_no_batch_dims"] < peak["dots"]
    assert rows["checkpoint"]["compiled_host_bytes"] == rows["off"]["compiled_host_bytes"] == 0


@on_gpu
def test_pytorch_gives_device_memory_back_likewise(folder: Path) -> None:
    peak = {mode: memory(folder, "torch", "eager", mode)["measured_peak_bytes"] for mode in ("off", "checkpoint", "offload")}
    inputs = LARGE.layers * LARGE.tokens * LARGE.d_model * 2
    assert peak["checkpoint"] < peak["off"] / 2
    # The recomputed block has its input on the device again, and the copy of another block may be in flight.
    assert inputs / 2 < peak["checkpoint"] - peak["offload"] <= inputs
