"""The attached GPU: its name, and the peak of a step that runs; here the CPU stands in for it."""

from __future__ import annotations

import importlib
import os
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import remat_jax as rj
from remat_jax import compat
from remat_jax.errors import CompileError, TargetError, UnsupportedError
from remat_jax.hardware import find_attached_with, target, targets
from remat_jax.memory.compile import devices
from remat_jax.memory.compile.exporting import export_step
from remat_jax.step import TrainingStep

WIDTH, ROWS = 32, 16
FINDER = importlib.import_module("remat_jax.hardware.target")

# The real child, with an allocator that counts live arrays on the CPU, because XLA does not count there.
COUNTING = """
import runpy, sys, jax
child = runpy.run_path({child!r}, run_name="counted")
child["peak"].__globals__["stats"] = lambda device: {{
    "peak_bytes_in_use": sum(one.nbytes for one in jax.live_arrays() if one.device == device)
}}
child["main"]()
"""


@pytest.fixture
def on_the_cpu(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> pathlib.Path:
    path = tmp_path / "counting.py"
    path.write_text(COUNTING.format(child=str(devices.CHILD)))
    monkeypatch.setattr(devices, "CHILD", path)
    monkeypatch.setattr(devices, "PLATFORM", "cpu")
    return path


def program(step: Any, *structs: Any, donated: tuple[int, ...] = ()) -> Any:
    return export_step("full", TrainingStep(step, structs, donated), target("cpu"))


def test_every_gpu_has_a_name_that_jax_knows_it_by() -> None:
    kinds = {name: target(name).device_kinds for name in targets() if name != "cpu"}
    names = [kind for several in kinds.values() for kind in several]
    assert all(kinds.values()) and len(set(names)) == len(names)
    assert all(target(kind) is target(name) for name, several in kinds.items() for kind in several)
    assert target("nvidia h200") is target("h200") and target("cpu").device_kinds == ()


def test_the_attached_gpu_is_one_of_the_targets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FINDER, "_find_attached", [])
    with pytest.raises(TargetError, match="target='attached' needs remat_jax.memory"):
        target("attached")
    find_attached_with(lambda: "NVIDIA H100 80GB HBM3")
    attached, h100 = target("Attached"), target("h100")
    assert (attached.name, attached.attached, h100.attached) == ("attached", True, False)
    assert (attached.compiler_description, attached.memory_bytes) == (h100.compiler_description, h100.memory_bytes)
    find_attached_with(lambda: "NVIDIA Unheard Of")
    with pytest.raises(TargetError, match="the attached GPU is 'NVIDIA Unheard Of', but .* the names are cpu, h200"):
        target("attached")


def test_without_a_gpu_it_is_an_error_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "PLATFORM", "no such platform")
    with pytest.raises(TargetError, match=r"no GPU on this machine \(.*no such platform.*such as 'h200'"):
        target("attached")


def test_a_driver_that_hangs_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    (tmp_path / "hangs.py").write_text("import time; time.sleep(600)")
    monkeypatch.setattr(devices, "CHILD", tmp_path / "hangs.py")
    monkeypatch.setattr(devices, "SECONDS_TO_START", 0.5)
    with pytest.raises(TargetError, match="no GPU on this machine .*not done after timeout=0.5 s"):
        target("attached")


@pytest.mark.parametrize(("there", "kept"), [("/dev/nvidiactl", []), ("/dev/dxg", []), ("", [("jax_platforms", "cpu")])])
def test_jax_is_kept_to_the_cpu_where_no_gpu_is(monkeypatch: pytest.MonkeyPatch, there: str, kept: list[Any]) -> None:
    updates: list[Any] = []
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    monkeypatch.setattr(os.path, "exists", lambda path: path == there)
    monkeypatch.setattr(jax.config, "update", lambda *given: updates.append(given))
    compat.keep_to_cpu_without_gpu()
    assert updates == kept


def test_the_peak_is_that_of_the_step_alone(on_the_cpu: pathlib.Path) -> None:
    a, b = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32), jax.ShapeDtypeStruct((WIDTH, 5), jnp.float32)
    exported = program(lambda a, b: (a @ b, a * 2.0), a, b)
    kept = devices.measured_peak(exported, 60, {"xla_cpu_enable_fast_math": False})
    # The results are alive afterwards; the arguments belonged to the call.
    assert kept == 4 * (ROWS * 5 + ROWS * WIDTH)
    with pytest.raises(CompileError, match="no_such_option"):
        devices.measured_peak(exported, 60, {"no_such_option": 1})


def test_arguments_of_any_type_are_made(on_the_cpu: pathlib.Path) -> None:
    dtypes = ("int8", "int32", "bool", "float16", "bfloat16", "float64", "complex64")
    with jax.enable_x64(True):
        keys = [jax.eval_shape(lambda n=n: jax.random.split(jax.random.key(0, impl=n), 8)) for n in ("threefry2x32", "rbg")]
        one_key = jax.eval_shape(lambda: jax.random.key(0))
        structs = [jax.ShapeDtypeStruct((8,), dtype) for dtype in dtypes]
        exported = program(lambda *xs: [jnp.stack([x, x]) for x in xs], *structs, *keys, one_key)
    sizes = [jnp.dtype(dtype).itemsize for dtype in dtypes]
    assert devices.measured_peak(exported, 60) == 16 * (sum(sizes) + 8 + 16) + 2 * 8


def test_without_a_count_and_with_a_fault_there_is_no_figure(monkeypatch, on_the_cpu, tmp_path):
    exported = program(lambda x: x + 1.0, jax.ShapeDtypeStruct((4,), jnp.float32))
    lower = on_the_cpu.read_text().replace("sum(one.nbytes", "1000 - sum(one.nbytes")
    (tmp_path / "falls.py").write_text(lower)
    monkeypatch.setattr(devices, "CHILD", tmp_path / "falls.py")
    with pytest.raises(CompileError, match="target='attached': .*compiling used more device memory .1000 bytes"):
        devices.measured_peak(exported, 60)
    monkeypatch.undo()
    monkeypatch.setattr(devices, "PLATFORM", "cpu")
    with pytest.raises(CompileError, match="the allocator of cpu reports no peak"):
        devices.measured_peak(exported, 60)


def job() -> rj.Workload:
    weights = jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)
    batch = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)
    return rj.Workload(lambda w, x: (jnp.tanh(x @ w) ** 2).mean(), weights, (batch,), "*", optimizer=optax.adam(1e-3))


def test_measure_on_it_compiles_and_runs(monkeypatch: pytest.MonkeyPatch, on_the_cpu: pathlib.Path) -> None:
    monkeypatch.setattr(FINDER, "_find_attached", [lambda: "NVIDIA H200"])
    # The CPU also compiles instead of the GPU.
    cpu_like = target("attached").to_dict() | {"kind": "cpu", "compiler_description": None}
    here = type(target("cpu"))(**cpu_like)
    report = rj.measure(job(), "off", here)
    state = 4 * (3 * WIDTH * WIDTH + 1)
    assert report.measured_peak_bytes == state + 4 and report.target == "attached"
    assert "measured peak" in str(report) and report.to_dict()["measured_peak_bytes"] == state + 4
    assert rj.measure(job(), "off").measured_peak_bytes is None
    with pytest.raises(UnsupportedError, match="2 devices"):
        rj.measure(job(), "off", "2xattached")


@pytest.mark.gpu
def test_on_a_gpu_the_peak_is_what_the_compiler_says() -> None:
    weights, batch = jax.ShapeDtypeStruct((4096, 4096), jnp.float32), jax.ShapeDtypeStruct((65536, 4096), jnp.float32)
    large = rj.Workload(lambda w, x: (jnp.tanh(x @ w) ** 2).mean(), weights, (batch,), "*", optimizer=optax.adam(1e-3))
    report = rj.measure(large, "off", "attached")
    assert 0.95 * report.device_bytes <= report.measured_peak_bytes <= 1.05 * report.device_bytes + 2**26
