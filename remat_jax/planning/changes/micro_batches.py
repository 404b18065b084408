"""The gradient in twice as many micro-batches: half of the activations, and one more tree of gradients."""

from __future__ import annotations

import jax

from remat_jax.errors import PlanningError
from remat_jax.memory.advice import MICRO
from remat_jax.workload import Workload

ADVICE = MICRO


def changed(workload: Workload, declared: str | None = None) -> Workload:
    """The workload in twice as many micro-batches.

    Args:
      declared: `"sum"` or `"mean"` over the examples; None if the traced loss is to show it.

    Raises:
      PlanningError: the loss is not shown to be a sum or a mean over examples, or the micro-batches do not divide the batch.
    """
    n = 2 * workload.micro_batches
    made = workload.in_micro_batches(n, declared)
    step = made.step("off")
    try:
        jax.eval_shape(step.function, *step.arguments)
    except PlanningError:
        raise
    except Exception as error:  # whatever the user's loss raises for a batch with fewer rows
        raise PlanningError(f"micro_batches: {error}") from error
    return made
