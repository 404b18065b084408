"""A tutorial's checkpointing experiment on a deep perceptron, including its faults, to compare a correct experiment with.

It compares a plain model with `checkpoint_sequential` over its layers in three segments, and with handwritten segments.
What it does:

1. `checkpoint_sequential` gets the list of bare linear layers, so the ReLUs between them are lost: the checkpointed model
   is an affine function, different from the plain model.
2. `use_reentrant` is not given, which selects the reentrant form. That form has gradients only if the input requires one,
   and a batch does not. No checkpointed layer gets a gradient, and only the last segment learns.
3. The handwritten segments drop the ReLU at the end of every segment.
4. They also detach at the end of every segment and recompute nothing: the gradient is cut, all segments but the last learn
   nothing, and each interior is freed because backward never reaches it.
5. The "peak" is read after the forward pass. The real peak comes later, with cotangents and gradients.
6. The plain model's memory is read before its first backward pass, the checkpointed model's after an optimizer step that
   leaves the gradients: only the second reading includes gradients and Adam's two moments.

The original's `self.layersx` and `model.layersx` do not exist; they are read as `self.layers[-1](x)` and `model.layers[j](x)`.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.utils.checkpoint import checkpoint_sequential


class DeepMLP(nn.Module):
    """The tutorial's model: (batch, in_features) → (batch, 10); the correct `DeepMLP` has the same parameters.

    >>> model = DeepMLP(num_layers=6, hidden_size=4, in_features=3)
    >>> bool((model(torch.ones(2, 3)) == model(torch.ones(2, 3, requires_grad=True), use_checkpoint=True)).all())
    False
    """

    def __init__(self, num_layers: int = 10, hidden_size: int = 512, *, in_features: int = 1024) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(in_features, hidden_size)])
        for _ in range(num_layers - 2):
            self.layers.append(nn.Linear(hidden_size, hidden_size))
        self.layers.append(nn.Linear(hidden_size, 10))
        self.relu = nn.ReLU()

    def forward(self, x: torch.Tensor, use_checkpoint: bool = False) -> torch.Tensor:
        """Run the plain model on `x`; with `use_checkpoint`, a different model in three segments."""
        if use_checkpoint:
            return checkpoint_sequential(self.layers, 3, x, use_reentrant=True)
        for layer in self.layers[:-1]:
            x = self.relu(layer(x))
        return self.layers[-1](x)


def manual_checkpoint_forward(model: DeepMLP, x: torch.Tensor, segments: int = 3) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Run `model` in the tutorial's segments; return the result, and the outputs of all segments but the last.

    >>> model = DeepMLP(num_layers=6, hidden_size=4, in_features=3)
    >>> manual_checkpoint_forward(model, torch.ones(2, 3))[0].sum().backward()
    >>> [layer.weight.grad is None for layer in model.layers]
    [True, True, True, True, False, False]
    """
    layers_per_segment = len(model.layers) // segments
    checkpoints = []
    for i in range(segments):
        start = i * layers_per_segment
        end = (i + 1) * layers_per_segment if i < segments - 1 else len(model.layers)
        for j in range(start, end):
            x = model.layers[j](x)
            if j < end - 1:
                x = model.relu(x)
        if i < segments - 1:
            checkpoints.append(x)
            x = x.detach()
            x.requires_grad = True
    return x, checkpoints


@dataclass(frozen=True)
class Readings:
    """The tutorial's readings of memory, in bytes.

    Attributes:
        standard: after the plain model's first forward pass.
        checkpoint: after the checkpointed model's forward pass, one optimizer step later.
    """

    standard: int
    checkpoint: int

    @property
    def reduction(self) -> int:
        """The memory that checkpointing saves, as the tutorial prints it."""
        return self.standard - self.checkpoint


def memory_readings(num_layers: int = 20, hidden_size: int = 1024, *, batch: int = 32, in_features: int = 1024) -> Readings:
    """Take the tutorial's two readings, in its order and at its sizes, on fake tensors without allocations.

    The original reads `torch.cuda.memory_allocated`, and prints 0 without a GPU.

    >>> import warnings
    >>> with warnings.catch_warnings(action="ignore"):  # that the checkpointed layers get no gradient: fault 2
    ...     readings = memory_readings(num_layers=6, hidden_size=64, in_features=64)
    >>> readings.reduction < 0
    True
    """
    with FakeTensorMode():
        model = DeepMLP(num_layers, hidden_size, in_features=in_features)
        x, target = torch.randn(batch, in_features), torch.randint(0, 10, (batch,))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.001)
        tracker = MemTracker()
        tracker.track_external(model, x, target, optimizer)
        with tracker:
            readings = []
            for use_checkpoint in (False, True):
                loss = F.cross_entropy(model(x, use_checkpoint=use_checkpoint), target)
                gc.collect()
                now = tracker.get_tracker_snapshot("current").values()
                readings.append(sum(kinds["Total"] for kinds in now))
                loss.backward()
                optimizer.step()
                tracker.reset_mod_stats()
    return Readings(*readings)
