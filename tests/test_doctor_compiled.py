"""Traps that only compiling for a GPU shows: each is planted, found and cured. No GPU is needed."""

from __future__ import annotations

import dataclasses
import re
from types import SimpleNamespace
from typing import Any

import flax.linen as nn
import jax
import optax
import pytest

import remat_jax as rj
from remat_jax import compat
from remat_jax.apply.scope import BlockPolicies
from remat_jax.diagnosis import Diagnosis, compiled
from remat_jax.diagnosis.compiled import exposed_copies
from remat_jax.diagnosis.doctor import diagnose
from remat_jax.diagnosis.watch import observe
from remat_jax.hardware import Target, target
from remat_jax.memory.compile.sizes import Sizes
from remat_jax.report.tables import format_bytes
from tests.workloads import Perceptron, needs_gpu_compiler, perceptrons

ROWS, LAYERS = 65536, 4
PRODUCT = ROWS * 256 * 4
"""The bytes of the one product of a block that its backward pass reads."""

OFFLOAD = "offload_dot_with_no_batch_dims"


def job(block: Any = Perceptron, *, scanned: bool = False) -> rj.Workload:
    return perceptrons(ROWS, layers=LAYERS, block=block, scanned=scanned, optimizer=optax.sgd(0.1))


def traps(diagnosis: Diagnosis) -> list[str]:
    return [finding.trap for finding in diagnosis.findings]


def with_memory(nbytes: int) -> Any:
    """An H200 with another amount of memory."""
    h200 = target("h200")
    described = re.sub(r"device_memory_size: \d+", f"device_memory_size: {nbytes}", h200.compiler_description or "")
    return dataclasses.replace(h200, name="smaller", memory_bytes=nbytes, compiler_description=described)


def diagnosed(workload: rj.Workload, policy: Any, name: Any = "h200") -> Diagnosis:
    """The doctor's diagnosis without advice, which takes more compilations."""
    described = name if isinstance(name, Target) else target(name)
    return diagnose(workload, policy, described, 300, report=rj.measure(workload, policy, described))


@pytest.mark.versions
@needs_gpu_compiler
@pytest.mark.skipif(compat.remat3() and compat.JAX_VERSION < (0, 12, 0), reason="there a policy of names by hand keeps nothing")
def test_an_unrolled_offload_by_hand_leaves_most_on_the_device_and_replan_moves_it_all():
    block = nn.remat(Perceptron, policy=jax.checkpoint_policies.offload_dot_with_no_batch_dims("device", "pinned_host"))
    by_hand = job(block)
    diagnosis = rj.doctor(by_hand, "off", target="h200")
    assert traps(diagnosis) == ["offload_without_effect"] and diagnosis.target == "h200"
    receipt = rj.measure(by_hand, "off", target="h200").receipt
    assert receipt is not None and receipt.offered_bytes is not None
    host, offered = map(format_bytes, (receipt.host_bytes, receipt.offered_bytes))
    assert f"only {host} of the {offered} offered are in host memory" in diagnosis.findings[0].problem
    assert receipt.host_bytes <= receipt.offered_bytes - PRODUCT
    cured = job(block)
    cured.loss = rj.replan(cured.loss, OFFLOAD)
    assert diagnosed(cured, "off").ok
    assert rj.measure(cured, "off", target="h200").host_bytes == LAYERS * PRODUCT


@needs_gpu_compiler
def test_the_last_block_is_kept_where_nothing_hides_its_copies(monkeypatch):
    workload = job()
    diagnosis = diagnosed(workload, OFFLOAD)
    assert traps(diagnosis) == ["last_block_offloaded"] and diagnosis.findings[0].block == "layer_3"
    assert f"{format_bytes(PRODUCT)} of" in diagnosis.findings[0].problem
    cured = {"layer_3": "full", Perceptron: OFFLOAD}
    assert diagnosed(workload, cured).ok
    kept = [rj.measure(workload, policy, target="h200").host_bytes for policy in (OFFLOAD, cured)]
    assert kept[0] - kept[1] == PRODUCT
    monkeypatch.setenv("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", "0")
    assert traps(diagnosed(workload, cured)) == ["pinned_pool"]


def test_the_time_of_the_last_blocks_copies_is_bytes_over_the_link():
    observed = observe(job(), BlockPolicies.of({Perceptron: OFFLOAD}))
    path, nbytes, copying, computing = exposed_copies(observed, target("h200")) or ("", 0, 0.0, 0.0)
    assert (path, nbytes) == ("layer_3", PRODUCT)
    assert copying == 2 * PRODUCT / 63e9
    # At least the product's own traffic, at most 20 times as much: every operation of the block counts separately.
    assert 3 * PRODUCT / 4.8e12 < computing < 20 * 3 * PRODUCT / 4.8e12
    slow = dataclasses.replace(target("h200"), hbm_bytes_per_s=4.8e9)
    assert exposed_copies(observed, slow) is None
    assert exposed_copies(observe(job(scanned=True), BlockPolicies.of({Perceptron: OFFLOAD})), target("h200")) is None
    assert exposed_copies(observe(job(), BlockPolicies.of({Perceptron: "full"})), target("h200")) is None


@needs_gpu_compiler
def test_xlas_own_rematerialization_is_told_with_what_it_would_be_without():
    workload = job()
    needed = rj.measure(workload, "off", target="h200").device_bytes
    small = with_memory(int(0.8 * needed))
    diagnosis = diagnosed(workload, "off", small)
    assert traps(diagnosis) == ["xla_rematerialization"]
    recomputing = rj.measure(workload, "off", target=small).device_bytes
    assert recomputing < 0.99 * needed
    shown = f"needs {format_bytes(recomputing)} with XLA's pass and {format_bytes(needed)} without it"
    assert shown in diagnosis.findings[0].problem


def pretended(trap: Any, monkeypatch: Any, *, with_flags: int, without: int) -> list[Any]:
    """The findings of `trap` in a step of `with_flags` bytes, which would have `without` bytes without XLA_FLAGS."""
    monkeypatch.setattr(compiled, "_compiled", lambda *_: Sizes(without, 0, 0, 0, 0, 0, 0, 0))
    arguments = dict.fromkeys(("argument_bytes", "output_bytes", "alias_bytes"), 0)
    report = SimpleNamespace(residual_device_bytes=with_flags, device_bytes=with_flags, devices=1, overlap=None, **arguments)
    return list(trap(observe(job(), BlockPolicies.of({Perceptron: "full"})), report, target("h200"), 1.0))


def test_passes_that_are_already_left_out_stay_left_out(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_disable_hlo_passes='dynamic-slice-annotator,other' --xla_disable_hlo_passes=third")
    (finding,) = pretended(compiled.xla_rematerialization, monkeypatch, with_flags=100 * 2**30, without=120 * 2**30)
    assert "--xla_disable_hlo_passes=dynamic-slice-annotator,other,third,rematerialization;" in finding.remedy


def test_the_latency_hiding_scheduler_is_named_where_it_costs_memory(monkeypatch):
    """No available step costs more with the flag and gains nothing (jax#20763 was such a case), so the step is made up."""
    flag = "--xla_gpu_enable_latency_hiding_scheduler"
    for flags, without, named in (("=true", 100, False), ("=true", 80, True), (f"=true {flag}=false", 80, False)):
        monkeypatch.setenv("XLA_FLAGS", flag + flags)
        findings = pretended(compiled.latency_hiding_scheduler, monkeypatch, with_flags=100, without=without)
        assert [flag in finding.remedy for finding in findings] == [True] * named


@needs_gpu_compiler
def test_copies_that_only_the_latency_hiding_scheduler_hides(monkeypatch):
    workload = perceptrons(16384, 2048, layers=5)
    # No block follows the last block.
    policy = {"layer_4": "full", Perceptron: "offload_inputs"}
    assert diagnosed(workload, policy).ok
    diagnosis = diagnosed(workload, policy, "a100")
    assert traps(diagnosis) == ["copies_not_hidden"] and "covers 0.0 %" in diagnosis.findings[0].problem
    flag = "xla_gpu_enable_latency_hiding_scheduler"
    assert f"XLA_FLAGS=--{flag}=true" in diagnosis.findings[0].remedy
    observed, report = observe(workload, BlockPolicies.of(policy)), rj.measure(workload, policy, target="a100")
    after = compiled._compiled(observed, target("a100"), 300, {flag: True}).overlap
    before = report.overlap
    assert after.covered >= 0.95 * after.coverable
    assert after.step_seconds == pytest.approx(after.compute_seconds) and after.step_seconds < 0.9 * before.step_seconds
    monkeypatch.setenv("XLA_FLAGS", f"--{flag}=true")
    assert not list(compiled.copies_not_hidden(observed, report, target("a100"), 300))


@needs_gpu_compiler
def test_a_scanned_offload_that_this_jax_miscompiles():
    wrong = compat.JAX_VERSION in compat.SCANNED_OFFLOAD_MISCOMPILED
    assert traps(diagnosed(job(scanned=True), OFFLOAD)) == (["miscompiled_offload"] if wrong else [])
