"""The verdicts of a comparison: a row for every tensor, and checks of the whole comparison, such as planted faults."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from remat_jax.parity.case import Arrays, Run
from remat_jax.parity.report_data import Check, TensorRow
from remat_jax.parity.rule import Tensors, float64_errors, global_norm, judge, norm, problem_of
from remat_jax.parity.tolerances import TOLERANCES
from remat_jax.parity.trees import is_floating
from remat_jax.porting.auto.propose import Proposal

_FULL = (None, "highest", "float32")
_NAMED = 6
"""The largest number of tensors that a message names."""
_SAME = 1e-9
"""The relative difference up to which `statistics_check` accepts a fit, or counts a factor as 1."""
_FAULTS = {"sign": -1, "doubled": 2}
"""Planted faults: name → the factor by which a gradient is multiplied."""


def verdicts(
    reference: Tensors, candidate: Tensors, yardstick: Tensors, dtype: str, limit: str = "float64"
) -> dict[str, tuple[float, str]]:
    """Tensor name → (figure, why the tensor fails); the reason is "" if the tensor passes.

    In float64 the figure is the relative error, and `TOLERANCES[limit]` its limit. In other dtypes the figure is `Row.ratio`
    of `judge`, and `yardstick` has PyTorch's tensors in `dtype`.
    """
    figures = {}
    if dtype == "float64":
        for name, error in float64_errors(reference, candidate).items():
            problem = ""
            if not error <= TOLERANCES[limit].value:
                problem = problem_of(name, dtype, reference, JAX=candidate) or f"{error:.1e} off in float64"
            figures[name] = error, problem
    else:
        for row in judge(reference, candidate, yardstick, dtype):
            problem = row.problem or f"{row.ratio:.1f} times PyTorch's error in {dtype}"
            figures[row.name] = row.ratio, "" if row.passed else problem
    return figures


class Ledger:
    """Collects a row for every tensor, with its verdicts in all dtypes and modes."""

    def __init__(self) -> None:
        self.rows: dict[tuple[str, str], TensorRow] = {}

    def enter(self, kind: str, reference: Tensors, candidate: Tensors, yardstick: Tensors, dtype: str, mode: str) -> None:
        """Judge all tensors of one kind (`TensorRow.kind`) of a Flax run."""
        if not reference and not candidate:
            return
        limit = "float64_step" if kind == "update" else "float64"
        for name, (figure, problem) in verdicts(reference, candidate, yardstick, dtype, limit).items():
            row = self.rows.setdefault((kind, name), TensorRow(kind, name))
            if row.norm is None and name in reference:
                row.shape, row.norm = tuple(np.shape(reference[name])), norm(reference[name])
            figures = row.errors if dtype == "float64" else row.ratios.setdefault(dtype, {})
            figures[mode] = figure
            if problem:
                row.fail(problem, mode)

    def plant(self, reference: Tensors, yardstick: Tensors, dtype: str) -> Check:
        """Check that a sign flip and a doubling are detected in every gradient that is large enough (`_large`).

        The faults are planted in PyTorch's gradients, because a flip could make a wrong Flax gradient right.
        """
        caught: dict[str, dict[str, bool]] = {}
        for fault, factor in _FAULTS.items():
            # The dtype stays the same: a changed dtype would fail for a different reason.
            wrong = {name: np.asarray(x) * np.asarray(x).dtype.type(factor) for name, x in yardstick.items()}
            judged = verdicts(reference, wrong, yardstick, dtype)
            caught[fault] = {name: bool(problem) for name, (_, problem) in judged.items()}
        both = {name: all(by_name[name] for by_name in caught.values()) for name in caught["sign"]}
        for name, is_caught in both.items():
            if ("gradient", name) in self.rows:
                self.rows["gradient", name].caught[dtype] = is_caught
        missed, large = [name for name, is_caught in both.items() if not is_caught], _large(reference, yardstick, dtype)
        missed_large = [name for name in missed if name in large]
        if missed_large:
            note = f"; not found, although large enough: {_several(missed_large)}"
        elif not large:
            note = "; no gradient is large enough"
        else:
            note = f"; too small to tell: {_several(missed)}" if missed else ""
        counts = ", ".join(f"{fault}: {sum(by_name.values())} of {len(both)} found" for fault, by_name in caught.items())
        return Check(f"planted faults in {dtype}", bool(large) and not missed_large, f"gradients, {counts}{note}")


def _large(reference: Tensors, yardstick: Tensors, dtype: str) -> set[str]:
    """The names of tensors whose norm is over twice the permitted error, so that a sign flip or a doubling must fail."""
    if dtype == "float64":
        limit = TOLERANCES["float64"].value * global_norm(reference)
        return {name for name, x in reference.items() if norm(x) > 2 * limit}
    rows = judge(reference, yardstick, yardstick, dtype)
    return {row.name for row in rows if row.name in reference and norm(reference[row.name]) > 2 * row.bound}


def map_check(proposal: Proposal) -> Check:
    """Check that the weight map is proven, and is not unusual."""
    wrong = proposal.problem or proposal.fault_text or ""
    found = wrong or "found from names and shapes, and proved by running both models"
    return Check("weight map", not wrong, "; ".join((found, *proposal.notes)))


def precision_check() -> Check:
    """Check that both frameworks multiply matrices in full precision: TF32 or autocast would dominate the errors."""
    import torch

    wrong, chosen = [], torch.get_float32_matmul_precision()
    if chosen != "highest":
        wrong.append(f"PyTorch multiplies float32 at {chosen!r}: call torch.set_float32_matmul_precision('highest')")
    if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
        wrong.append("PyTorch's autocast is on: switch it off, and name the dtype in dtypes")
    if jax.config.jax_default_matmul_precision not in _FULL:
        wrong.append(
            f"jax_default_matmul_precision is {jax.config.jax_default_matmul_precision!r}: set it to 'highest' or None"
        )
    return Check("precision", not wrong, "; ".join(wrong) or "both multiply in full precision")


def gradients_check(reference: Run, unused: Sequence[str], elsewhere: Callable[[Sequence[str]], tuple[set[str], str]]) -> Check:
    """Check that no gradient is 0 in PyTorch, because a gradient that is 0 in both frameworks proves nothing.

    `elsewhere(names)` gets the names of gradients that are 0 with the model's own weights. It gives both models random weights
    and compares these gradients again. It returns the names whose gradients are then equal and not 0, and a text that names
    the tensor that differs.
    """
    everything = {**reference.outputs, **reference.gradients}
    spoilt = [name for name, x in everything.items() if x.dtype.kind == "f" and not np.isfinite(x).all()]
    if spoilt:
        return Check("gradients", False, f"not finite in PyTorch, so they prove nothing: {_several(spoilt)}")
    zero = [name for name, x in reference.gradients.items() if not np.any(x)]
    total = len(reference.gradients)
    if len(zero) == total:
        text = "every gradient is 0 in PyTorch: the loss depends on no parameter, so the comparison proves nothing"
        return Check("gradients", False, text)
    agreeing, wrong = elsewhere(zero) if zero else (set(), "")
    unproven = [name for name in zero if name not in agreeing]
    if unproven:
        remedy = "use them in the inputs and the loss, or freeze them (requires_grad=False)"
        wrong = f"; with random weights, {wrong}" if wrong else ""
        return Check("gradients", False, f"gradients of 0 in PyTorch prove nothing about {_several(unproven)}{wrong}; {remedy}")
    aside = f"; unused by both, not compared: {_several(unused)}" if unused else ""
    none = f"0 with these weights, and equal with random ones: {_several(zero)}" if zero else "none with a gradient of 0"
    return Check("gradients", True, f"{total} parameters, {none}{aside}")


def statistics_check(before: Mapping[str, Any], reference: Arrays, candidate: Arrays) -> list[Check]:
    """Explain running statistics that differ only in the momentum, or in whether the batch variance is unbiased.

    A step moves statistics s by m·(u·b − s), where b are the batch statistics, m is 1 − Flax's momentum, and u is n / (n − 1)
    for an unbiased variance of n values, else 1. So PyTorch's step is p·(Flax's step) + q·s with the same p and q for all
    channels. p and q are fitted; if none fit, the difference has another cause. The list is empty if nothing is explained.
    """
    fits = {path: _convention(before[path], reference[path], candidate[path]) for path in reference.keys() & candidate.keys()}
    paths_by_text: dict[str, list[str]] = {}
    for path, (p, q) in sorted((path, fit) for path, fit in fits.items() if fit):
        beside = fits.get(re.sub(r"var$", "mean", path))
        moved = p if not q else beside[0] if beside and not beside[1] else 1.0
        if abs(moved - 1) > _SAME:
            text = f"Flax's statistics move {1 / moved:.3g} times as far in a step as PyTorch's (its momentum differs)"
            paths_by_text.setdefault(text, []).append(path)
        ratio = p / moved
        if abs(ratio - 1) > _SAME:
            count = round(max(ratio, 1 / ratio) / (max(ratio, 1 / ratio) - 1))
            names = ("PyTorch", "Flax") if ratio > 1 else ("Flax", "PyTorch")
            factor = f"{count}/{count - 1} of the biased variance that {names[1]} keeps"
            text = f"{names[0]} keeps the unbiased variance of the batch, {factor}"
            paths_by_text.setdefault(text, []).append(path)
    texts = [f"{text}: {_several(paths)}" for text, paths in paths_by_text.items()]
    return [Check("batch statistics", False, "; ".join(texts))] if texts else []


def _convention(before: np.ndarray, reference: np.ndarray, candidate: np.ndarray) -> tuple[float, float] | None:
    """p and q of `statistics_check`; None if the statistics agree, have fewer than three values, or no pair fits."""
    start, theirs, ours = (np.asarray(x, np.float64).reshape(-1) for x in (before, reference, candidate))
    if start.size < 3 or norm(theirs - ours) <= TOLERANCES["float64"].value * norm(theirs):
        return None
    step, factors = theirs - start, np.stack([ours - start, start], axis=1)
    for columns in (1, 2):  # a difference in the momentum alone needs only p
        solution = np.linalg.lstsq(factors[:, :columns], step)[0]
        if norm(factors[:, :columns] @ solution - step) <= _SAME * norm(step):
            return float(solution[0]), float(solution[1]) if columns == 2 else 0.0
    return None


def losses_check(reference: list[float], yardstick: list[float], losses: list[float], dtype: str) -> Check:
    """Compare the losses of a short training run in both frameworks; in bfloat16 and float16 they must only be finite."""
    measure = reference if dtype == "float64" else yardstick
    differences = [abs(a - b) / max(abs(a), 1e-30) for a, b in zip(measure, losses, strict=True)]
    worst = max(differences) if np.isfinite(differences).all() else float("inf")
    steps = f"{len(losses)} steps, losses at most {worst:.1e} apart; the last {losses[-1]:.6g}"
    if dtype in ("bfloat16", "float16"):
        return Check(f"training in {dtype}", bool(np.isfinite(worst)), f"{steps}; not judged below float32")
    limit = TOLERANCES["float64_step" if dtype == "float64" else "loss"].value
    return Check(f"training in {dtype}", worst <= limit, steps)


def weight_check(flax: Any, reference: Run, yardstick: Run, weights: Any, dtype: str, mode: str, *, agreed: bool) -> Check:
    """Check that the outputs differ after one Flax weight is transposed, shifted or doubled.

    `agreed`: whether the outputs agree without the change. If they agree only with the change, the weight map itself has
    this fault, which counts as detected. If a weight has too little influence, such as a query weight of an untrained model,
    weights of larger norm are tried.
    """
    floating = {name: x for name, x in reference.outputs.items() if is_floating(x)}
    measured = {name: yardstick.outputs[name] for name in floating}
    unit = "{:.1e} off" if dtype == "float64" else "{:.1f} times the error"
    small: list[str] = []
    for path in _chosen(flax, weights):
        spoilt, how = _spoilt(weights[path])
        outputs = flax.run(dtype, mode, {**weights, path: spoilt}).outputs
        judged = verdicts(floating, {name: outputs[name] for name in floating}, measured, dtype)
        differs = any(problem for _, problem in judged.values())
        result = f"{path} {how}: {unit.format(max(figure for figure, _ in judged.values()))}"
        if differs or not agreed:
            break
        small.append(result)
    before = [text for text in small if text != result]
    result += f"; too small to tell: {', '.join(before)}" if before else ""
    mended = not differs and not agreed
    result += ", and without this change the outputs differ" if mended else ""
    return Check(f"planted weight in {dtype}", differs or mended, result)


def _chosen(flax: Any, weights: Mapping[str, jax.Array]) -> list[str]:
    """Paths of the weights to try: the matrix of median norm and a few of larger norm; other arrays if there is no matrix."""
    paths = sorted(flax.trained, key=lambda path: (norm(weights[path]), path))
    matrices = [path for path in paths if weights[path].ndim > 1 and weights[path].size > 1]
    larger = (matrices or paths)[len(matrices or paths) // 2 :]
    return [larger[place] for place in sorted({round(part * (len(larger) - 1)) for part in (0, 1 / 3, 2 / 3, 1)})]


def _spoilt(weight: jax.Array) -> tuple[jax.Array, str]:
    if weight.ndim > 1 and weight.shape[-1] == weight.shape[-2] and weight.shape[-1] > 1:
        return weight.swapaxes(-1, -2), "transposed"
    if weight.size > 1:
        return jax.numpy.roll(weight.reshape(-1), 1).reshape(weight.shape), "shifted by one"
    return weight * 2 + 1, "doubled"


def _several(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more
