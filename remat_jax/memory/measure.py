"""`measure`: the memory of one training step under a policy, from XLA's compiler for the target."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import jax

from remat_jax import compat
from remat_jax.apply.replan import replan, replanned_from
from remat_jax.errors import RematError
from remat_jax.hardware import Target
from remat_jax.hardware import target as target_named
from remat_jax.memory.advice import advise, traced_products
from remat_jax.memory.compile.backends import backend_of, limit_bytes
from remat_jax.memory.compile.compiler import compile_programs
from remat_jax.memory.compile.devices import check_devices, host_shortage, measured_peak
from remat_jax.memory.compile.exporting import export_step
from remat_jax.memory.compile.options import DEFAULT_TIMEOUT, check_timeout
from remat_jax.memory.compile.process import Children
from remat_jax.memory.compile.sizes import MEMORY_ONLY, Sizes
from remat_jax.memory.receipt import receipt_of
from remat_jax.memory.report import MemoryReport
from remat_jax.memory.residuals import ResidualTable, kept_residuals, residuals
from remat_jax.policy import Action, LayerPolicies, Policy, PolicyRule, as_block_policy, is_off
from remat_jax.report.activity import activity
from remat_jax.report.tables import format_bytes
from remat_jax.step import TrainingStep
from remat_jax.warning import silenced, warn
from remat_jax.workload import Workload


def measure(
    workload: Workload,
    policy: Any,
    target: str | Target = "cpu",
    timeout: float = DEFAULT_TIMEOUT,
    *,
    memory_limit: Any = None,
    memory_only: bool = False,
) -> MemoryReport:
    """The memory of one training step of `workload` under `policy`, compiled for `target`, which need not be here.

    If the policy, or the policy of a `replan` in the loss, offloads residuals, a second step that saves them is compiled too.
    The receipt compares the two steps. For any other policy a warning says if it frees nothing: if a device has less than 1 GiB
    of arguments, the step without checkpoints (`off`) is compiled in parallel; for a larger step the warning says only that the
    policy drops few residuals. Reports are cached as long as the workload object exists. Programs compiled for a GPU or TPU are
    also cached on disk (`remat_jax.memory.compile.cache`).

    A workload with a mesh needs a target with as many devices as the mesh (`"8x8xh200"`); the report's sizes are for one
    device. On the target `"attached"`, the GPU of this machine, the step also runs once, on random numbers:
    `measured_peak_bytes` is the peak of this run.

    Args:
      policy: a policy, its name or text, a JAX policy object, policies by layer, or a mapping from block to any of these.
      target: the name of a target (`"cpu"`, `"h200"`, `"attached"`) or a `Target`.
      timeout: the limit in seconds for compiling, and for each run on an attached GPU.
      memory_limit: a device memory limit for XLA, written like a budget: bytes, a text (`"40GiB"`, `"80%"`) or a share (0.8).
        XLA rematerialises by itself to meet the limit, but the step may still need more. To run the step as it was measured,
        use `jax.jit(step, compiler_options=report.compiler_options)`. None means XLA's own limit, on a GPU about 76 % of device
        memory; a larger `memory_limit` has no effect.
      memory_only: for a TPU, end the compilation once the memory is known, usually after seconds. The time is then unknown; it
        needs the machine code, which takes minutes. A step that is refused later, such as a kernel that exceeds the memory of
        the core, is then not noticed.

    Raises:
      TargetError: the target is unknown, XLA cannot compile for it, or it is `"attached"` and this machine has no GPU.
      ArgumentError: the target and the workload's mesh differ in the number of devices; `memory_limit` is not an amount of the
        target's memory, or is given for a CPU; or `timeout` is not a positive number.
      UnsupportedError: the target has several devices, but the workload has no mesh; the workload has a mesh, but the target is
        `"attached"`; or the target's compiler is not installed.
      CompileError: the compiler failed, aborted or ran out of memory, or the timeout was over before the memory was known.
      PolicyError, BlockError, NoEffectError: the policy is invalid, or has no effect on this workload.

    >>> import jax, jax.numpy as jnp, flax.linen as nn
    >>> model = nn.Sequential([nn.Dense(8), nn.Dense(8)])
    >>> x = jax.ShapeDtypeStruct((2, 8), jnp.float32)
    >>> params = jax.eval_shape(model.init, jax.random.key(0), x)
    >>> job = Workload(lambda p, x: (model.apply(p, x) ** 2).mean(), params, (x,), blocks=nn.Dense)
    >>> measure(job, "full").argument_bytes  # two kernels, two biases, the batch
    640
    """
    options: dict[str, Any] = {"memory_limit": memory_limit, "memory_only": memory_only}
    report = measure_many(workload, [policy], target, timeout, seek_effect=True, **options)[0]
    warn(report.warnings)
    return report


def measure_many(
    workload: Workload,
    policies: Sequence[Any],
    target: str | Target = "cpu",
    timeout: float = DEFAULT_TIMEOUT,
    on_done: Callable[[str], None] | None = None,
    *,
    memory_limit: Any = None,
    memory_only: bool = False,
    seek_effect: bool = False,
) -> list[MemoryReport]:
    """`measure` for several policies, compiled in parallel. `on_done` gets each policy's text from another thread.

    Without `seek_effect` no other step is compiled to know whether a policy frees nothing. With `memory_only` no warning says
    that a time is unknown.
    """
    described = target if isinstance(target, Target) else target_named(target)
    limit = limit_bytes(memory_limit, described)
    check_devices(workload, described)
    check_timeout(timeout)
    cached = _reports.setdefault(workload, {})
    settings = (described.name, repr(described.to_dict()), compat.trace_settings(), compat.xla_flags(), limit)
    checked = [_checked(policy) for policy in policies]
    off = _checked("off")
    seek_effect = seek_effect and any(map(_is_compared, checked)) and not workload.replaced_checkpoints
    beside = [off] if seek_effect and _is_small(workload) and not described.attached else []
    new = [policy for policy in dict.fromkeys([*checked, *beside]) if (policy, settings) not in cached]
    for policy in dict.fromkeys(checked):
        if policy not in new and on_done is not None:
            on_done(_text(policy))
    known = dict(cached)
    if new:
        timed = [] if memory_only else checked
        reports = _measured(workload, new, described, timeout, on_done, limit, timed, trace_off=seek_effect and not beside)
        known.update(zip(((policy, settings) for policy in new), reports, strict=True))
        cached.update((key, report) for key, report in known.items() if not report.unfinished)
    without = known.get((off, settings))
    made = [_with_effect(known[policy, settings], None if is_off(policy) else without) for policy in checked]
    return [replace(report, no_time=MEMORY_ONLY) if memory_only and report.unfinished else report for report in made]


def _with_effect(report: MemoryReport, without: MemoryReport | None) -> MemoryReport:
    text = without_effect(report, without)
    return report if text is None else replace(report, effect_warning=text)


# The largest bytes of a device's arguments for which a second step is compiled to know whether a policy frees nothing.
_SMALL = 2**30


def _is_small(workload: Workload) -> bool:
    arguments = workload.step("off").local_arguments
    return sum(map(compat.tree_bytes, arguments)) < _SMALL


def _is_compared(policy: Any) -> bool:
    """Whether `policy` is compared with `off`: a policy that offloads has a receipt instead."""
    return not is_off(policy) and _saving_all(policy) == policy


# A policy has an effect if it frees at least this share of the residuals that it drops.
_EFFECT = 0.05


def without_effect(report: MemoryReport, without: MemoryReport | None) -> str | None:
    """A text if the policy of `report` frees nothing or almost nothing compared with `without`, the same step under `off`.

    None for a policy that offloads, whose receipt has its own warnings, and for a model with checkpoints of its own.
    """
    if without is None or report.receipt is not None or report.replaced_checkpoints:
        return None
    freed = without.device_bytes - report.device_bytes
    dropped = _dropped(report, without.residual_device_bytes)
    if freed > max(0, _EFFECT * dropped) or (dropped <= 0 and report.residual_device_bytes is not None):
        return None
    why = "the residuals that it drops are not in memory at the peak"
    if report.target == "cpu":
        why = "XLA for CPUs merges the recomputation of unrolled blocks with the forward pass; ask for a GPU or TPU target"
    elif dropped < _EFFECT * without.device_bytes:
        why = "parameters, optimizer's state and other arrays make up the peak"
    little = "nothing" if freed <= 0 else f"only {format_bytes(freed)}"
    return (
        f"policy {report.policy} frees {little} here: the step needs {format_bytes(report.device_bytes)} with it and "
        f"{format_bytes(without.device_bytes)} without checkpoints, although it drops {format_bytes(dropped)} of residuals: "
        f"{why}"
    )


def _dropped(report: MemoryReport, without: int | None) -> int:
    """Bytes of residuals on one device that the policy of `report` drops, of the bytes that are kept `without` it."""
    return ((without or 0) - (report.residual_device_bytes or 0)) // report.devices


def _drops_little(report: MemoryReport, without: ResidualTable | None) -> str | None:
    """A text if the policy of `report` drops few residuals for the size of the step, whose need under `off` is not known."""
    dropped = 0 if without is None else _dropped(report, without.device_bytes)
    if report.receipt is not None or not 0 < dropped < _EFFECT * report.device_bytes:
        return None
    return (
        f"policy {report.policy} can free little here: it drops {format_bytes(dropped)} of residuals, and the step needs "
        f"{format_bytes(report.device_bytes)}: parameters, optimizer's state and other arrays make up the peak"
    )


_reports: weakref.WeakKeyDictionary[Workload, dict[Any, MemoryReport]] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class _NothingOffloaded:
    """`policy` on a changed loss: the `replan` of this loss saves the residuals that the original `replan` offloads."""

    policy: Any


def _checked(policy: Any) -> Any:
    """A hashable policy: a mapping from block to policy becomes a tuple of its items."""
    if isinstance(policy, dict):
        return tuple((block, as_block_policy(of_block)) for block, of_block in policy.items())
    return as_block_policy(policy)


def _measured(
    workload: Workload,
    policies: Sequence[Any],
    described: Target,
    timeout: float,
    on_done: Callable[[str], None] | None,
    limit: int | None,
    timed: Sequence[Any],
    *,
    trace_off: bool,
) -> list[MemoryReport]:
    """The reports of `policies`. The times of those that are not among `timed` are not waited for."""
    baselines = [_baseline(workload, policy) for policy in policies]
    keys = _keys([each for pair in zip(policies, baselines, strict=True) for each in pair if each is not None])
    programs = {key: export_step(key, _step(workload, policy), described) for policy, key in keys.items()}
    need_times = {keys[policy] for policy in policies if policy in timed}
    with ThreadPoolExecutor(1) as pool, Children() as children:
        options: dict[str, Any] = {"timeout": timeout, "memory_limit": limit, "on_done": on_done, "children": children}
        options["is_enough"] = lambda key: key not in need_times
        compiling = pool.submit(compile_programs, list(programs.values()), described, **options)
        # Trace the losses while the steps are compiled.
        tables = [_residuals(workload, policy) for policy in policies]
        without_policy = _residuals(workload, _checked("off")) if trace_off else None
        products = traced_products(workload) if backend_of(described).models_time else ()
        with activity(f"compiling {' and '.join(programs)} for {described.name}"):
            sizes = {policy: compiling.result()[key] for policy, key in keys.items()}
    reports = []
    for policy, baseline, table in zip(policies, baselines, tables, strict=True):
        without = None if baseline is None else sizes[baseline]
        report = _report(workload, policy, table, described, sizes[policy], without)
        advice = advise(workload, sizes[policy], products, described)
        effect = None if is_off(policy) else _drops_little(report, without_policy)
        reports.append(replace(report, memory_limit=limit, advice=advice, effect_warning=effect))
    if not described.attached:
        return reports
    peaks = [measured_peak(programs[keys[policy]], timeout, sizes[policy].compiler_options) for policy in policies]
    return [replace(report, measured_peak_bytes=peak) for report, peak in zip(reports, peaks, strict=True)]


def _baseline(workload: Workload, policy: Any) -> Any:
    """A policy that saves the residuals that `policy` or a `replan` in the loss offloads; None if neither offloads any."""
    if (saving := _saving_all(policy)) != policy:
        return saving
    replanned = not isinstance(policy, tuple) and _without_replanned_offload(workload) is not None
    return _NothingOffloaded(policy) if replanned else None


def _step(workload: Workload, policy: Any) -> TrainingStep:
    if isinstance(policy, _NothingOffloaded):
        loss = _without_replanned_offload(workload)
        assert loss is not None
        return workload.with_loss(loss).step(policy.policy)
    return workload.step(_given(policy))


def _without_replanned_offload(workload: Workload) -> Callable[..., Any] | None:
    """The loss with its offloaded residuals saved; None if the loss was not made by a `replan` that offloads."""
    replanned = replanned_from(workload.own_loss) if workload.own_loss is not None else None
    if replanned is None or not _offloads(replanned[1]):
        return None
    fn, policy = replanned
    return replan(fn, _saving(policy))


def _residuals(workload: Workload, policy: Any) -> ResidualTable | None:
    """The residuals that `policy` keeps; None for a finished step that takes no gradient through its blocks, or several."""
    refused = () if workload.has_loss else (RematError,)
    # The report has the warnings that are silenced here.
    with activity(f"tracing what {_text(policy)} keeps"), silenced(), contextlib.suppress(*refused):
        # A second trace finds the recomputed residuals, which show whether the model's own checkpoints overrule the policy. The
        # second trace is needed only if the workload keeps these checkpoints.
        return (residuals if workload.own.keeps else kept_residuals)(workload, _given(policy))
    return None


def _given(policy: Any) -> Any:
    return dict(policy) if isinstance(policy, tuple) else policy


def _keys(policies: Sequence[Any]) -> dict[Any, str]:
    texts: dict[Any, str] = {}
    for policy in policies:
        if policy not in texts:
            texts[policy] = numbered(_text(policy), texts.values())
    return texts


def numbered(text: str, others: Iterable[str]) -> str:
    """`text`, with a number added if `others` has the same text, because two JAX policy objects may have the same name."""
    alike = sum(other == text or other.startswith(f"{text} (") for other in others)
    return f"{text} ({alike + 1})" if alike else text


def _offloads(policy: Any) -> bool:
    return isinstance(policy, Policy | LayerPolicies) and policy.offloads


def _saving(policy: Any) -> Any:
    """`policy` with its offloaded residuals saved. `@inputs` is dropped: a checkpoint keeps its inputs on the device anyway."""
    if not _offloads(policy):
        return policy
    if isinstance(policy, LayerPolicies):
        return policy.map(_saving)
    rules: list[PolicyRule] = []
    for rule in policy.rules:
        if rule.action is not Action.OFFLOAD:
            rules.append(rule)
        elif saved := tuple(selector for selector in rule.selectors if selector != "@inputs"):
            rules.append(PolicyRule(Action.SAVE, saved))
    return Policy(tuple(rules))


def _saving_all(policy: Any) -> Any:
    """`_saving` of a policy, or of each block's policy."""
    return tuple((block, _saving(of_block)) for block, of_block in policy) if isinstance(policy, tuple) else _saving(policy)


def policy_text(policy: Any) -> str:
    """The text that `measure_many` gives `on_done` for a policy."""
    return _text(_checked(policy))


def _text(policy: Any) -> str:
    if isinstance(policy, _NothingOffloaded):
        return f"{_text(policy.policy)}, nothing offloaded"
    if isinstance(policy, tuple):
        return ", ".join(f"{getattr(block, '__name__', block)}: {_text(of_block)}" for block, of_block in policy)
    if isinstance(policy, LayerPolicies | Policy):
        return getattr(policy, "name", "") or str(policy)
    return getattr(policy, "__name__", repr(policy))


def _report(
    workload: Workload, policy: Any, kept: ResidualTable | None, target: Target, sizes: Sizes, baseline: Sizes | None
) -> MemoryReport:
    time = sizes.time
    offers = baseline is not None or (kept is not None and kept.host_bytes > 0) or sizes.is_miscompiled
    return MemoryReport(
        workload=workload.name,
        policy=workload.policy_text(_text(policy)),
        target=target.name,
        device_bytes=sizes.device,
        temp_bytes=sizes.temp,
        host_bytes=sizes.host,
        argument_bytes=sizes.argument,
        output_bytes=sizes.output,
        alias_bytes=sizes.alias,
        residual_device_bytes=kept.device_bytes if kept else None,
        residual_host_bytes=kept.host_bytes if kept else None,
        receipt=receipt_of(sizes, baseline, kept, target) if offers else None,
        live=sizes.live,
        measured_peak_bytes=None,
        jax_version=jax.__version__,
        overlap=sizes.overlap,
        devices=target.devices,
        hosts=target.hosts,
        collectives=sizes.collectives,
        host_warning=host_shortage(sizes.host, target),
        compiler_warning=sizes.warning,
        policy_warning=kept.warning if kept else None,
        compiler_options=sizes.compiler_options,
        seconds=sizes.seconds,
        no_time=sizes.no_time,
        compute_seconds=time.compute_seconds if time else None,
        exchanges=time.exchanges if time and time.exchanges.count else None,
        untimed=time.untimed if time else (),
        assumed_rates=time.assumed if time else (),
        replaced_checkpoints=0 if is_off(policy) else workload.replaced_checkpoints,
    )
