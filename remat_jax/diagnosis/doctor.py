"""The public function `doctor`."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from remat_jax.apply.scope import BlockPolicies
from remat_jax.core.marks import name_of
from remat_jax.diagnosis.beyond import compiled_advice
from remat_jax.diagnosis.compiled import compiled_traps, pinned_pool
from remat_jax.diagnosis.findings import Diagnosis, Finding, merged
from remat_jax.diagnosis.policies import (
    kernel_run_again,
    keyless_random,
    named_for_offload,
    nothing_offloaded,
    parameter_kept,
    unmatched_name,
    unreached_block,
)
from remat_jax.diagnosis.structure import nested_checkpoint, overruled_policy, remat_scan_of_one_length, traced_flag
from remat_jax.diagnosis.watch import observe
from remat_jax.errors import ArgumentError, CompileError
from remat_jax.hardware import Target
from remat_jax.hardware import target as target_named
from remat_jax.memory import MemoryReport
from remat_jax.memory.advice import Advice
from remat_jax.memory.compile.backends import backend_of
from remat_jax.memory.compile.devices import check_devices
from remat_jax.memory.compile.options import DEFAULT_TIMEOUT, check_timeout
from remat_jax.memory.measure import measure
from remat_jax.policy import LayerPolicies, Policy, as_block_policy, is_off
from remat_jax.warning import silenced
from remat_jax.workload import Workload

TRAPS = (
    unreached_block,
    unmatched_name,
    named_for_offload,
    nothing_offloaded,
    overruled_policy,
    nested_checkpoint,
    remat_scan_of_one_length,
    traced_flag,
    kernel_run_again,
    parameter_kept,
    keyless_random,
)

REFUSED = frozenset({"unmatched_name", "unreached_block", "offload_without_effect", "named_output"})
"""`checkpoint_blocks` raises for a policy with one of these traps, so there is no step to compile."""


@silenced()  # the findings repeat the warnings
def doctor(workload: Workload, policy: Any, target: str | Target | None = None, timeout: float = DEFAULT_TIMEOUT) -> Diagnosis:
    """Find every known trap in `workload` under `policy`: its place, its effect and its remedy.

    | trap | what it does |
    | --- | --- |
    | `policy_none` | the policy is `None`, which means different things in JAX's and other APIs |
    | `unreached_block` | a block is never called, so its policy has no effect |
    | `unmatched_name` | a selector, or a name in one of JAX's policies, matches no residual |
    | `named_output` | a block's output is named for offload, but stays on the device as the next block's input (jax#23869) |
    | `offload_without_effect` | an offload moves no bytes, or fewer than it offers, or frees no device memory |
    | `overruled_policy` | the model's own checkpoint encloses the blocks and drops the arrays that the policy saves |
    | `nested_checkpoint` | a checkpoint encloses all others: everything runs three times, and the peak memory is the same |
    | `remat_scan_of_one_length` | `nn.remat_scan` with one length applies no checkpoint |
    | `traced_flag` | a checkpoint traces a Python flag (wrong index in `static_argnums`): both branches are computed |
    | `kernel_run_again` | flash attention's output is saved without its log-sum-exp: the kernel runs again anyway |
    | `parameter_kept` | a policy saves copies of parameters, which are on the device anyway, without naming them |
    | `keyless_random` | recomputing `lax.rng_uniform` draws different numbers: the gradient is wrong |
    | `frees_nothing` | the step needs as much device memory as without checkpoints (GPU or TPU target) |
    | `pinned_pool` | the step needs more host memory than XLA's pool of pinned memory has |
    | `host_memory` | the devices of a host need more host memory than the host has (GPU or TPU target) |
    | `last_block_offloaded` | the code after the last block is too short to hide the block's copies (GPU or TPU target) |
    | `miscompiled_offload` | this version of JAX reads the residuals of the wrong layer of a scan (GPU target) |
    | `xla_rematerialization` | XLA recomputes more than the policy asks for, to fit the device (GPU target) |
    | `latency_hiding_scheduler` | XLA's flag adds over 10 % memory, and the step is under 10 % faster (GPU target) |
    | `copies_not_hidden` | compute waits for copies that XLA's latency-hiding scheduler would hide (GPU target) |

    The model's own checkpoints (`nn.remat`, `jax.checkpoint`) are examined too; the policy `"off"` examines only these. The
    step is traced, and compiled if there is a target, but never run. A `jax.checkpoint` without a policy is no trap: it may
    deliberately recompute everything.

    With a target the diagnosis also has `advice`: changes that reduce memory where policies on the blocks cannot. `doctor`
    compiles the step with each change if it can; otherwise the reduction is an estimate, and `Advice.compiled` is False.

    Args:
      policy: a policy, its name or text, a JAX policy object, or a dict that maps each block to its policy.
      target: a GPU or TPU to compile for, or None to trace only.
      timeout: seconds that each compilation may take.

    Raises:
      ArgumentError, PolicyError, TargetError: `workload`, `policy`, `target` or `timeout` is invalid, or the target is a CPU.
      CompileError, UnsupportedError: as in `measure`; only with a target.

    >>> import jax, jax.numpy as jnp, flax.linen as nn
    >>> model = nn.Sequential([nn.Dense(8), nn.Dense(8)])
    >>> x = jax.ShapeDtypeStruct((2, 8), jnp.float32)
    >>> params = jax.eval_shape(model.init, jax.random.key(0), x)
    >>> job = Workload(lambda p, x: (model.apply(p, x) ** 2).mean(), params, (x,), blocks=nn.Dense)
    >>> doctor(job, "full").ok
    True
    >>> [finding.trap for finding in doctor(job, "save: attention_out").findings]
    ['unmatched_name']
    """
    return diagnose(workload, policy, checked_target(workload, target, timeout), timeout)


def checked_target(workload: Workload, target: str | Target | None, timeout: float) -> Target | None:
    """The target of `doctor`, after a check of its arguments."""
    if not isinstance(workload, Workload):
        raise ArgumentError(f"workload={workload!r}: expected a remat_jax.Workload")
    check_timeout(timeout)
    described = target if target is None or isinstance(target, Target) else target_named(target)
    if described is not None and not backend_of(described).models_time:
        raise ArgumentError(
            f"target={described.name!r} is not a GPU or TPU: compiling shows traps only for these; leave target out"
        )
    if described is not None:
        check_devices(workload, described)
    return described


@silenced()
def diagnose(
    workload: Workload,
    policy: Any,
    target: Target | None,
    timeout: float,
    *,
    name: str | None = None,
    report: MemoryReport | None = None,
    ends: float = math.inf,
) -> Diagnosis:
    """`doctor` for checked arguments. The diagnosis calls the policy `name`, by default its text.

    With `report`, the measurement of the step, the diagnosis has no advice. The compilations then end at `ends` of
    `time.monotonic`, and `cut_short` says whether they were all done.
    """
    target_name = None if target is None else target.name
    undefined = _undefined(workload, policy)
    if undefined:
        return Diagnosis(workload.name, "None", target_name, merged(undefined), 0)
    policies, text = _policies(workload, policy)
    text = name or text
    replaced = workload.replaced_checkpoints if policies is not None else 0
    observed = observe(workload, policies)
    findings = [finding for trap in TRAPS for finding in trap(observed)]
    is_refused = policies is not None and bool(REFUSED & {finding.trap for finding in findings})
    advice: tuple[Advice, ...] = ()
    cut_short = False
    if target is None or is_refused:
        findings += pinned_pool(observed)
    elif report is None:
        measured = measure(workload, observed.policy, target, timeout)
        measured = replace(measured, policy=name or measured.policy)
        findings += compiled_traps(observed, measured, target, timeout)
        advice = compiled_advice(workload, observed.policy, measured, target, timeout)
    else:
        try:
            for finding in compiled_traps(observed, report, target, timeout, ends):
                findings.append(finding)
        except CompileError:
            cut_short = True
    return Diagnosis(workload.name, text, target_name, merged(findings), len(observed.regions), replaced, advice, cut_short)


def _undefined(workload: Workload, policy: Any) -> list[Finding]:
    if policy is not None and not isinstance(policy, dict):
        return []
    by_block = dict.fromkeys(workload.blocks) if policy is None else policy
    return [
        Finding(
            "policy_none",
            name_of(block),
            "",
            "policy=None is ambiguous: jax.checkpoint and nn.remat then recompute everything, other libraries use no "
            "checkpoint, and remat_jax refuses it",
            'Write "full" to recompute everything, "everything" or "off" to recompute nothing',
        )
        for block, block_policy in by_block.items()
        if block_policy is None
    ]


def _policies(workload: Workload, policy: Any) -> tuple[BlockPolicies | None, str]:
    """The policies of the blocks (None for `off`), and a text that names them in the diagnosis."""
    if isinstance(policy, dict):
        policies = workload.own.policies(policy)
        return policies, ", ".join(f"{name_of(block)}: {_text(block_policy)}" for block, block_policy in policies.entries)
    checked = as_block_policy(policy)
    if is_off(checked):
        return None, "off"
    return workload.own.policies(dict.fromkeys(workload.blocks, checked)), _text(checked)


def _text(policy: Any) -> str:
    if isinstance(policy, LayerPolicies):
        return str(policy)
    return (policy.name or str(policy)) if isinstance(policy, Policy) else getattr(policy, "__name__", repr(policy))
