"""The output head, and the loss that is computed from its logits token by token, in chunks of the tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from remat_jax.memory.advice import HEAD
from remat_jax.planning.changes.change import Change
from remat_jax.train.chunked_head import chunk_head
from remat_jax.workload import Workload


class HeadInChunks(Change):
    """The loss never has all logits in memory."""

    def loss(self, loss: Callable[..., Any]) -> Callable[..., Any]:
        """The loss with its head in chunks (`chunk_head`)."""
        return chunk_head(loss)

    def changed(self, workload: Workload) -> Workload:
        """Raises `PlanningError` if the loss has no head, or if an operation that combines tokens reads the logits."""
        chunked = super().changed(workload)
        jax.eval_shape(chunked.loss, chunked.params, *chunked.batch)
        return chunked


CHANGE = HeadInChunks(HEAD)
