"""The call that a user makes."""

from __future__ import annotations

from typing import Any

from remat_jax.apply.scope import BlockPolicies
from remat_jax.core.marks import name_of
from remat_jax.diagnosis.beyond import compiled_advice
from remat_jax.diagnosis.compiled import compiled_traps, pinned_pool, policy_of
from remat_jax.diagnosis.findings import Diagnosis, Finding, merged
from remat_jax.diagnosis.kept import kernel_run_again, keyless_random, parameter_kept
from remat_jax.diagnosis.policies import named_for_offload, nothing_offloaded, unmatched_name, unreached_block
from remat_jax.diagnosis.structure import nested_checkpoint, overruled_policy, remat_scan_of_one_length, traced_flag
from remat_jax.diagnosis.watch import observe
from remat_jax.errors import ArgumentError
from remat_jax.hardware import Target
from remat_jax.hardware import target as target_named
from remat_jax.memory.advice import Advice
from remat_jax.memory.compile.devices import check_devices
from remat_jax.memory.measure import DEFAULT_TIMEOUT, check_timeout, measure
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
"""What `checkpoint_blocks` refuses in a policy of the workload's: there is no step to compile then."""


@silenced()  # the findings say it
def doctor(workload: Workload, policy: Any, target: str | Target | None = None, timeout: float = DEFAULT_TIMEOUT) -> Diagnosis:
    """Name every known trap in `workload` under `policy`, where it is, what it does, and the remedy.

    | trap | what it does |
    | --- | --- |
    | `policy_none` | `None` is given for a policy: it means another thing in each place |
    | `unreached_block` | a block is never called, so its policy is nowhere |
    | `unmatched_name` | a selector, or a name in a policy of JAX's, that no residual has |
    | `named_output` | the output of a block is named for offload; the next block's input stays on the device (jax#23869) |
    | `offload_without_effect` | an offload moves nothing, fewer bytes than it offers, or frees nothing |
    | `overruled_policy` | the model's own checkpoint stands around the blocks and throws away what the policy keeps |
    | `nested_checkpoint` | one checkpoint around all others: everything runs three times and the peak is the same |
    | `remat_scan_of_one_length` | `nn.remat_scan` with one length applies no checkpoint |
    | `traced_flag` | a Python flag is traced in a checkpoint (`static_argnums` by the wrong index): both sides are computed |
    | `kernel_run_again` | flash attention's output is kept without its log-sum-exp: the kernel runs again anyway |
    | `parameter_kept` | a policy keeps copies of parameters, which are there anyway |
    | `keyless_random` | `lax.rng_uniform` is drawn again with other numbers: the gradient is wrong |
    | `pinned_pool` | more host memory than XLA's pool of pinned memory has |
    | `host_memory` | more host memory than the target's hosts have for their devices (GPU target) |
    | `last_block_offloaded` | too little follows the last block to hide its copies (GPU target) |
    | `miscompiled_offload` | this JAX reads back another layer's residuals of a scan (GPU target) |
    | `xla_rematerialization` | XLA recomputes beyond the policy, to fit the device (GPU target) |
    | `latency_hiding_scheduler` | the flag costs more memory than a tenth of the step, and gives no time (GPU target) |
    | `copies_not_hidden` | compute waits for copies that XLA's latency-hiding scheduler would hide (GPU target) |

    What the model does by itself, under `nn.remat` or `jax.checkpoint`, is looked at too, and alone with the policy `"off"`. A
    trap is named where tracing or compiling shows it, not by how code is written. Nothing is run. With a target the step is
    compiled, with a second one to compare where a trap needs it.

    With a target the diagnosis also has `advice`: changes that give back memory which no policy on the blocks reaches. An
    optimizer's state on the host, micro-batches and donation are compiled for it; the others are estimated.

    Random numbers of `jax.random` are no trap: drawn again with the same key they are the same. A `jax.checkpoint` that was
    meant to have a policy and has `None` cannot be told from one that is meant to recompute everything.

    Args:
      policy: a policy, its name or text, a policy object of JAX's, or a mapping from block to policy.
      target: a GPU to compile for, or None to trace only.
      timeout: seconds that each compilation may take.

    Raises:
      ArgumentError, PolicyError, TargetError: `workload`, `policy` or `target` is none; a target that is no GPU; a timeout
        that is no time.
      CompileError, UnsupportedError: as in `measure`, with a target.

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
    if not isinstance(workload, Workload):
        raise ArgumentError(f"workload={workload!r}: expected a remat_jax.Workload")
    check_timeout(timeout)
    described = target if target is None or isinstance(target, Target) else target_named(target)
    if described is not None and described.kind != "gpu":
        raise ArgumentError(
            f"target={described.name!r} is no GPU: the traps that compiling shows are those of GPUs; leave it out"
        )
    if described is not None:
        check_devices(workload, described)
    none = _is_none(workload, policy)
    if none:
        return Diagnosis(workload.name, "None", _name(described), merged(none), 0)
    policies, text = _policies(workload, policy)
    replaced = workload.replaced_checkpoints if policies is not None else 0
    observed = observe(workload, policies)
    found = [finding for trap in TRAPS for finding in trap(observed)]
    is_refused = policies is not None and bool(REFUSED & {one.trap for one in found})
    advice: tuple[Advice, ...] = ()
    if described is not None and not is_refused:
        found += compiled_traps(observed, described, timeout)
        asked = policy_of(observed)
        advice = compiled_advice(workload, asked, measure(workload, asked, described, timeout), described, timeout)
    else:
        found += pinned_pool(observed)
    return Diagnosis(workload.name, text, _name(described), merged(found), len(observed.regions), replaced, advice)


def _name(target: Target | None) -> str | None:
    return target.name if target is not None else None


def _is_none(workload: Workload, policy: Any) -> list[Finding]:
    entries = policy if isinstance(policy, dict) else dict.fromkeys(workload.blocks, policy)
    return [
        Finding(
            "policy_none",
            name_of(block),
            "",
            "policy=None is no policy: jax.checkpoint and nn.remat recompute everything then, others take it for none, "
            "and remat_jax refuses it",
            'Write what is meant: "full" to recompute everything, "everything" or "off" to recompute nothing',
        )
        for block, one in entries.items()
        if one is None
    ]


def _policies(workload: Workload, policy: Any) -> tuple[BlockPolicies | None, str]:
    """The policies of the blocks (None for `off`), and what they are called."""
    if isinstance(policy, dict):
        policies = workload.own.policies(policy)
        named = [f"{name_of(block)}: {_text(one)}" for block, one in policies.entries]
        return policies, ", ".join(named)
    checked = as_block_policy(policy)
    if is_off(checked):
        return None, "off"
    return workload.own.policies(dict.fromkeys(workload.blocks, checked)), _text(checked)


def _text(policy: Any) -> str:
    if isinstance(policy, LayerPolicies):
        return str(policy)
    return (policy.name or str(policy)) if isinstance(policy, Policy) else getattr(policy, "__name__", repr(policy))
