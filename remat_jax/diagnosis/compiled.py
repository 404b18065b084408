"""Traps that show only in the compiled step, or only with the hardware's rates and memory sizes."""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Iterator
from typing import Any

from jax.extend.core import ClosedJaxpr

from remat_jax import compat
from remat_jax.core.matmuls import eqn_flops
from remat_jax.core.walk import bodies
from remat_jax.diagnosis.findings import Finding
from remat_jax.diagnosis.watch import Observed, contains_live_region, is_region
from remat_jax.hardware import Target
from remat_jax.memory import MemoryReport
from remat_jax.memory.compile.backends import backend_of
from remat_jax.memory.compile.compiler import compile_programs
from remat_jax.memory.compile.exporting import export_step
from remat_jax.memory.compile.sizes import Sizes
from remat_jax.memory.hlo.copies import Overlap
from remat_jax.memory.measure import measure, without_effect
from remat_jax.report.activity import activity
from remat_jax.report.tables import format_bytes, format_seconds

# Both passes of the code after the last block take about this many times as long as that code's forward pass.
_PASSES = 3


def exposed_copies(observed: Observed, target: Target) -> tuple[str, int, float, float] | None:
    """The last block's path and offloaded bytes, and the seconds of its copies and of the compute that could hide them.

    None if the compute is long enough, if the last block does not offload or is in a loop, if no other block offloads, or if
    a rate of the target is unknown. An array is copied to the host while the rest of its block and later code run, and must be
    back before the backward pass of its block. The compute time is overestimated: it counts the whole block and the later code,
    and assumes that nothing is fused, so that every equation reads and writes device memory.
    """
    offloading = [region for region in observed.regions if region.ours and region.offloaded]
    last = next((region for region in offloading if observed.order and observed.order[-1] in region.paths), None)
    after = _after_last_region(observed.jaxpr)
    if last is None or last.looped or after is None or sum(len(region.paths) for region in offloading) < 2:
        return None
    dtypes = [str(eqn.invars[0].aval.dtype) for eqn in last.block.jaxpr.jaxpr.eqns if eqn_flops(eqn)]
    rates = target.peak_flops
    rate = min((rates[dtype] for dtype in dtypes if dtype in rates), default=rates.get("float32"))
    if rate is None or not target.host_link_bytes_per_s or not target.hbm_bytes_per_s:
        return None
    sizes = [kept.nbytes for kept in last.offloaded]
    # Copies to the host and back overlap, but the last array is copied back only after its copy to the host has ended. This
    # array has at least the smallest size.
    copying = (sum(sizes) + min(sizes)) / target.host_link_bytes_per_s
    block = _seconds(last.block.jaxpr.jaxpr.eqns, rate, target.hbm_bytes_per_s)
    computing = block + _PASSES * _seconds(after, rate, target.hbm_bytes_per_s)
    return (observed.order[-1], sum(sizes), copying, computing) if copying > computing else None


def _after_last_region(jaxpr: ClosedJaxpr) -> list[Any] | None:
    """The equations after the last checkpointed region; None if this region is in a loop or a branch, or does not exist."""
    eqns = jaxpr.jaxpr.eqns
    for index, eqn in reversed(list(enumerate(eqns))):
        if is_region(eqn):
            return list(eqns[index + 1 :])
        if contains_live_region(eqn):
            inside = None if eqn.primitive.name in ("scan", "while", "cond") else _after_last_region(bodies(eqn)[0])
            return None if inside is None else [*inside, *eqns[index + 1 :]]
    return None


def _seconds(eqns: list[Any], flops_per_s: float, hbm_bytes_per_s: float) -> float:
    total = 0.0
    for eqn in eqns:
        inside = [_seconds(body.jaxpr.eqns, flops_per_s, hbm_bytes_per_s) for body in bodies(eqn)]
        if inside:
            total += sum(inside) * (eqn.params["length"] if eqn.primitive.name == "scan" else 1)
            continue
        traffic = compat.tree_bytes([atom.aval for atom in (*eqn.invars, *eqn.outvars) if compat.is_array(atom.aval)])
        total += max(eqn_flops(eqn) / flops_per_s, traffic / hbm_bytes_per_s)
    return total


_PINNED_POOL = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
# XLA's default limit of pinned host memory, in GiB (xla/pjrt/gpu/gpu_helpers.cc).
_PINNED_POOL_DEFAULT = 64
# Two compilations whose device memory differs by at most this share count as equal, because another instruction order alone can
# make such a difference.
_ALIKE = 0.01
# A flag's effect is reported if it exceeds this share of the step's memory or time.
_LARGE = 0.1

_SCHEDULER = "--xla_gpu_enable_latency_hiding_scheduler"
_SCHEDULER_FLAG = re.compile(_SCHEDULER + r"(?:=(\S+))?(?=\s|$)")


def compiled_traps(
    observed: Observed, report: MemoryReport, target: Target, timeout: float, ends: float = math.inf
) -> Iterator[Finding]:
    """The traps that show in the step compiled for the GPU or TPU `target`.

    Each compilation ends after `timeout` seconds, and all end at `ends` of `time.monotonic`. Raises CompileError at either.
    """

    def left() -> float:
        return max(1.0, min(timeout, ends - time.monotonic()))

    yield from offload_came_to_nothing(observed, report)
    yield from frees_nothing(observed, report, target, left())
    yield from host_memory(report)
    yield from last_block_offloaded(observed, target)
    if not backend_of(target).has_gpu_flags:
        return
    yield from pinned_pool(observed, report.host_bytes_per_host)
    yield from xla_rematerialization(observed, report, target, left())
    yield from latency_hiding_scheduler(observed, report, target, left())
    yield from copies_not_hidden(observed, report, target, left())


def offload_came_to_nothing(observed: Observed, report: MemoryReport) -> Iterator[Finding]:
    """Offloaded bytes that are not on the host, an offload that frees no device memory, and a known miscompilation."""
    receipt = report.receipt
    if receipt is None:
        return
    by_hand = any(region.offloaded for region in observed.regions if not region.ours)
    remedy = (
        "The model itself offloads with a JAX policy, and XLA delays the copies: use remat_jax.replan or checkpoint_blocks, "
        "which tie each block to its place in the schedule, or scan the layers"
        if by_hand
        else 'Use policy "full", which keeps no more on the device, or offload other residuals'
    )
    problems = []
    host_bytes = receipt.host_bytes * report.devices
    if receipt.offered_bytes is not None and host_bytes < receipt.offered_bytes:
        problems.append(
            f"only {format_bytes(host_bytes)} of the {format_bytes(receipt.offered_bytes)} offered are in host memory"
        )
    if receipt.returned_bytes is not None and receipt.returned_bytes <= 0:
        problems.append(
            f"the step needs {format_bytes(-receipt.returned_bytes)} more device memory than with the same residuals saved on "
            "the device"
        )
    for problem in problems:
        yield Finding("offload_without_effect", report.policy, "", f"compiled for {report.target}, {problem}", remedy)
    if receipt.miscompiled:
        yield Finding(
            "miscompiled_offload",
            report.policy,
            "",
            f"JAX {report.jax_version} miscompiles offload inside a scan: the backward pass reads another layer's residuals, "
            "and gradients on a GPU are silently wrong (openxla/xla#46231)",
            f"Use {compat.SCANNED_OFFLOAD_REMEDY}",
        )


def frees_nothing(observed: Observed, report: MemoryReport, target: Target, timeout: float) -> Iterator[Finding]:
    """A policy under which the compiled step needs as much device memory as without checkpoints."""
    if observed.policies is None or report.receipt is not None or report.replaced_checkpoints:
        return
    problem = without_effect(report, measure(observed.workload, "off", target, timeout, memory_only=True))
    if problem is not None:
        yield Finding(
            "frees_nothing",
            observed.workload.name,
            "",
            problem,
            'Use policy "off", which recomputes nothing, or look at report.live_table() for what occupies the memory',
        )


def pinned_pool(observed: Observed, host_bytes: int | None = None) -> Iterator[Finding]:
    """A step that needs more pinned host memory than XLA's pool has. All devices of a process share the pool.

    `host_bytes` is the host memory of the compiled step on one host. If it is None, only offloaded residuals are counted, and a
    workload on a mesh is not checked.
    """
    if host_bytes is None:
        if observed.workload.mesh is not None:
            return  # the residuals are summed over all devices, of all hosts
        host_bytes = observed.residuals.host_bytes if observed.residuals else 0
    setting = os.environ.get(_PINNED_POOL, "")
    limit = (int(setting) if setting.strip().isdigit() else _PINNED_POOL_DEFAULT) * 2**30
    if host_bytes > limit:
        yield Finding(
            "pinned_pool",
            observed.workload.name,
            "",
            f"the step needs {format_bytes(host_bytes)} of pinned host memory, but XLA's pool is limited to "
            f"{format_bytes(limit)}: the run would fail with RESOURCE_EXHAUSTED",
            f"Start with {_PINNED_POOL}={-(-host_bytes // 2**30) + 1} or more (if the host has this much memory), or offload "
            "less",
        )


def host_memory(report: MemoryReport) -> Iterator[Finding]:
    """A step that needs more host memory than a host has."""
    if report.host_warning is not None:
        problem, _, remedy = report.host_warning.rpartition(": ")
        yield Finding("host_memory", report.workload, "", problem, remedy.capitalize())


def last_block_offloaded(observed: Observed, target: Target) -> Iterator[Finding]:
    """An offload in the last block, if the code after the block is too short to hide the copies."""
    exposed = exposed_copies(observed, target)
    if exposed is not None:
        path, nbytes, copying, computing = exposed
        yield Finding(
            "last_block_offloaded",
            path,
            "",
            f"{format_bytes(nbytes)} of the last block go to the host and are needed back at once: the copies take "
            f"{format_seconds(copying)}, but at most {format_seconds(computing)} of compute can hide them (nominal rates of "
            f"{target.name})",
            f'Leave the last block out of the offload: put {{{path!r}: "full"}} before the other entries of the mapping',
        )


def xla_rematerialization(observed: Observed, report: MemoryReport, target: Target, timeout: float) -> Iterator[Finding]:
    """XLA's own rematerialization, which recomputes saved arrays if the step is too large for the device."""
    kept = (report.residual_device_bytes or 0) // report.devices
    saved_bytes = report.argument_bytes + report.output_bytes - report.alias_bytes + kept
    # The pass does not run for a step that needs far less than the device's memory, so do not compile such a step again.
    if target.memory_bytes is None or max(saved_bytes, report.device_bytes) < target.memory_bytes / 2:
        return
    passes = ",".join((*compat.disabled_passes(), "rematerialization"))
    plain = _compiled(observed, target, timeout, {"xla_disable_hlo_passes": passes}).device
    if abs(plain - report.device_bytes) > _ALIKE * plain:
        yield Finding(
            "xla_rematerialization",
            observed.workload.name,
            "",
            f"XLA recomputes more than the policy asks for: the step needs {format_bytes(report.device_bytes)} with XLA's "
            f"pass and {format_bytes(plain)} without it, on a device of {format_bytes(target.memory_bytes)}; its time and "
            "memory are not those of the policy",
            "Choose a policy that needs less, or switch the pass off: start with "
            f"XLA_FLAGS=--xla_disable_hlo_passes={passes}; a step that is too large then fails",
        )


def latency_hiding_scheduler(observed: Observed, report: MemoryReport, target: Target, timeout: float) -> Iterator[Finding]:
    """XLA's latency-hiding scheduler, enabled by a flag, if it costs memory and the step is not faster (jax#20763)."""
    settings = _SCHEDULER_FLAG.findall(compat.xla_flags())
    if not settings or settings[-1].lower() in ("false", "0"):
        return
    plain = _compiled(observed, target, timeout, {"xla_gpu_enable_latency_hiding_scheduler": False})
    if report.device_bytes > (1 + _LARGE) * plain.device and not _is_faster(report.overlap, plain.overlap):
        yield Finding(
            "latency_hiding_scheduler",
            observed.workload.name,
            "",
            f"XLA_FLAGS enables the latency-hiding scheduler: the step needs {format_bytes(report.device_bytes)} with it and "
            f"{format_bytes(plain.device)} without it",
            f"Take {_SCHEDULER}=true out of XLA_FLAGS, or scan the layers (jax#20763)",
        )


def copies_not_hidden(observed: Observed, report: MemoryReport, target: Target, timeout: float) -> Iterator[Finding]:
    """Copies for which compute waits, if XLA's latency-hiding scheduler (off by default) would hide the copies."""
    waited = report.overlap
    if waited is None or _SCHEDULER_FLAG.search(compat.xla_flags()):
        return
    # Only compiling with the latency-hiding scheduler shows whether it hides the copies. `Overlap.coverable` does not: it
    # is an upper bound for the schedule that was compiled without that scheduler.
    if waited.step_seconds - waited.compute_seconds < _LARGE * waited.step_seconds:
        return
    other = _compiled(observed, target, timeout, {"xla_gpu_enable_latency_hiding_scheduler": True})
    if other.overlap is not None and _is_faster(other.overlap, waited):
        yield Finding(
            "copies_not_hidden",
            report.policy,
            "",
            f"on {target.name} compute covers {waited.covered * 100:.1f} % of the copies' time, and with XLA's latency-hiding "
            f"scheduler {other.overlap.covered * 100:.1f} %: the step takes an estimated {format_seconds(waited.step_seconds)} "
            f"and {format_seconds(other.overlap.step_seconds)} (device: {format_bytes(report.device_bytes)} and "
            f"{format_bytes(other.device)})",
            f"Start with XLA_FLAGS={_SCHEDULER}=true where the memory allows it, and measure with it",
        )


def _is_faster(first: Overlap | None, second: Overlap | None) -> bool:
    return first is not None and second is not None and first.step_seconds < (1 - _LARGE) * second.step_seconds


def _compiled(observed: Observed, target: Target, timeout: float, options: dict[str, Any]) -> Sizes:
    """The sizes of the step, compiled with the compiler options `options`."""
    program = export_step("step", observed.workload.step(observed.policy), target)
    with activity(f"compiling the step with {' and '.join(options)} changed"):
        return compile_programs([program], target, timeout=timeout, compiler_options=options)["step"]
