"""Steps compiled for TPUs that are not here: sizes against the compiler's own report, receipts, plans, meshes, refusals."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest

import remat_jax as rj
from benchmarks.tpu import compiled_apart
from remat_jax import compat
from remat_jax.errors import TargetError, UnsupportedError
from remat_jax.hardware import google, target
from remat_jax.hardware.rates import Rates
from remat_jax.memory.compile import cache, compiler, process
from remat_jax.memory.compile.backends import backend_of
from remat_jax.memory.compile.backends.tpu import TpuBackend
from remat_jax.memory.compile.exporting import export_step
from remat_jax.memory.compile.process import NotDoneError
from remat_jax.memory.measure import measure_many
from remat_jax.planning import compile_candidates
from remat_jax.planning.make_plan import leanest
from tests.small_models import Stack
from tests.workloads import mean_square, struct

LAYERS, WIDTH, ROWS = 3, 512, 2048
RESIDUAL = ROWS * WIDTH * 2
"""The bytes of a block's input."""


class Block(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        width = x.shape[-1]
        hidden = nn.gelu(nn.Dense(4 * width, dtype=jnp.bfloat16, name="up")(x))
        return x + nn.Dense(width, dtype=jnp.bfloat16, name="down")(hidden)


def job(*, scan: bool = True, rows: int = ROWS, width: int = WIDTH // 2) -> rj.Workload:
    x = struct(rows, width, dtype=jnp.bfloat16)
    return mean_square(Stack(Block, LAYERS, scan), x, Block, optimizer=optax.sgd(1e-3), name="stack")


@functools.cache
def measured() -> rj.MemoryReport:
    return rj.measure(job(width=WIDTH), "offload_inputs", "v5p")


@pytest.mark.versions
def test_sizes_are_those_of_the_compiler(tmp_path: Path) -> None:
    report, apart = measured(), compiled_apart(job(width=WIDTH), "offload_inputs", "v5p", tmp_path)
    assert (report.device_bytes, report.host_bytes) == (apart["device"], apart["host"])
    sizes = report.argument_bytes, report.output_bytes, report.alias_bytes
    assert sizes == (apart["argument"], apart["output"], apart["alias"])
    assert apart["whole"] in (None, report.device_bytes)  # newer compilers state it
    assert 0.9 < sum(buffer.nbytes for buffer in report.live) / report.device_bytes <= 1  # the rest lies between buffers


def test_scanned_offload_moves_every_byte_and_its_copies_and_cycles_are_timed() -> None:
    report = measured()
    receipt, overlap = report.receipt, report.overlap
    assert receipt is not None and overlap is not None
    assert (receipt.offered_bytes, receipt.host_bytes) == (LAYERS * RESIDUAL, LAYERS * RESIDUAL)
    assert (overlap.out.count, overlap.out.bytes, overlap.back.bytes) == (LAYERS, LAYERS * RESIDUAL, LAYERS * RESIDUAL)
    rates = Rates.of("v5p")
    seconds = LAYERS * (RESIDUAL / (rates.out_bytes_per_s or 1) + rates.copy_seconds)
    assert overlap.out.seconds == pytest.approx(seconds, rel=1e-6)

    assert report.compute_seconds is not None and not report.untimed and "flops" not in report.assumed_rates
    flops = 2 * (2 * 4 * WIDTH * WIDTH * LAYERS) * ROWS * 4  # forward, again, and twice backward
    least = flops / target("v5p").peak_flops["bfloat16"]
    assert 1 < report.compute_seconds / least < 3


def test_a_step_that_does_not_fit_has_sizes_and_the_compilers_words() -> None:
    (report,) = measure_many(job(rows=2**22), ["full"], "v5e")
    assert report.device_bytes > 16 * 2**30 > (target("v5e").memory_bytes or 0)
    assert report.seconds is None and report.no_time == "the step does not fit"
    assert any("because it does not fit: Ran out of memory" in warning for warning in report.warnings)


@pytest.mark.versions
def test_the_memory_is_known_if_the_timeout_ends_the_compilation(monkeypatch: pytest.MonkeyPatch) -> None:
    """XLA:TPU assigns the memory long before the machine code is there."""
    monkeypatch.setattr(process, "_POLL_SECONDS", 0.01)
    workload, answers, in_time = job(rows=ROWS + 8), compiler._answers, list[str]()

    def often_too_late(entries: Any, target: Any, timeout: float, folder: Path, arrived: Any, *rest: Any) -> Any:
        if in_time and in_time.pop():
            return answers(entries, target, timeout, folder, arrived, *rest)
        answers(entries, target, timeout, folder, lambda answer: None, *rest[:-1], lambda key: True)
        raise NotDoneError("the timeout was over")

    with monkeypatch.context() as patched:
        patched.setattr(compiler, "_answers", often_too_late)
        report = rj.measure(workload, "full", "v5e")
        with pytest.raises(NotDoneError):
            rj.measure(workload, "full", "cpu")
        in_time.append("the first compilation")
        timed = rj.plan(workload, "100%", "v5e")
    whole = rj.measure(workload, "full", "v5e")
    monkeypatch.setattr(compile_candidates, "_SHARE_FOR_TIMES", 0.0)
    compared = rj.plan(workload, "100%", "v5e")
    assert len(compared.tried) > 1
    assert all(point.timed for point in compared.named if point.compiled), "one has a time, so all get one"
    assert (report.device_bytes, report.live) == (whole.device_bytes, whole.live)
    assert whole.seconds and report.seconds is None and "no step time: the compilation was ended once" in report.warnings[-1]
    assert timed.timed and len(timed.tried) > 1, "the only step with a compiled time is the plan"


@pytest.mark.versions
def test_no_machine_code_is_waited_for_if_only_the_memory_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the largest batch, if `measure` is asked so, for shapes on a mesh, and in a plan if no step has a time soon."""
    monkeypatch.setattr(process, "_POLL_SECONDS", 0.01)
    monkeypatch.setattr(compile_candidates, "_SHARE_FOR_TIMES", 0.0)
    workload = job(scan=False, rows=8 * ROWS, width=WIDTH)
    least, error = leanest(workload, 2**33, target("v5e"), None)
    plan = rj.plan(workload, round(1.5 * (least or 0)), "v5e")
    assert plan.seconds and not plan.timed and len(plan.tried) > 2
    assert plan.cut_short and any("time is an estimate" in note for note in plan.notes)
    assert (dict(plan.tried)["full"], error) == (least, None)
    asked = rj.measure(workload, "full", "v5e", memory_only=True)
    assert (asked.device_bytes, asked.seconds, asked.warnings) == (least, None, ())
    slice_ = target("4xv5e")
    program = export_step("step", job().on_mesh("fsdp=4").step("full"), slice_)
    early = compiler.result_shapes(program, slice_, timeout=300)
    monkeypatch.setattr(cache, "read", lambda *_: None)
    monkeypatch.setattr(TpuBackend, "knows_memory", lambda *_: False)
    assert early == compiler.result_shapes(program, slice_, timeout=300)
    assert set(early or ()) == {(), (LAYERS, 64), (LAYERS, 256), (LAYERS, 256, 256)}, "each divided by four"


def test_files_of_the_compiler_are_read_once_the_last_is_there(tmp_path: Path) -> None:
    (tmp_path / "dump").mkdir()
    (tmp_path / "dump" / "m.x-buffer-assignment.txt").write_text("allocation 0: size 64, para", encoding="utf-8")
    assert not backend_of(target("v5e")).knows_memory(tmp_path)


def test_what_the_hardware_refuses_and_takes() -> None:
    """Unrolled offload on several chips, a limit of the compiler, and traps of GPUs."""
    v5e = target("v5e")
    backend = backend_of(v5e)
    refused = backend.refused_offload(scanned=False, nested=False, devices=4)
    assert refused is not None and "scan them" in refused.sentence
    assert backend.refused_offload(scanned=True, nested=False, devices=4) is None
    assert backend.refused_offload(scanned=True, nested=True, devices=1) is not None
    assert backend.refused_offload(scanned=False, nested=False, devices=1) is None
    assert backend.limit_options(8 * 2**30, v5e, 0) == {"xla_tpu_max_hbm_size_mib": 8192}
    assert backend.limit_options(16 * 2**30, v5e, 0) == backend.limit_options(None, v5e, 0) == {}
    assert not backend.has_gpu_flags


def test_a_plan_is_a_step_that_the_compiler_takes() -> None:
    overstated = dataclasses.replace(target("v5e"), memory_bytes=2**37)
    plan = rj.plan(job(rows=2**22), "100GiB", overstated)  # `full` needs 22 GiB, and the compiler refuses it
    assert plan.timed and plan.host_bytes > 0 and plan.device_bytes < (target("v5e").memory_bytes or 0)
    assert any(nbytes > 16 * 2**30 for _, nbytes in plan.tried)
    assert not any(word in note for note in plan.notes for word in ("Triton", "cuBLAS", "GPU"))


def test_unrolled_offload_frees_memory() -> None:
    # With 8 * ROWS the compiler of JAX 0.12 packs the same arrays so badly that nothing is left of it.
    plain, offloaded = measure_many(job(scan=False, rows=6 * ROWS), ["full", "offload_inputs"], "v5p")
    moved = LAYERS * 3 * RESIDUAL
    assert offloaded.host_bytes == moved
    assert plain.device_bytes - offloaded.device_bytes >= 0.6 * moved
    assert offloaded.overlap is not None
    assert offloaded.overlap.back.covered > 0.6 * offloaded.overlap.back.coverable


class Attention(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + nn.MultiHeadDotProductAttention(num_heads=4)(nn.LayerNorm()(x))
        return x + nn.Dense(x.shape[-1])(nn.gelu(nn.Dense(4 * x.shape[-1])(nn.LayerNorm()(x))))


@pytest.mark.parametrize("chip", ["v5e", "v5p"])
def test_unrolled_offload_adds_no_array_of_the_size_of_attentions_scores(chip: str) -> None:
    layers, x, scores = 4, struct(128, 512, 256), 128 * 4 * 512 * 512 * 4
    workload = mean_square(Stack(Attention, layers, False), x, Attention, optimizer=optax.sgd(1e-3))
    plain, offloaded = measure_many(workload, ["full", "offload_inputs"], chip, memory_only=True)
    assert offloaded.host_bytes == layers * x.size * 4
    assert [sum(array.nbytes == scores for array in report.live) for report in (plain, offloaded)] == [2, 2]


def test_a_mesh_over_two_slices() -> None:
    (report,) = measure_many(job(rows=8 * ROWS).on_mesh("data=2,fsdp=4"), ["full"], "2xv5e-4")
    assert (report.devices, report.hosts) == (8, 2)
    assert {"all-gather", "reduce-scatter", "all-reduce"} <= {each.kind for each in report.collectives or ()}
    assert report.exchanges is not None and report.seconds is not None and report.seconds >= (report.compute_seconds or 0)
    assert "network_bytes_per_s" in report.assumed_rates and not report.untimed


@pytest.mark.parametrize(
    ("name", "devices", "hosts", "slices", "shape"),
    [
        ("v5e", 1, 1, 1, (1, 1)),
        ("4xv5e", 4, 1, 1, (2, 2)),
        ("v5litepod-16", 16, 4, 1, (4, 4)),
        ("V5P:4x4x8", 128, 32, 1, (4, 4, 8)),
        ("2xv5p-128", 128, 32, 2, (4, 4, 4)),
        ("v4-64", 32, 8, 1, (2, 4, 4)),
        ("tpu7x-8", 8, 1, 1, (2, 2, 1)),
        ("2xtpu7x", 2, 1, 1, (1, 1, 1)),
        ("TPU v5 lite", 1, 1, 1, (1, 1)),
    ],
)
def test_names_of_slices(name: str, devices: int, hosts: int, slices: int, shape: tuple[int, ...]) -> None:
    described = target(name)
    assert (described.devices, described.hosts, described.slices, described.topology) == (devices, hosts, slices, shape)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("v5p-3", "is no slice of v5p, whose names count 2 cores on each chip: the slices are v5p-2, v5p-8, v5p-16"),
        ("v5e-512", "is no slice of v5e, whose names count chips: the slices are v5e-1"),
        ("v5e:3x3", "is no slice of v5e: the shapes are 1x1, 2x2, 2x4"),
        ("v5p:8x4x4", "is no slice of v5p: the shapes are"),
        ("3xv5e", "there is no slice of 3 devices; slices are 1xv5e, 4xv5e"),
        ("3x2xv5p-8", "has several readings"),
        ("v9-4", "is not a known target"),
    ],
)
def test_wrong_names_of_slices(name: str, message: str) -> None:
    with pytest.raises(TargetError, match=re.escape(message)):
        target(name)


def test_a_slice_of_a_users_chip(tmp_path: Path) -> None:
    table = (Path(google.__file__).with_name("targets.toml")).read_text(encoding="utf-8")
    start = table.index("[v5e]")
    mine = table[start : table.index("[v5p]")].replace("v5e.", "mine.").replace("[v5e]", "[mine]")
    path = tmp_path / "chips.toml"
    path.write_text(mine, encoding="utf-8")
    assert target(f"{path}:mine:4x8").devices == target(f"{path}:mine-32").devices == 32
    half = mine.replace("[mine", "[mine-4").replace('"Google TPU v5e, 16 GB"', '"half of one"')
    path.write_text(mine + half, encoding="utf-8")
    assert target(f"{path}:mine-4").description == "half of one", "an entry's own name comes first"
    path.write_text(mine.replace("axes = 2", 'axes = "2"'), encoding="utf-8")
    with pytest.raises(TargetError, match=r"\[mine.compiler\]: {'axes': '2'}"):
        target(f"{path}:mine")
    path.write_text(mine.replace('topology = "v5e"\n', ""), encoding="utf-8")
    with pytest.raises(TargetError, match=r"\[mine.compiler\]: {'topology': None}"):
        target(f"{path}:mine")


def test_a_compiler_that_is_missing_or_of_another_jax(monkeypatch: pytest.MonkeyPatch) -> None:
    xla = sys.modules["remat_jax.compat.xla"]
    monkeypatch.setattr(xla, "_libtpu_of_jax", lambda: "9.9.*")
    with pytest.raises(UnsupportedError, match=r"needs libtpu==9.9.\*: pip install 'remat-jax\[tpu-compile\]'"):
        compat.require_tpu_compiler()
    monkeypatch.setattr(xla, "_libtpu_of_jax", lambda: "0.0.4.*")
    for version, belongs in (("0.0.4", True), ("0.0.4.1", True), ("0.0.42", False), (None, True)):
        monkeypatch.setattr(xla, "_version_of", lambda package, version=version: version)
        with contextlib.nullcontext() if belongs else pytest.raises(UnsupportedError, match="does not belong"):
            compat.require_tpu_compiler()
    monkeypatch.setattr(xla.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UnsupportedError, match="XLA's TPU compiler is not installed: pip install"):
        rj.measure(job(), "full", "v5e")


@pytest.mark.parametrize(("name", "cores"), [("v4", 2), ("v5e", 1), ("v5p", 2), ("v5p-8", 2), ("v6e", 1), ("tpu7x", 1)])
def test_a_kernel_reads_the_number_of_cores_that_jax_gives_the_chip(name: str, cores: int) -> None:
    """The numbers are those of the devices of `get_topology_desc`. The error is JAX's for a kernel without a device."""
    chip, seen = target(name), []
    places: dict[str, Any] = {"mesh": {"data": 4}, "shardings": (None,)} if chip.devices > 1 else {}

    def step(x: jax.Array) -> jax.Array:
        device = jax.sharding.get_abstract_mesh().abstract_device
        if device is None and not seen:
            raise RuntimeError("specify an AbstractDevice")
        seen.extend([] if device is None else [device.num_cores])
        return x

    job = rj.Workload.from_step(step, jax.ShapeDtypeStruct((8,), jnp.float32), blocks="*", **places)
    export_step("kernel", job.step("off"), chip)
    assert set(seen) == {cores}


def test_libtpu_is_quiet_where_there_is_no_tpu(tmp_path: Path) -> None:
    environment = {
        name: value for name, value in os.environ.items() if name not in ("JAX_PLATFORMS", *google.QUIET, google.MARK)
    }
    script = "import remat_jax, jax; print(jax.devices()[0].platform)"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, check=True)
    assert (run.stdout, run.stderr) == ("cpu\n", "")
    for device, kind in (("card", "0x020000"), ("chip", "0x088000")):
        assert not google.has_tpu(tmp_path)
        (tmp_path / device).mkdir()
        (tmp_path / device / "vendor").write_text("0x1ae0\n")
        (tmp_path / device / "class").write_text(kind)
    assert google.has_tpu(tmp_path)


def test_variables_of_this_package_are_removed_where_there_is_a_tpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*google.QUIET, google.MARK):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "mine")
    google.quiet_without_tpu()
    assert os.environ["TPU_SKIP_MDS_QUERY"] == "1" and os.environ["TPU_WORKER_HOSTNAMES"] == "mine"
    monkeypatch.setattr(google, "has_tpu", lambda: True)
    google.quiet_without_tpu()
    assert os.environ.get("TPU_SKIP_MDS_QUERY") is None and os.environ["TPU_WORKER_HOSTNAMES"] == "mine"
