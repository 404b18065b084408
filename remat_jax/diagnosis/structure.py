"""Traps of misplaced checkpoints: around other checkpoints, missing in `nn.remat_scan`, or around a Python flag."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from jax.extend.core import ClosedJaxpr, JaxprEqn

from remat_jax import compat
from remat_jax.core.flow import CALLS, has
from remat_jax.core.walk import bodies
from remat_jax.diagnosis.findings import Finding, some
from remat_jax.diagnosis.watch import (
    Observed,
    Region,
    body_of,
    bytes_in_use,
    contains_live_region,
    is_region,
    is_view,
    region_equations,
)
from remat_jax.report.tables import format_bytes


def remat_scan_of_one_length(observed: Observed) -> Iterator[Finding]:
    """`nn.remat_scan` with a single length, which Flax turns into a plain scan."""
    for eqn, path in _outside_regions(observed.jaxpr, ()):
        if eqn.primitive.name == "scan" and not contains_live_region(eqn) and _made_by_remat_scan(eqn):
            length = eqn.params["length"]
            yield Finding(
                "remat_scan_of_one_length",
                "/".join(path) or "the scan",
                compat.source_line(eqn),
                f"nn.remat_scan has only one length ({length}), and with one length it applies no checkpoint: all {length} "
                "iterations save their residuals",
                "Give it two or more lengths, or put a policy on the block: remat_jax.checkpoint_blocks(loss, {Block: 'full'})",
            )


def _made_by_remat_scan(eqn: JaxprEqn) -> bool:
    traceback = eqn.source_info.traceback
    frames = traceback.frames if traceback is not None else ()
    return any(frame.function_name.startswith("remat_scan.") and "flax" in frame.file_name for frame in frames)


def _outside_regions(jaxpr: ClosedJaxpr, path: tuple[str, ...]) -> Iterator[tuple[Any, tuple[str, ...]]]:
    for eqn in jaxpr.jaxpr.eqns:
        here = path + compat.scopes(eqn)
        yield eqn, here
        if not compat.is_checkpoint(eqn) and not is_region(eqn):
            for body in bodies(eqn):
                yield from _outside_regions(body, here)


# --- nested checkpoints ---------------------------------------------------------------------------------------------------


def nested_checkpoint(observed: Observed) -> Iterator[Finding]:
    """A checkpoint that encloses all others: everything runs three times, and the peak memory is the same.

    The backward pass of the outer checkpoint first recomputes everything that the inner checkpoints save. So the outer
    checkpoint reduces memory only while the code after it runs. The trap is reported if the residuals outside the outer
    checkpoint are not larger than the largest working set of an inner checkpoint. A working set is the arrays that a body
    computes and its backward pass reads.
    """
    outermost = list(region_equations(observed.jaxpr))
    if len(outermost) != 1 or outermost[0][3]:
        return
    body = body_of(outermost[0][0])
    inner = {str(code): code for code in (body_of(eqn) for eqn, *_ in region_equations(body))}
    for region in observed.regions:
        code = region.block.jaxpr
        is_body = _steps(body) == _steps(code) and str(body.out_avals) == str(code.out_avals)
        if not inner or not is_body or _outside(observed, region) > max(map(bytes_in_use, inner.values())):
            continue
        nested, single = region.flops(), region.flops_without()
        if nested > single:
            yield region.finding(
                "nested_checkpoint",
                f"this checkpoint surrounds all others, so their blocks run three times: {nested} FLOPs per step, and "
                f"{single} without it. It does not lower the peak: its backward pass first recomputes everything that the "
                "inner checkpoints keep",
                "Remove the outer checkpoint, and keep the checkpoints of the single blocks",
            )


def _steps(jaxpr: ClosedJaxpr) -> int:
    # The function of a block copies its results (`compat.batch_axes`).
    return sum(eqn.primitive.name != "copy" for eqn in jaxpr.jaxpr.eqns)


def _outside(observed: Observed, region: Region) -> float:
    """The bytes of the residuals outside `region` that are in device memory; infinite if unknown."""
    if observed.residuals is None:
        return math.inf
    return observed.residuals.device_bytes - sum(kept.nbytes for kept in region.kept if not kept.on_host)


def overruled_policy(observed: Observed) -> Iterator[Finding]:
    """A checkpoint of the model itself that encloses blocks and drops the arrays that the workload's policy saves in them."""
    wanted = [kept for region in observed.regions if region.ours for kept in region.kept]
    wanted_bytes, names = sum(kept.nbytes for kept in wanted), {kept.name for kept in wanted}
    for region in observed.regions:
        inside = 0 if region.ours else _count_blocks(region.block.jaxpr)
        if inside and wanted_bytes and not names & {kept.name for kept in region.kept}:
            word = "policy=None, which recomputes everything in JAX" if region.policy is None else "a policy of its own"
            yield region.finding(
                "overruled_policy",
                f"the model's own checkpoint surrounds {inside} block(s) of the workload and has {word}: it keeps "
                f"{format_bytes(sum(kept.nbytes for kept in region.kept))}, but discards the {format_bytes(wanted_bytes)} or "
                f"more that the policy keeps inside ({some(sorted(names))})",
                "Leave own_checkpoints='keep' out; the policy then replaces the model's own checkpoint",
            )


def _count_blocks(jaxpr: ClosedJaxpr) -> int:
    """The number of outermost blocks in the closed `jaxpr`."""
    return sum(1 if compat.is_block(eqn) else sum(map(_count_blocks, bodies(eqn))) for eqn in jaxpr.jaxpr.eqns)


# --- flags ------------------------------------------------------------------------------------------------------------------


def traced_flag(observed: Observed) -> Iterator[Finding]:
    """A Python flag that `jax.checkpoint` traces, so that both branches of each choice on the flag are computed."""
    for eqn, path, inputs in _regions_with_flags(observed.jaxpr, set(), ()):
        body = body_of(eqn)
        for index in inputs:
            if _decides(body, {body.jaxpr.invars[index]}):
                yield Finding(
                    "traced_flag",
                    "/".join(path) or "region",
                    compat.source_line(eqn),
                    f"argument {index} of the flattened call is a Python bool, but the checkpoint traces it: both sides of "
                    "each choice that depends on it (select, cond) are computed, or stay as branches",
                    "Make it static: static_argnums of nn.remat counts self as argument 0, static_argnums of jax.checkpoint "
                    "does not; remat_jax.remat and checkpoint_blocks pass Python values on unchanged",
                )


def _regions_with_flags(
    jaxpr: ClosedJaxpr, literal: set[Any], path: tuple[str, ...]
) -> Iterator[tuple[Any, tuple[str, ...], list[int]]]:
    """Yield (equation, path, positions of the operands that are Python bools) for each of the model's own checkpoints.

    `literal` has the inputs of `jaxpr` that are literals in the program around it.
    """
    for eqn in jaxpr.jaxpr.eqns:
        here = path + compat.scopes(eqn)
        bools = [atom.aval.shape == () and str(getattr(atom.aval, "dtype", "")) == "bool" for atom in eqn.invars]
        flags = [is_bool and has(atom, literal) for atom, is_bool in zip(eqn.invars, bools, strict=True)]
        if compat.is_checkpoint(eqn) and is_region(eqn):
            yield eqn, here, [index for index, flag in enumerate(flags) if flag]
        elif eqn.primitive.name == "scan" or compat.kind(eqn) in CALLS:
            constants = compat.scan_layout(eqn)[0] if eqn.primitive.name == "scan" else len(flags)
            for body in bodies(eqn):
                inner = {var for var, flag in zip(body.jaxpr.invars[:constants], flags, strict=False) if flag}
                yield from _regions_with_flags(body, inner, here)


def _decides(jaxpr: ClosedJaxpr, flags: set[Any]) -> bool:
    """Whether one of the variables `flags` is the predicate of a select or a cond in `jaxpr`."""
    tracked = set(flags)
    for eqn in jaxpr.jaxpr.eqns:
        operands = [not hasattr(atom, "val") and atom in tracked for atom in eqn.invars]
        if not any(operands):
            continue
        if eqn.primitive.name in ("select_n", "cond") and operands[0]:
            return True
        if compat.kind(eqn) in CALLS:
            for body in bodies(eqn):
                if _decides(body, {var for var, flag in zip(body.jaxpr.invars, operands, strict=False) if flag}):
                    return True
        elif is_view(eqn, operands):
            tracked.update(eqn.outvars)
    return False
