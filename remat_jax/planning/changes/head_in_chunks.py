"""The output head, and the loss that is computed from its logits token by token, in chunks of the tokens."""

from __future__ import annotations

import jax

from remat_jax.memory.advice import HEAD
from remat_jax.train.chunked_head import chunk_head
from remat_jax.workload import Workload

ADVICE = HEAD


def changed(workload: Workload) -> Workload:
    """The workload whose loss never has all logits in memory.

    Raises:
      PlanningError: the loss has no head, or an operation that combines tokens reads the logits.
    """
    assert workload.own_loss is not None, "a finished step is not planned"
    chunked = workload.with_loss(chunk_head(workload.own_loss))
    jax.eval_shape(chunked.loss, chunked.params, *chunked.batch)
    return chunked
