"""The loss inside a training step: the function that the step differentiates, found while the step is traced."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from remat_jax import compat
from remat_jax.apply.audit import Audit
from remat_jax.apply.effect import Gradient, noting_gradients, run_under
from remat_jax.apply.per_layer import layered
from remat_jax.apply.per_layer.positions import marks
from remat_jax.apply.scope import BlockPolicies, missed
from remat_jax.core import is_smooth
from remat_jax.core.marks import Block
from remat_jax.core.walk import bodies
from remat_jax.errors import UnsupportedError

Types = tuple[jax.ShapeDtypeStruct, ...]


@dataclass(frozen=True)
class InnerLoss:
    """A function that a training step differentiates, as it is traced under some policies.

    Attributes:
      jaxpr: the function as a closed jaxpr with marks in place of its `blocks`; it takes `frozen`, then `trained`.
      frozen: the types of the arrays that the function closes over: the batch, random keys, frozen parameters.
      trained: the types of the arrays along which it is differentiated.
      outputs: how many of its outputs are differentiated; the others are aux.
      rounds: how often a step runs it: the product of the trip counts of the scans around the gradient.
    """

    jaxpr: Any
    blocks: frozenset[Block]
    frozen: Types
    trained: Types
    outputs: int
    rounds: int

    def __call__(self, trained: Sequence[Any], frozen: Sequence[Any]) -> Any:
        """The loss under the policies; the sum of all outputs if the step differentiates more than a scalar."""
        outputs, _ = layered.evaluate(self.jaxpr, [*frozen, *trained], self.blocks, Audit())
        smooth = [out for out in outputs[: self.outputs] if is_smooth(out)]
        return smooth[0] if len(smooth) == 1 and not smooth[0].shape else sum(jnp.sum(out.real) for out in smooth)


@dataclass
class LossInside:
    """The loss inside a training step: the function that the step differentiates through its blocks.

    Attributes:
      step: the step. arguments: the types of its arguments. name: its name in errors.
    """

    step: Callable[..., Any]
    arguments: tuple[Any, ...]
    name: str
    _place: int | None = None
    """The place of the loss among the gradients that the step takes."""

    def under(self, policies: BlockPolicies | None, of_blocks: BlockPolicies) -> InnerLoss:
        """The loss under `policies`, or as written; `of_blocks` are any policies of the blocks.

        Raises:
          UnsupportedError: the step takes no gradient through its blocks, or several.
          BlockError, NoEffectError: a block is never called, or a policy has no effect.
        """
        if self._place is None:
            self._place = self._place_of_loss(of_blocks)
        policies = policies or BlockPolicies(())
        gradients, jaxpr = _gradients(self.step, self.arguments, policies)
        found, blocks = gradients[self._place], frozenset(block for block, _ in policies.entries)
        return InnerLoss(found.jaxpr, blocks, found.frozen, found.trained, found.outputs, _rounds(jaxpr, found.scope) or 1)

    def _place_of_loss(self, policies: BlockPolicies) -> int:
        gradients, _ = _gradients(self.step, self.arguments, policies)
        # A body that is traced twice has its gradient twice.
        through = {str(each.jaxpr): place for place, each in enumerate(gradients) if any(marks(each.jaxpr))}
        if len(through) == 1:
            return through.popitem()[1]
        number = f"{len(through)} gradients" if through else "no gradient"
        remedy = (
            "give the workload of each loss by itself, as Workload(loss, …)"
            if through
            else "check that the step differentiates the model, or that blocks names the layers that it differentiates"
        )
        raise UnsupportedError(f"step={self.name!r} takes {number} through its blocks; expected one: {remedy}")


def _gradients(step: Callable[..., Any], arguments: tuple[Any, ...], policies: BlockPolicies) -> tuple[list[Gradient], Any]:
    """The gradients that a step takes, in order, with marks for the blocks of `policies`; and the step under the policies."""
    waiting = replace(policies, waits=True).anew()
    records = []

    def run(*args: Any) -> Any:
        outputs, record = run_under(waiting, step, args, {})
        records.append(record)
        return [leaf for leaf in jax.tree.leaves(outputs) if compat.is_operand(leaf)]

    with noting_gradients() as gradients:
        jaxpr = jax.make_jaxpr(run)(*arguments)
    if (error := missed(waiting, records[-1])) is not None:
        raise error
    return gradients, jaxpr


def _rounds(jaxpr: Any, scope: str) -> int:
    """How often the equations in a named scope run; 0 if there are none."""
    for eqn in jaxpr.jaxpr.eqns:
        if scope in compat.scopes(eqn):
            return 1
        length = eqn.params["length"] if eqn.primitive.name == "scan" else 1
        inside = max((_rounds(body, scope) for body in bodies(eqn)), default=0)
        if inside:
            return length * inside
    return 0
