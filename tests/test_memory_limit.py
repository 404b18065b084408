"""XLA's memory limit: its option, its effect on a compiled step, and its errors."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import optax
import pytest
from jax.sharding import PartitionSpec as P

import remat_jax as rj
from remat_jax import compat
from remat_jax.errors import ArgumentError
from remat_jax.hardware import target
from remat_jax.memory.compile import compiler
from remat_jax.memory.compile.backends import backend_of, limit_bytes
from remat_jax.memory.compile.exporting import export_step
from remat_jax.memory.compile.options import LARGEST_FACTOR, OPTION, limit_options
from remat_jax.memory.measure import measure_many
from tests.workloads import needs_gpu_compiler, perceptrons

H200 = target("h200")
MEMORY = 150_754_820_096
GIB = 2**30
ROWS, WIDTH, HIDDEN, LAYERS = 2**19, 64, 256, 6
"""A layer keeps arrays of 128 and 512 MiB; a hundredth of the device's memory is 1.4 GiB."""


def workload(rows: int = ROWS, **options: Any) -> rj.Workload:
    return perceptrons(rows, WIDTH, layers=LAYERS, **options)


@pytest.mark.parametrize("held", [0, 10 * GIB, 39 * GIB])
@pytest.mark.parametrize("limit", [1, 2 * GIB, 40 * GIB, 100 * GIB, MEMORY])
def test_the_factor_is_the_largest_within_the_limit(limit: int, held: int) -> None:
    available = MEMORY * 80 // 100 - held
    factor = limit_options(limit, H200, held).get(OPTION, LARGEST_FACTOR)
    assert 1 <= factor <= 95
    assert factor == 1 or held + available * factor // 100 <= limit
    assert factor == 95 or held + available * (factor + 1) // 100 >= limit


def test_without_a_limit_or_where_there_is_none_no_option_is_given() -> None:
    assert (
        limit_options(None, H200, 0)
        == backend_of(target("cpu")).limit_options(GIB, target("cpu"), 0)
        == limit_options(MEMORY, H200, 0)
        == {}
    )
    assert limit_options(130 * 10**9, H200, 125 * 10**9) == {}, "XLA's own limit is 0 then"


def test_what_a_step_holds_is_counted_before_it_is_compiled() -> None:
    kernels = LAYERS * (WIDTH * HIDDEN * 2 + HIDDEN + WIDTH) * 4
    rows = 128 * WIDTH * 4

    def held(**options: Any) -> int:
        return export_step("off", workload(128, **options).step("off"), H200).held_bytes

    assert held() == kernels + rows + kernels + 4, "parameters and batch; gradients and the loss"
    adam: dict[str, Any] = {"optimizer": optax.adam(1e-3)}
    assert held(**adam) == 3 * kernels + 4 + rows + 4, "what is updated reuses its buffer"
    assert held(**adam, donate=False) == 2 * (3 * kernels + 4) + rows + 4
    divided = workload(128, mesh={"data": 2}, shardings=(P(), P("data")))
    assert export_step("off", divided.step("off"), target("2xh200")).held_bytes == 2 * kernels + rows // 2 + 4


@pytest.mark.parametrize(
    ("given", "expected"), [("40GiB", 40 * GIB), ("80%", int(MEMORY * 0.8)), (0.5, MEMORY // 2), (7, 7), (None, None)]
)
def test_a_limit_is_written_as_a_budget_is(given: Any, expected: int | None) -> None:
    assert limit_bytes(given, H200) == expected


@pytest.mark.parametrize(
    ("given", "on", "message"),
    [
        (0, "h200", "memory_limit=0: expected more than 0 bytes"),
        ("lots", "h200", "memory_limit='lots': expected a number of bytes"),
        (1.5, "h200", "memory_limit=1.5: a share of memory is above 0 and at most 1"),
        ("200GiB", "h200", "memory_limit='200GiB' is 200.0 GiB, but the h200 has 140.4 GiB"),
        ("1GiB", "cpu", "memory_limit='1GiB' with target='cpu': XLA takes a memory limit only for GPUs"),
    ],
)
def test_what_is_no_limit_is_refused_before_anything_is_traced(given: Any, on: str, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        rj.measure(workload(128), "no such policy", on, memory_limit=given)


@needs_gpu_compiler
def test_the_limit_is_the_one_that_xla_says(tmp_path: Path) -> None:
    """XLA logs the bytes that its rematerialisation may use."""
    program = export_step("off", workload(128).step("off"), H200)
    path = tmp_path / "program.jaxexport"
    path.write_bytes(program.blob)
    options = limit_options(40 * GIB, H200, program.held_bytes)
    asked = {"key": "off", "path": str(path), "donated": [], "mesh": [], "compiler_options": options}
    backend = backend_of(H200)
    request = {"programs": [asked], "topology": backend.topology(H200), "folder": str(tmp_path)}
    environment = backend.environment(H200) | {"TF_CPP_MIN_LOG_LEVEL": "0", "TF_CPP_VMODULE": "hlo_rematerialization=1"}
    command = [sys.executable, "-P", str(compiler.CHILD)]
    given = json.dumps(request | {"parent": os.getpid(), "idle_seconds": 60.0})
    done = subprocess.run(command, input=given, env=environment, capture_output=True, text=True, timeout=300, check=True)
    # From JAX 0.11 on XLA compiles the fused matmuls first, each as a program of its own with a limit of its own.
    *_, logged = re.findall(r"already fits within the given memory limit \((\d+)\)", done.stderr)
    # XLA also counts the table of results: a pointer for each kernel's and bias's gradient, and for the loss.
    available = MEMORY * 80 // 100 - program.held_bytes - 8 * (4 * LAYERS + 1)
    assert int(logged) == available * options[OPTION] // 100
    assert 0 <= 40 * GIB - program.held_bytes - int(logged) < available / 100


@needs_gpu_compiler
def test_xla_recomputes_to_stay_within_the_limit() -> None:
    job = workload()
    free, full = measure_many(job, ["off", "full"], "h200")
    limited = rj.measure(job, "off", "h200", memory_limit="3GiB")
    assert (free.memory_limit, free.compiler_options) == (None, {})
    assert (limited.memory_limit, limited.compiler_options) == (3 * GIB, {OPTION: 2})
    # The layers' hidden arrays alone need 3 GiB.
    assert free.device_bytes > LAYERS * ROWS * HIDDEN * 4 == 3 * GIB > limited.device_bytes
    assert free.seconds is not None and limited.seconds is not None and full.seconds is not None
    assert free.seconds < limited.seconds, "what it recomputes takes time"
    assert limited.seconds < full.seconds or compat.JAX_VERSION >= (0, 12), "from 0.12 on XLA recomputes more here"
    assert limited.to_dict()["memory_limit"] == 3 * GIB and limited.to_dict()["compiler_options"] == {OPTION: 2}
    assert "memory limit" in str(limited) and "memory limit" not in str(free)
    # A limit above XLA's own gives the same program and the same result.
    assert rj.measure(job, "off", "h200", memory_limit="100%").device_bytes == free.device_bytes


@needs_gpu_compiler
def test_a_plan_that_fits_with_a_limit_only_has_it_in_its_compiler_options() -> None:
    job = workload()
    plan = rj.plan(job, "3GiB", "h200")
    limit = plan.budget if plan.compiler_options else None
    again = rj.measure(job, dict(plan.policies), "h200", memory_limit=limit)
    assert again.device_bytes == plan.device_bytes <= plan.budget and again.compiler_options == plan.compiler_options
    assert bool(plan.compiler_options) == any("memory limit" in note for note in plan.notes)
