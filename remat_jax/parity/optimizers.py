"""One optimizer in both frameworks, with the same hyperparameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import optax

from remat_jax.errors import ArgumentError, nearest

NAMES = ("sgd", "adam", "adamw")


@dataclass(frozen=True)
class Optimizer:
    """SGD, Adam or AdamW with explicit hyperparameters, because the frameworks' defaults differ.

    Attributes:
        name: `sgd`, `adam` or `adamw`.
        learning_rate, momentum, beta1, beta2: SGD uses the momentum, Adam and AdamW the betas.
        weight_decay: decoupled for AdamW, whose default is 1e-2 in PyTorch and 1e-4 in optax; SGD and Adam add it to the
            gradient, as in PyTorch.
        epsilon: added to Adam's denominator. Some gradients are 0 except for rounding, such as the gradient of an attention's
            key bias; PyTorch's default of 1e-8 would turn this rounding into steps that differ between any two programs.

    >>> Optimizer("adamw").weight_decay
    0.01
    """

    name: str
    learning_rate: float = 1e-2
    momentum: float = 0.9
    beta1: float = 0.9
    beta2: float = 0.999
    weight_decay: float = 1e-2
    epsilon: float = 1e-4

    def __post_init__(self) -> None:
        if self.name not in NAMES:
            hint = nearest(str(self.name), NAMES)
            raise ArgumentError(f"Optimizer: name={self.name!r} is unknown: choose one of {', '.join(NAMES)}.{hint}")

    def torch(self, parameters: Iterable[Any]) -> Any:
        """The PyTorch optimizer for these parameters."""
        import torch

        rate, decay = self.learning_rate, self.weight_decay
        if self.name == "sgd":
            return torch.optim.SGD(parameters, lr=rate, momentum=self.momentum, weight_decay=decay)
        kind = torch.optim.Adam if self.name == "adam" else torch.optim.AdamW
        return kind(parameters, lr=rate, betas=(self.beta1, self.beta2), eps=self.epsilon, weight_decay=decay)

    def optax(self) -> Any:
        """The same optimizer in optax."""
        betas = {"b1": self.beta1, "b2": self.beta2, "eps": self.epsilon}
        if self.name == "adamw":
            return optax.adamw(self.learning_rate, **betas, weight_decay=self.weight_decay)
        step = optax.adam(self.learning_rate, **betas) if self.name == "adam" else optax.sgd(self.learning_rate, self.momentum)
        return optax.chain(optax.add_decayed_weights(self.weight_decay), step)


@dataclass(frozen=True)
class OptimizerPair:
    """The user's own optimizer in both frameworks, with the two methods of `Optimizer`."""

    torch: Callable[[Any], Any]
    optax: Callable[[], Any]
    name: str = "of your own"


def as_optimizer(optimizer: object) -> Optimizer | OptimizerPair | None:
    """The optimizer that is given as None, a name, an `Optimizer`, or a pair as in `compare`."""
    if optimizer is None or isinstance(optimizer, Optimizer | OptimizerPair):
        return optimizer
    if isinstance(optimizer, str):
        return Optimizer(optimizer)
    if isinstance(optimizer, tuple) and len(optimizer) == 2 and callable(optimizer[0]) and hasattr(optimizer[1], "update"):
        make_torch, transformation = optimizer
        return OptimizerPair(make_torch, lambda: transformation)
    raise ArgumentError(
        f"optimizer={optimizer!r}: expected one of {', '.join(NAMES)}, a parity.Optimizer, or a pair: a function that makes "
        "PyTorch's optimizer from the parameters, and an optax transformation"
    )
