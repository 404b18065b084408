"""An optimizer's update of the trained parameters, as a training step makes it."""

from __future__ import annotations

from typing import Any

import optax

from remat_jax.errors import ArgumentError
from remat_jax.train.offload import OffloadedOptimizer


def check_optimizer(optimizer: Any) -> None:
    """Raise ArgumentError unless `optimizer` is an optax optimizer."""
    if isinstance(optimizer, type) or not (callable(getattr(optimizer, "init", None)) and hasattr(optimizer, "update")):
        raise ArgumentError(f"optimizer={optimizer!r}: expected an optax optimizer, with init and update")


def updated(optimizer: Any, gradients: Any, state: Any, params: Any) -> tuple[Any, Any]:
    """`(params, state)` after one step. An offloaded optimizer's state stays in host memory."""
    if isinstance(optimizer, OffloadedOptimizer):
        return optimizer.apply(gradients, state, params)
    updates, state = optimizer.update(gradients, state, params)
    return optax.apply_updates(params, updates), state
