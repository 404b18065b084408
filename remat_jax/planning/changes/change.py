"""What a change beyond the blocks is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from remat_jax.workload import Workload


@dataclass(frozen=True)
class Change:
    """A change of a training step that keeps what the step computes. This class changes nothing.

    `loss`, `optimizer` and `rounds` say what is changed. Both the workload that is planned (`changed`) and the step that runs
    the plan (`Plan.apply`, `Plan.train_step`) use them.

    Attributes:
      advice: the advice (`memory.advice`) that says what it frees; None if it is not proposed.
      most: how often it can be made.
      in_blocks: whether it frees memory inside the blocks too. Then the estimate of what it frees outside is the difference of
        the two planning problems, not the advice.
      rounds: into how many micro-batches it divides each micro-batch.
      declared: whether the loss is a `"sum"` or a `"mean"` over the examples; None if the traced loss is to show it.
      does: what it does to the step, for messages.
      optimizer_call: how a user writes what `optimizer` does, for an optimizer `tx`. An `nnx.Optimizer` has its state already,
        so the step asks for the changed one.
    """

    advice: str | None = None
    most: int = 1
    in_blocks: bool = False
    rounds: int = 1
    declared: str | None = None
    does: str = ""
    optimizer_call: str = ""

    def loss(self, loss: Callable[..., Any]) -> Callable[..., Any]:
        """The changed loss."""
        return loss

    def optimizer(self, optimizer: Any) -> Any:
        """The changed optax optimizer; the same object if there is nothing to change."""
        return optimizer

    def changed(self, workload: Workload) -> Workload:
        """The changed workload. A subclass checks here that the workload can have the change, and changes nothing else.

        Raises:
          RematError: it cannot; the message names the reason.
        """
        assert workload.own_loss is not None, "a finished step is not planned"
        loss, optimizer = self.loss(workload.own_loss), workload.optimizer
        changed = workload if loss is workload.own_loss else workload.with_loss(loss)
        if optimizer is not None and (other := self.optimizer(optimizer)) is not optimizer:
            changed = changed.with_optimizer(other)
        return changed.in_micro_batches(self.rounds * workload.micro_batches, self.declared) if self.rounds > 1 else changed
