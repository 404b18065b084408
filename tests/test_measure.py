"""Compiled memory: for the CPU against this process's compiler, for an H200 against closed forms and handwritten code."""

from __future__ import annotations

import dataclasses
import importlib
import re
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest

import remat_jax as rj
from remat_jax import compat
from remat_jax.errors import ArgumentError, NoEffectError, TargetError
from remat_jax.hardware import target
from remat_jax.memory.compile.compiler import compile_programs
from remat_jax.memory.compile.exporting import export_step
from remat_jax.memory.compile.sizes import Sizes
from remat_jax.memory.measure import measure_many
from tests.workloads import Perceptron as Block
from tests.workloads import mean_square, needs_gpu_compiler, perceptrons, struct

ROWS, WIDTH, HIDDEN, LAYERS = 8192, 64, 256, 6
"""Activations of 2 and 8 MiB beside 0.13 MiB of parameters per layer."""

KERNELS = LAYERS * (WIDTH * HIDDEN * 2 + HIDDEN + WIDTH)
measure_module = importlib.import_module("remat_jax.memory.measure")


def workload(scan: bool = False, block: Any = Block, rows: int = ROWS, **options: Any) -> rj.Workload:
    return perceptrons(rows, layers=LAYERS, scanned=scan, block=block, optimizer=optax.adam(1e-3), **options)


@pytest.mark.parametrize("donate", [True, False])
def test_cpu_figures_are_those_of_this_processs_own_compiler(donate):
    job = workload(True, rows=64, donate=donate)
    step = job.step("dots")
    compiled = jax.jit(step.function, donate_argnums=step.donate_argnums).lower(*step.arguments).compile().memory_analysis()
    report = rj.measure(job, "dots")
    assert report.temp_bytes == compiled.temp_size_in_bytes > 0
    assert report.argument_bytes == compiled.argument_size_in_bytes == 4 * (3 * KERNELS + 1 + 64 * WIDTH)
    assert report.output_bytes == compiled.output_size_in_bytes
    assert report.alias_bytes == compiled.alias_size_in_bytes == (4 * (3 * KERNELS + 1) if donate else 0)
    assert report.host_bytes == 0 and report.receipt is None
    assert report.device_bytes != compiled.peak_memory_in_bytes
    assert report.residual_device_bytes == rj.residuals(job, "dots").device_bytes
    assert (report.policy, report.target, report.workload, report.jax_version) == ("dots", "cpu", "loss", jax.__version__)


def test_a_finished_step_policy_objects_and_mappings_on_the_cpu():
    job = workload(True, rows=64)

    def always(answer: bool) -> Any:
        return lambda *_, **__: answer

    first, second, mapping = measure_many(job, [always(True), always(False), {Block: "full"}])
    # Two policy objects that may print alike are two policies.
    assert second.temp_bytes < first.temp_bytes and second.temp_bytes == mapping.temp_bytes
    step = job.step("off")
    finished = rj.measure(rj.Workload.from_step(step.function, *step.arguments, blocks=Block, donate_argnums=(0, 1)), "full")
    assert finished.device_bytes == mapping.device_bytes
    assert finished.residual_device_bytes == mapping.residual_device_bytes > 0 == finished.residual_host_bytes
    forward = rj.measure(rj.Workload.from_step(job.loss, job.params, *job.batch, blocks=Block), "full")
    assert forward.residual_device_bytes is None, "it trains nothing"


def test_offload_on_the_cpu_says_that_there_is_one_memory():
    report = rj.measure(workload(True, rows=64), "offload_inputs")
    assert report.host_bytes == report.receipt.host_bytes == 0
    assert report.receipt.warnings == (
        "a CPU has one memory: offloaded arrays stay in temp, and host_bytes is 0; ask for a GPU or TPU target",
    )
    assert "offload: offered" in str(report) and "warning: a CPU has one memory" in str(report)
    assert report.to_dict()["receipt"]["offered_bytes"] == 4 * LAYERS * 64 * WIDTH


POLICIES = ("full", "offload_inputs", "dots_with_no_batch_dims", "offload_dot_with_no_batch_dims")


@pytest.fixture(scope="module")
def on_h200() -> dict[bool, dict[str, rj.MemoryReport]]:
    return {
        scan: {report.policy: report for report in measure_many(workload(scan), POLICIES, "h200")} for scan in (False, True)
    }


@needs_gpu_compiler
@pytest.mark.parametrize("scan", [False, True])
def test_h200_figures(on_h200, scan):
    reports = on_h200[scan]
    for report in reports.values():
        parts = report.argument_bytes + report.output_bytes - report.alias_bytes + report.temp_bytes
        assert report.device_bytes == parts
        assert report.argument_bytes == 4 * (3 * KERNELS + 1 + ROWS * WIDTH)
        assert report.alias_bytes == 4 * (3 * KERNELS + 1), "parameters and optimizer state are updated in place"
        assert report.measured_peak_bytes is None
    offered = {"offload_inputs": ROWS * WIDTH, "offload_dot_with_no_batch_dims": ROWS * HIDDEN}
    for policy, report in reports.items():
        host = 4 * LAYERS * offered.get(policy, 0)
        assert report.host_bytes == report.residual_host_bytes == host, policy
        assert (report.receipt is not None) == (host > 0)
    for offload, saving in (("offload_inputs", "full"), ("offload_dot_with_no_batch_dims", "dots_with_no_batch_dims")):
        receipt = reports[offload].receipt
        assert receipt.offered_bytes == receipt.host_bytes == reports[offload].host_bytes
        assert receipt.returned_bytes == reports[saving].device_bytes - reports[offload].device_bytes
        assert reports[offload].temp_bytes < reports[saving].temp_bytes
        # Offloaded bytes are freed except those in flight: two blocks of six; a scan keeps buffers for two.
        assert receipt.returned_bytes > 0.25 * receipt.host_bytes
        # Unrolled it needs no more than scanned, plus one block and the copies of another in flight.
        assert on_h200[False][offload].temp_bytes <= on_h200[True][offload].temp_bytes + 2 * receipt.host_bytes // LAYERS
        overlap = reports[offload].overlap
        assert overlap.out.bytes == overlap.back.bytes == reports[offload].host_bytes
        assert overlap.out.count == overlap.back.count == LAYERS
        # Copying a byte takes 40 times as long as computing it: some copies hide behind starts of small kernels, not all.
        assert overlap.out.seconds == pytest.approx(overlap.out.bytes / 5.5e10 + LAYERS * 5e-6)  # each copy has a latency
        assert 0 < overlap.out.covered <= overlap.out.coverable < 1
        # The step waits for uncovered copies, unless copies out and back cover each other.
        uncovered = overlap.out.seconds + overlap.back.seconds - overlap.out.covered_seconds - overlap.back.covered_seconds
        assert 0 < overlap.step_seconds - overlap.compute_seconds <= uncovered * (1 + 1e-9)
        assert reports[offload].seconds == overlap.step_seconds
        shown, data = str(reports[offload]), reports[offload].to_dict()
        assert f"covered {overlap.back.covered * 100:.1f} of {overlap.back.coverable * 100:.1f} %" in shown
        assert "estimated step" in shown and data["overlap"]["back"]["coverable"] == overlap.back.coverable
        assert reports[saving].overlap is None and reports[saving].to_dict()["overlap"] is None
        miscompiled = scan and jax.__version__ in ("0.10.2", "0.11.0")
        assert [bool(re.search("xla#46231", warning)) for warning in receipt.warnings] == [True] * miscompiled


@needs_gpu_compiler
@pytest.mark.skipif(compat.remat3() and compat.JAX_VERSION < (0, 12, 0), reason="there policies by hand are not kept to")
def test_on_an_h200_ours_costs_what_hand_written_remat_costs_and_unrolled_offload_less(on_h200):
    policies = jax.checkpoint_policies
    by_hand = {
        "full": policies.nothing_saveable,
        "dots_with_no_batch_dims": policies.dots_with_no_batch_dims_saveable,
        "offload_dot_with_no_batch_dims": policies.offload_dot_with_no_batch_dims("device", "pinned_host"),
    }
    cases = [(False, policy) for policy in by_hand] + [(True, "full"), (True, "offload_dot_with_no_batch_dims")]
    blocks = {(scan, policy): nn.remat(Block, prevent_cse=not scan, policy=by_hand[policy]) for scan, policy in cases}
    blocks["class"] = rj.remat(Block)
    steps = {str(key): workload(key[0] is True, block).step("off") for key, block in blocks.items()}
    sizes = compile_programs(
        [export_step(key, step, target("h200")) for key, step in steps.items()], target("h200"), timeout=300
    )
    for scan, policy in cases:
        ours, theirs = on_h200[scan][policy], sizes[str((scan, policy))]
        if (scan, policy) != (False, "offload_dot_with_no_batch_dims"):
            assert (ours.temp_bytes, ours.host_bytes) == (theirs.temp, theirs.host), (scan, policy)
            continue
        assert ours.host_bytes > theirs.host, "untied, most of it never reaches the host"
        assert ours.temp_bytes < 0.75 * theirs.temp
    assert sizes["class"].temp == on_h200[False]["full"].temp_bytes


class Attend(nn.Module):
    """A transformer block whose attention weights are larger than its input."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        q, k, v = (nn.Dense(WIDTH, name=name)(x) for name in "qkv")
        x = x + nn.Dense(WIDTH, name="out")(nn.softmax(q @ jnp.swapaxes(k, -1, -2)) @ v)
        return x + nn.Dense(WIDTH, name="down")(nn.relu(nn.Dense(4 * WIDTH, name="up")(x)))


@needs_gpu_compiler
def test_unrolled_offload_of_a_transformers_inputs_frees_memory():
    """With one barrier around all gradients XLA delays them to the end of the block, which then needs more than `full`."""

    job = mean_square(nn.Sequential([Attend() for _ in range(4)]), struct(16, 256, WIDTH), Attend, optimizer=optax.sgd(1e-3))
    full, offload = measure_many(job, ["full", "offload_inputs"], "h200")
    assert offload.host_bytes == 4 * 16 * 256 * WIDTH * 4
    assert offload.temp_bytes < full.temp_bytes


def test_what_did_not_happen_is_a_warning(monkeypatch):
    """The compiler's answers are made up: the test checks the receipt."""
    nothing = Sizes(**dict.fromkeys((field.name for field in dataclasses.fields(Sizes) if field.type == "int"), 0))

    def receipt(miscompiled: bool | None, version: tuple[int, ...], host: int, temp: int) -> Any:
        def answer(programs, target, **_):
            sizes = dataclasses.replace(nothing, temp=temp, host_temp=host, miscompiled=miscompiled)
            return {
                program.key: sizes if program.key == "offload_inputs" else dataclasses.replace(nothing, temp=10)
                for program in programs
            }

        monkeypatch.setattr(measure_module, "compile_programs", answer)
        monkeypatch.setattr(compat, "JAX_VERSION", version)
        return rj.measure(workload(True, rows=64), "offload_inputs", "h200").receipt

    offered = 4 * LAYERS * 64 * WIDTH
    # The compiled text decides, whatever the version.
    for version in ((0, 11, 0), (0, 12, 0)):
        assert receipt(False, version, offered, 4).warnings == ()
        (warning,) = receipt(True, version, offered, 4).warnings
        assert "gradients are silently wrong (openxla/xla#46231)" in warning and "JAX 0.11.1 or later" in warning
        assert "as the compiled step shows" in warning
    # If the text does not tell, the two known versions give a warning.
    assert receipt(None, (0, 11, 1), offered, 4).warnings == ()
    (warning,) = receipt(None, (0, 11, 0), offered, 4).warnings
    assert "this step's copies could not be checked: gradients may be silently wrong" in warning
    lost = receipt(False, (0, 10, 2), 100, 13)
    assert lost.returned_bytes == -3 and lost.warnings == (
        f"only 100 B of the {rj.report.format_bytes(offered)} offered are in host memory",
        "offload frees no device memory: the step needs 3 B more than with the offloaded arrays saved on the device",
    )


def test_wrong_arguments_are_named_before_anything_is_compiled():
    job = workload(rows=64)
    with pytest.raises(TargetError, match="target='h2000' is not a known target.*h200"):
        rj.measure(job, "full", "h2000")
    for timeout in (0, -1, True, "60", float("inf"), float("nan"), 1e30, 10**400):
        with pytest.raises(ArgumentError, match="expected a positive number of seconds"):
            rj.measure(job, "full", timeout=timeout)
    unknown = dataclasses.replace(target("h200"), name="h200-like", compiler_description=None)
    with pytest.raises(TargetError, match=r"^target='h200-like' has no compiler description.*\[h200-like\.compiler\]"):
        rj.measure(job, "full", unknown)
    with pytest.raises(NoEffectError, match="matches no residual"):
        rj.measure(job, "save: *attention*")


def test_the_same_question_is_answered_from_memory_and_another_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[list[str]] = []
    timed: dict[str, bool] = {}

    def counting(programs: Any, *args: Any, **kwargs: Any) -> Any:
        compiled.append([program.key for program in programs])
        timed.update({key: not kwargs["is_enough"](key) for key in compiled[-1]})
        return compile_programs(programs, *args, **kwargs)

    monkeypatch.setattr(measure_module, "compile_programs", counting)
    job = workload(True, rows=64)
    first = rj.measure(job, "full")
    # Whether the policy frees something is told against `off`, compiled beside it.
    assert rj.measure(job, "nothing_saveable") == first and compiled == [["full", "off"]]
    both = measure_many(job, ["dots", "full", "dots"])
    assert both[1] == first and both[0] == both[2] and compiled == [["full", "off"], ["dots"]]
    with jax.enable_x64(True):
        assert rj.measure(job, "full") == first and len(compiled) == 3
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=false")
    rj.measure(job, "full")
    rj.measure(workload(True, rows=64), "full")
    assert len(compiled) == 5
    assert timed == {"full": True, "dots": True, "off": False}, "what is only compared needs no time"
    rj.measure(job, "offload_inputs", memory_only=True)  # compared with full, which saves the same
    rj.measure(job, "offload_dot_with_no_batch_dims")
    more = {"offload_dot_with_no_batch_dims": True, "dots_with_no_batch_dims": False}
    assert timed == {"full": False, "dots": True, "off": False, "offload_inputs": False} | more


@needs_gpu_compiler
def test_a_product_that_triton_cannot_tile_is_compiled_without_triton_and_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention over 36 positions, not a power of two: XLA 0.10.2 cannot compile it without a GPU as it does with one."""
    batch, heads, length, size = 2, 2, 36, 64

    class Attention(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            value = x.reshape(batch, length, heads, size)
            query = nn.DenseGeneral((heads, size), dtype=jnp.bfloat16)(x)
            weights = jnp.einsum("bthd,bshd->bhts", query, value)
            mixed = jnp.einsum("bhts,bshd->bthd", weights, value)
            return nn.DenseGeneral(768, axis=(-2, -1), dtype=jnp.bfloat16)(mixed)

    job = mean_square(Attention(), struct(batch, length, heads * size, dtype=jnp.bfloat16), Attention)
    report = rj.measure(job, "off", "h200")
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_enable_triton_gemm=false")
    without = rj.measure(job, "off", "h200")
    assert without.compiler_warning is None and without.warnings == ()
    if jax.__version_info__ < (0, 11, 2):
        # The live buffers are those of the successful compilation.
        assert (report.device_bytes, report.live) == (without.device_bytes, without.live) and report.live
        assert "a matmul fits none of the Triton tiles" in " ".join(str(report).split())
        assert report.warnings == (report.compiler_warning,)
    else:
        assert report.device_bytes < without.device_bytes and report.compiler_warning is None


def small_job(optimizer: Any = None, rows: int = 512) -> rj.Workload:
    class Block(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            return x + nn.Dense(64)(nn.gelu(nn.Dense(256)(x)))

    return mean_square(nn.Sequential([Block() for _ in range(4)]), struct(rows, 64), Block, optimizer=optimizer)


def test_a_policy_that_frees_nothing_is_said() -> None:
    """XLA for CPUs merges the recomputation of unrolled blocks with the forward pass."""
    job = small_job()
    with pytest.warns(rj.RematWarning, match="policy full frees .* here: the step needs .* ask for a GPU or TPU target"):
        (text,) = rj.measure(job, "full", "cpu").warnings
    assert "drops 12.0 MiB of residuals" in text  # of 12.5 MiB without checkpoints
    assert rj.measure(job, "off", "cpu").warnings == () == rj.measure(job, "everything", "cpu").warnings


def test_on_a_mesh_a_device_frees_its_share_of_what_a_policy_drops() -> None:
    full = rj.measure(small_job(), "full", "cpu")
    kept = dataclasses.replace(full, policy="off", residual_device_bytes=full.residual_device_bytes + 64 * 2**20)
    freed = [dataclasses.replace(kept, device_bytes=full.device_bytes + size) for size in (2**20, 0)]
    on_64 = dataclasses.replace(full, devices=64)
    assert measure_module.without_effect(on_64, freed[0]) is None
    assert "frees nothing here" in measure_module.without_effect(on_64, freed[1])
    assert "frees only 1.0 MiB here" in measure_module.without_effect(full, freed[0])
