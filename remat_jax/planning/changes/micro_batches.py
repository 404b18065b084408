"""The gradient in twice as many micro-batches: half of the activations, and one more tree of gradients."""

from __future__ import annotations

from dataclasses import replace

import jax

from remat_jax.errors import PlanningError
from remat_jax.memory.advice import MICRO
from remat_jax.planning.changes.change import Change
from remat_jax.workload import Workload


class MicroBatches(Change):
    """Twice as many micro-batches."""

    def changed(self, workload: Workload) -> Workload:
        """Raises `PlanningError` if the loss is not shown to be a sum or mean over examples, or the batch cannot be divided."""
        made = super().changed(workload)
        step = made.step("off")
        try:
            jax.eval_shape(step.function, *step.arguments)
        except PlanningError:
            raise
        except Exception as error:  # whatever the user's loss raises for a batch with fewer rows
            raise PlanningError(f"micro_batches: {error}") from error
        return made


CHANGE = MicroBatches(MICRO, most=3, in_blocks=True, rounds=2)
DECLARED = {word: replace(CHANGE, advice=None, in_blocks=False, declared=word) for word in ("sum", "mean")}
