"""Gradient accumulation with mixed precision, normalised once by the number of targets in all micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from torch_ref.errors import InvalidArgumentError

Loss = Callable[..., tuple[torch.Tensor, Any]]


@dataclass(frozen=True)
class Accumulated:
    """The results of `accumulate_gradients` besides the gradients.

    Attributes:
        loss: mean loss over all targets.
        targets: number of targets.
    """

    loss: float
    targets: float


@dataclass(frozen=True)
class StepOutcome:
    """The result of a training step.

    Attributes:
        loss: mean loss over all targets.
        targets: number of targets.
        gradient_norm: norm of all gradients before clipping; None without clipping.
        stepped: False if the scaler found an infinity and skipped the step.
    """

    loss: float
    targets: float
    gradient_norm: float | None
    stepped: bool


def micro_batches(batch: tuple[Any, ...], n: int) -> list[tuple[Any, ...]]:
    """Cut every tensor in `batch`, at any depth, into `n` equal parts along its first dimension.

    Raises:
        InvalidArgumentError: if `n` is no positive int or does not divide the first dimension, or first dimensions differ.

    >>> [part[0].tolist() for part in micro_batches((torch.arange(4),), 2)]
    [[0, 1], [2, 3]]
    """
    if not isinstance(n, int) or isinstance(n, bool) or n < 1:
        raise InvalidArgumentError(f"n={n!r}: expected the number of micro-batches, a positive int.")
    leaves, spec = pytree.tree_flatten(batch)
    sizes = {leaf.size(0) for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim()}
    if len(sizes) != 1:
        raise InvalidArgumentError(f"batch: expected tensors with first dimensions of one size, but found {sorted(sizes)}.")
    (size,) = sizes
    if not size or size % n:
        near = [one for one in range(1, size + 1) if size % one == 0]
        raise InvalidArgumentError(f"n={n} does not divide the {size} rows of batch; divisors: {near}.")
    whole = [not isinstance(leaf, torch.Tensor) or not leaf.dim() for leaf in leaves]
    parts = [[leaf] * n if same else leaf.split(size // n) for leaf, same in zip(leaves, whole, strict=True)]
    return [pytree.tree_unflatten([part[index] for part in parts], spec) for index in range(n)]


def accumulate_gradients(
    loss: Loss,
    batches: Sequence[tuple[Any, ...]],
    parameters: Iterable[torch.Tensor],
    *,
    autocast: torch.dtype | None = None,
    scaler: torch.amp.GradScaler | None = None,
) -> Accumulated:
    """Set `.grad` of the parameters to the gradient of the mean loss over all targets of all micro-batches.

    Each backward pass adds the gradient of a *sum* of losses; the gradients are normalised by the number of targets at the
    end. Until then sums are divided by the first micro-batch's number of targets times the number of micro-batches, so that
    float16 gradients are about as large as those of the mean. With a `scaler` the gradients stay scaled, for `scaler.unscale_`.

    Args:
        loss: `loss(*micro_batch)` returns the sum of the losses over the targets, and the number of targets.
        batches: the micro-batches, tuples of arguments, such as `micro_batches` makes from a batch. Their numbers of targets
            may differ. If there are no targets at all, nothing is divided.
        parameters: the tensors that get gradients; existing gradients are dropped.
        autocast: dtype of autocast in the forward pass, `torch.bfloat16` or `torch.float16`; None for no autocast.

    Raises:
        InvalidArgumentError: if there is no micro-batch, or `loss` does not return such a pair.

    >>> w = torch.ones((), requires_grad=True)
    >>> parts = [(torch.tensor([1.0]),), (torch.tensor([2.0, 3.0]),)]
    >>> accumulate_gradients(lambda x: (((w * x) ** 2).sum(), x.numel()), parts, [w])
    Accumulated(loss=4.666666666666667, targets=3.0)
    >>> round(w.grad.item(), 4)  # 28 / 3; the mean of means is 7.5
    9.3333
    """
    owned = [parameter for parameter in parameters if parameter.requires_grad]
    if isinstance(batches, torch.Tensor) or not isinstance(batches, Sequence) or not batches:
        raise InvalidArgumentError(
            f"batches={type(batches).__name__}: expected a sequence of one tuple or more, the micro-batches."
        )
    if not owned:
        raise InvalidArgumentError("parameters: expected at least one that requires a gradient.")
    for parameter in owned:
        parameter.grad = None
    total, targets, divisor = 0.0, 0.0, 0.0
    for batch in batches:
        with _autocast(owned[0].device, autocast):
            summed, count = _checked(loss(*batch))
        divisor = divisor or (count or 1.0) * len(batches)
        scaled = summed / divisor
        (scaled if scaler is None else scaler.scale(scaled)).backward()
        total, targets = total + float(summed.detach()), targets + count
    correction = divisor / (targets or 1.0)
    for parameter in owned:
        if parameter.grad is not None:
            parameter.grad.mul_(correction)
    return Accumulated(total / (targets or 1.0), targets)


def accumulated_step(
    loss: Loss,
    batches: Sequence[tuple[Any, ...]],
    optimizer: torch.optim.Optimizer,
    *,
    autocast: torch.dtype | None = None,
    scaler: torch.amp.GradScaler | None = None,
    clip_norm: float | None = None,
) -> StepOutcome:
    """One training step over all micro-batches: accumulate, unscale, clip, step.

    Gradients are unscaled before they are clipped, because scaling changes their norm. If a gradient is infinite, the
    `GradScaler` skips the step and lowers the scale.

    Args:
        loss, batches, autocast: as for `accumulate_gradients`.
        scaler: needed only with `torch.float16`, whose small gradients would underflow.
        clip_norm: largest norm of all gradients together; None for no clipping.

    Raises:
        InvalidArgumentError: if `clip_norm` is not positive, or float16 is used without a scaler.

    >>> w = torch.ones((), requires_grad=True)
    >>> accumulated_step(lambda x: ((w * x).sum(), x.numel()), [(torch.ones(2),)], torch.optim.SGD([w], lr=0.5))
    StepOutcome(loss=1.0, targets=2.0, gradient_norm=None, stepped=True)
    >>> w.item()
    0.5
    """
    if clip_norm is not None and not clip_norm > 0:
        raise InvalidArgumentError(f"clip_norm={clip_norm!r}: expected a positive number, or None for no clipping.")
    if autocast is torch.float16 and scaler is None:
        raise InvalidArgumentError(
            "autocast=torch.float16 without scaler: small gradients would vanish; pass a torch.amp.GradScaler."
        )
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    found = accumulate_gradients(loss, batches, parameters, autocast=autocast, scaler=scaler)
    if scaler is not None:
        scaler.unscale_(optimizer)
    norm = None if clip_norm is None else float(torch.nn.utils.clip_grad_norm_(parameters, clip_norm))
    if scaler is None:
        optimizer.step()
        return StepOutcome(found.loss, found.targets, norm, True)
    before = scaler.get_scale()
    scaler.step(optimizer)
    scaler.update()
    return StepOutcome(found.loss, found.targets, norm, scaler.get_scale() >= before)


def _autocast(device: torch.device, dtype: torch.dtype | None) -> AbstractContextManager[Any]:
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype)


def _checked(result: Any) -> tuple[torch.Tensor, float]:
    pair = isinstance(result, tuple) and len(result) == 2
    if not pair or not isinstance(result[0], torch.Tensor) or result[0].dim() or not result[0].is_floating_point():
        raise InvalidArgumentError(
            f"loss returned {type(result).__name__}: expected the sum of the losses, a floating-point scalar, and the number of"
            " targets; not a mean."
        )
    return result[0], float(result[1])
