"""Advice beyond the blocks whose change can be made here: the changed step is compiled, and the estimate becomes a figure."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from remat_jax.errors import CompileError
from remat_jax.hardware import Target
from remat_jax.memory import MemoryReport
from remat_jax.memory.advice import DONATION, DTYPE, LEAST, MICRO, MICRO_BATCHES, STATE, Advice, undonated_arguments
from remat_jax.memory.compile.compiler import compile_programs, export_step
from remat_jax.train import offload_optimizer
from remat_jax.workload import Step, Workload


def compiled_advice(
    workload: Workload, policy: Any, report: MemoryReport, target: Target, timeout: float
) -> tuple[Advice, ...]:
    """The advice of a report with what compiling says, the largest first; what comes to less than 2 % then is left out."""
    found = [_compiled(workload, policy, one, report, target, timeout) for one in report.advice]
    worth = [one for one in found if one.bytes >= LEAST * report.device_bytes]
    return tuple(sorted(worth, key=lambda one: -one.bytes))


def _compiled(workload: Workload, policy: Any, advice: Advice, report: MemoryReport, target: Target, timeout: float) -> Advice:
    step = _changed(workload, policy, advice)
    if step is None:
        return advice
    try:
        program = export_step(advice.what, step, target)
    except Exception:
        if advice.what == DTYPE:
            return advice  # the loss refuses parameters in bfloat16, with whatever error its author chose
        raise
    try:
        sizes = compile_programs([program], target, timeout=timeout)[advice.what]
    except CompileError:
        return advice  # the estimate is all that is known
    return replace(advice, bytes=report.device_bytes - sizes.device, compiled=True)


def _changed(workload: Workload, policy: Any, advice: Advice) -> Step | None:
    """The step with the change that is advised; None where only the user can make it."""
    if advice.what == MICRO:
        return workload.step(policy, micro_batches=MICRO_BATCHES)
    if advice.what == DONATION and not workload.has_loss:
        step = workload.step(policy)
        return replace(step, donate_argnums=tuple(sorted({*step.donate_argnums, *undonated_arguments(workload)})))
    if advice.what not in (STATE, DONATION, DTYPE):
        return None
    changed = copy.copy(workload)
    if advice.what == STATE:
        changed.optimizer = offload_optimizer(workload.optimizer)
    elif advice.what == DTYPE:
        changed.params = jax.tree.map(_narrow, workload.params)
    else:
        changed.donate = True
    return changed.step(policy)


def _narrow(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """The type of a parameter in bfloat16 where it is float32."""
    return leaf.update(dtype=jnp.bfloat16) if leaf.dtype == jnp.float32 else leaf
