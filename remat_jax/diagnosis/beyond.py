"""Replace the estimates of advice beyond the blocks by compiled figures, where the change can be made here."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from remat_jax.diagnosis.changed_products import attention_in_a_kernel, head_in_chunks, with_change
from remat_jax.errors import CompileError
from remat_jax.hardware import Target
from remat_jax.memory import MemoryReport
from remat_jax.memory.advice import (
    CHUNKS,
    DONATION,
    DTYPE,
    HEAD,
    LEAST,
    MICRO,
    MICRO_BATCHES,
    SCORES,
    STATE,
    Advice,
    undonated_arguments,
)
from remat_jax.memory.compile.compiler import compile_programs, export_step
from remat_jax.train import offload_optimizer
from remat_jax.workload import TrainingStep, Workload


def compiled_advice(
    workload: Workload, policy: Any, report: MemoryReport, target: Target, timeout: float
) -> tuple[Advice, ...]:
    """The advice of a report with compiled figures, the largest first; advice of less than 2 % is left out."""
    compiled = [_compiled(workload, policy, advice, report, target, timeout) for advice in report.advice]
    worth = [advice for advice in compiled if advice.bytes >= LEAST * report.device_bytes]
    return tuple(sorted(worth, key=lambda advice: -advice.bytes))


def _compiled(workload: Workload, policy: Any, advice: Advice, report: MemoryReport, target: Target, timeout: float) -> Advice:
    step = _changed(workload, policy, advice)
    if step is None:
        return advice
    try:
        program = export_step(advice.what, step, target)
    except Exception:  # a loss may refuse another dtype, and an attention or a head may have a form that is not rewritten
        if advice.what in (DTYPE, HEAD, SCORES):
            return advice
        raise
    try:
        sizes = compile_programs([program], target, timeout=timeout)[advice.what]
    except CompileError:
        return advice  # with its estimate
    return replace(advice, bytes=report.device_bytes - sizes.device, compiled=True)


def _changed(workload: Workload, policy: Any, advice: Advice) -> TrainingStep | None:
    """The step with the advised change; None if only the user can make it."""
    if advice.what == MICRO:
        return workload.step(policy, micro_batches=MICRO_BATCHES)
    if advice.what == DONATION and not workload.has_loss:
        step = workload.step(policy)
        return replace(step, donate_argnums=tuple(sorted({*step.donate_argnums, *undonated_arguments(workload)})))
    changed = copy.copy(workload)
    if advice.what in (HEAD, SCORES):
        if not workload.has_loss:
            return None
        change = head_in_chunks(CHUNKS) if advice.what == HEAD else attention_in_a_kernel
        changed.loss = with_change(workload, policy, change)
        return changed.step("off")
    if advice.what == STATE:
        changed.optimizer = offload_optimizer(workload.optimizer)
    elif advice.what == DTYPE:
        changed.params = jax.tree.map(
            lambda leaf: leaf.update(dtype=jnp.bfloat16) if leaf.dtype == jnp.float32 else leaf, workload.params
        )
    elif advice.what == DONATION:
        changed.donate = True
    return changed.step(policy)
