"""A tutorial's gradient accumulation loop with mixed precision, including its faults, to compare a correct loop with.

What it does:

1. Each micro-batch's *mean* loss is divided by the number of micro-batches. If micro-batches have different numbers of
   targets, the result is not the mean over all targets: a target in a short micro-batch has more weight.
2. It steps after every full group. An epoch's last, incomplete group is never stepped; the next epoch's `zero_grad` drops it.
3. The logged loss is that of the last micro-batch alone.
4. It runs under autocast without a `GradScaler`: with float16, the original's default on a GPU, small gradients become 0.
5. The gradients are not clipped, and nothing looks for infinities.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True)
class Logged:
    """A line of the log: the epoch, the micro-batch's number in the epoch, and the printed loss."""

    epoch: int
    step: int
    loss: float


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    criterion: Callable[[Any, Any], torch.Tensor],
    loader: Iterable[tuple[Any, Any]],
    gradient_accumulate_steps: int,
    *,
    epochs: int = 10,
    autocast: torch.dtype | None = None,
) -> list[Logged]:
    """The tutorial's loop over `loader`'s micro-batches `(inputs, labels)`; returns the lines that the tutorial prints.

    `autocast` is the dtype of autocast, or None. The tensors are moved to the model's device.

    >>> model = nn.Linear(1, 1)
    >>> data = [(torch.ones(2, 1), torch.ones(2, 1))] * 5
    >>> len(train(model, torch.optim.SGD(model.parameters(), lr=0.1), nn.MSELoss(), data, 2, epochs=1))  # the fifth is lost
    2
    """
    device = next(model.parameters()).device
    log = []
    for epoch in range(epochs):
        model.train()
        optimizer.zero_grad()
        for step, (inputs, labels) in enumerate(loader):
            inputs, labels = inputs.to(device), labels.to(device)
            with nullcontext() if autocast is None else torch.autocast(device.type, autocast):
                outputs = model(inputs)
                loss = criterion(outputs, labels) / gradient_accumulate_steps
            loss.backward()
            if (step + 1) % gradient_accumulate_steps == 0:
                optimizer.step()
                optimizer.zero_grad()
                log.append(Logged(epoch, step, loss.item() * gradient_accumulate_steps))
    return log
