"""The checks, computed from the evidence: one function per check, each with its figure and its bound."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from remat_jax.parity import LOSS_STEPS, TOLERANCES, float64_error, judge

from .outcome import Check, Evidence
from .torch_rows import FRAMEWORK as TORCH

# Both frameworks keep the same arrays of blocks; JAX also keeps a few integers per token (indices, masks).
RESIDUAL_BYTES = 0.01
SCANNED = ("JAX Linen", "JAX NNX")


def reference_of(evidence: Sequence[Evidence], model: str) -> Evidence:
    """PyTorch without checkpointing, the reference of every other row of the model."""
    return next(one for one in evidence if (one.framework, one.model, one.mode) == (TORCH, model, "off"))


def grad_error(reference: Evidence, one: Evidence) -> float:
    """The largest relative error of a gradient in float64, norm-wise per tensor, floored by the global norm."""
    return float64_error(reference.gradients64, one.gradients64)[0]


def judged(evidence: Sequence[Evidence]) -> tuple[Check, ...]:
    """All checks, in the order of the report."""
    found = [
        gradients_in_float64(evidence),
        gradients_in_float32(evidence),
        losses_agree(evidence),
        losses_fall(evidence),
        block_executions(evidence),
        residual_bytes(evidence),
        offload_offers(evidence),
        sign_flips_are_caught(evidence),
    ]
    if any(one.host_bytes is not None for one in evidence):
        found.insert(-1, host_bytes(evidence))
    return tuple(found)


def gradients_in_float64(evidence: Sequence[Evidence]) -> Check:
    """In float64 every row has PyTorch's plain gradients."""
    errors = {one.label: grad_error(reference_of(evidence, one.model), one) for one in evidence}
    return _at_most("gradients in float64: largest relative error", errors, TOLERANCES["float64"].value)


def gradients_in_float32(evidence: Sequence[Evidence]) -> Check:
    """In float32 no row's error against float64 exceeds a few times PyTorch's own error."""
    ratios = {}
    for one in evidence:
        plain = reference_of(evidence, one.model)
        rows = judge(plain.gradients64, one.gradients32, plain.gradients32, "float32")
        ratios[one.label] = max(math.inf if row.problem else row.ratio for row in rows)
    name = "gradients in float32: largest error, as a multiple of PyTorch's"
    return _at_most(name, ratios, TOLERANCES["error_ratio"].value)


def losses_agree(evidence: Sequence[Evidence]) -> Check:
    """The training losses agree with those of plain PyTorch."""
    differences = {}
    for one in evidence:
        plain = np.array(reference_of(evidence, one.model).losses[:LOSS_STEPS])
        differences[one.label] = float(np.max(np.abs(np.array(one.losses[:LOSS_STEPS]) - plain) / np.abs(plain)))
    steps = min(LOSS_STEPS, min(len(one.losses) for one in evidence))
    return _at_most(f"losses of the first {steps} steps: largest relative difference", differences, TOLERANCES["loss"].value)


def losses_fall(evidence: Sequence[Evidence]) -> Check:
    """Every row learns; two rows that learnt nothing would agree as well."""
    ratios = {one.label: one.losses[-1] / one.losses[0] for one in evidence}
    check = _at_most("training: last loss over first loss", ratios, 1.0)
    return replace(check, holds=check.figure < 1.0)


def block_executions(evidence: Sequence[Evidence]) -> Check:
    """Every block runs as often as its mode requires."""
    wrong = {one.label: float(abs(one.block_executions - one.expected_executions)) for one in evidence}
    return _at_most("block executions: largest deviation from what the mode promises", wrong, 0.0)


def residual_bytes(evidence: Sequence[Evidence]) -> Check:
    """With checkpoint and with offload, scanned JAX keeps the same bytes as PyTorch, on the device and on the host."""
    deviations = {}
    torch_rows = {(one.model, one.mode): one for one in evidence if one.framework == TORCH}
    for one in evidence:
        plain = torch_rows.get((one.model, one.mode))
        if one.framework not in SCANNED or plain is None or one.mode == "off":
            continue
        pairs = (
            (one.residual_device_bytes, plain.residual_device_bytes),
            (one.residual_host_bytes, plain.residual_host_bytes),
        )
        deviations[one.label] = max(_deviation(ours, theirs) for ours, theirs in pairs)
    return _at_most("residual bytes, checkpoint and offload: JAX against PyTorch", deviations, RESIDUAL_BYTES)


def offload_offers(evidence: Sequence[Evidence]) -> Check:
    """Every row that must offload has bytes on the host, and no other row has."""
    wrong = {one.label: float(one.offloads != (one.residual_host_bytes > 0)) for one in evidence}
    return replace(
        _at_most("offload: rows whose residuals are not where the mode puts them", wrong, 0.0), figure=sum(wrong.values())
    )


def host_bytes(evidence: Sequence[Evidence]) -> Check:
    """Compiled for the target, the step has exactly the offered bytes on the host."""
    missing = {
        one.label: float(abs(one.host_bytes - one.residual_host_bytes)) for one in evidence if one.host_bytes is not None
    }
    return _at_most("offload, compiled for the GPU: bytes too many or too few in host memory", missing, 0.0)


def sign_flips_are_caught(evidence: Sequence[Evidence]) -> Check:
    """A negative control: with the sign of a single gradient flipped, both gradient checks must fail."""
    plain = reference_of(evidence, evidence[0].model)
    one = next(one for one in evidence if one.framework != TORCH and one.model == plain.model)
    missed = [
        name
        for name in _telling(one)
        for check in (gradients_in_float64, gradients_in_float32)
        if check([plain, flipped(one, name)]).holds
    ]
    count = len(_telling(one))
    return Check(
        "control: gradients with the sign flipped that go unnoticed",
        float(len(missed)),
        0.0,
        not missed,
        ", ".join(missed) or f"{count} tensors, one at a time, by both gradient checks",
    )


def flipped(one: Evidence, name: str) -> Evidence:
    """`one` with the sign of the gradient `name` flipped."""
    gradients64 = {**one.gradients64, name: -one.gradients64[name]}
    gradients32 = {**one.gradients32, name: -one.gradients32[name]}
    return replace(one, gradients64=gradients64, gradients32=gradients32)


def _telling(one: Evidence) -> list[str]:
    """The gradients with the largest, the smallest and a middle norm."""
    ranked = sorted(one.gradients64, key=lambda name: float(np.linalg.norm(one.gradients64[name])))
    return list(dict.fromkeys((ranked[0], ranked[len(ranked) // 2], ranked[-1])))


def _at_most(name: str, figures: dict[str, float], bound: float) -> Check:
    """The worst of `figures` against `bound`; NaN is the worst figure, and without figures the check fails."""
    if not figures:
        return Check(name, math.inf, bound, False, "nothing to check")
    where = max(figures, key=lambda label: math.inf if math.isnan(figures[label]) else figures[label])
    detail = f"all {len(figures)} rows" if len(figures) > 1 and not any(figures.values()) else where
    return Check(name, figures[where], bound, figures[where] <= bound, detail)


def _deviation(ours: int, theirs: int) -> float:
    if theirs == 0:
        return 0.0 if ours == 0 else math.inf
    return abs(ours - theirs) / theirs
