"""The optimizer's state in host memory between the steps."""

from __future__ import annotations

from typing import Any

from remat_jax.errors import PlanningError
from remat_jax.memory.advice import STATE
from remat_jax.planning.changes.change import Change
from remat_jax.train import OffloadedOptimizer, offload_optimizer
from remat_jax.workload import Workload


class OptimizerOnHost(Change):
    """The optimizer is one of `offload_optimizer`."""

    def optimizer(self, optimizer: Any) -> Any:
        """An optimizer with its state in host memory."""
        return optimizer if isinstance(optimizer, OffloadedOptimizer) else offload_optimizer(optimizer)

    def changed(self, workload: Workload) -> Workload:
        """Raises `PlanningError` if the workload has no optimizer, or if its optimizer's state is in host memory already."""
        if workload.optimizer is None:
            raise PlanningError(f"optimizer_on_host: workload={workload.name!r} has no optimizer; give it with optimizer=…")
        if isinstance(workload.optimizer, OffloadedOptimizer):
            raise PlanningError(
                f"optimizer_on_host: workload={workload.name!r} has its optimizer's state in host memory already"
            )
        return super().changed(workload)


CHANGE = OptimizerOnHost(STATE, does="keeps the optimizer's state in host memory", optimizer_call="rj.offload_optimizer(tx)")
