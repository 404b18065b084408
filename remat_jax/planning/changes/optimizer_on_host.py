"""The optimizer's state in host memory between the steps."""

from __future__ import annotations

from remat_jax.errors import PlanningError
from remat_jax.memory.advice import STATE
from remat_jax.train import OffloadedOptimizer, offload_optimizer
from remat_jax.workload import Workload

ADVICE = STATE


def changed(workload: Workload) -> Workload:
    """The workload with its optimizer's state in host memory.

    Raises:
      PlanningError: the workload has no optimizer, or its state is in host memory already.
    """
    if workload.optimizer is None:
        raise PlanningError(f"optimizer_on_host: workload={workload.name!r} has no optimizer; give it with optimizer=…")
    if isinstance(workload.optimizer, OffloadedOptimizer):
        raise PlanningError(f"optimizer_on_host: workload={workload.name!r} has its optimizer's state in host memory already")
    return workload.with_optimizer(offload_optimizer(workload.optimizer))
