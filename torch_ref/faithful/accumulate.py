"""A tutorial's gradient accumulation loop with mixed precision as it behaves, faults included, to hold a right one against.

What it does:

1. Each micro-batch's *mean* loss is divided by the number of micro-batches. Where those have unequal numbers of targets, this
   is another function than the mean over all of them: each target of a short micro-batch counts for more.
2. It steps after every full group. An epoch's last, incomplete group is never stepped; the next epoch's `zero_grad` drops it.
3. The loss that is logged is the last micro-batch's alone.
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
    """One line of the log: the epoch, the micro-batch's number in it, and the loss that is printed there."""

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
    """The tutorial's loop over `loader`'s micro-batches `(inputs, labels)`; what it prints is returned.

    `autocast` is its dtype, None for none. The tensors are taken to the device of the model.

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
