"""The loss inside a training step: the function that the step differentiates, found while the step is traced."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr

from remat_jax import compat
from remat_jax.apply.audit import Audit
from remat_jax.apply.effect import run_under
from remat_jax.apply.gradients import Gradient, Types, noting_gradients
from remat_jax.apply.per_layer import layered
from remat_jax.apply.per_layer.positions import marks
from remat_jax.apply.scope import BlockPolicies, Record, missed
from remat_jax.core import is_smooth
from remat_jax.core.marks import Block
from remat_jax.core.walk import bodies
from remat_jax.errors import RematError, UnsupportedError

_SHOWN = 12
"""An error shows at most this number of types, the last ones: those of the batch."""


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

    jaxpr: ClosedJaxpr
    blocks: frozenset[Block]
    frozen: Types
    trained: Types
    outputs: int
    rounds: int

    def __call__(self, trained: Sequence[Any], frozen: Sequence[Any]) -> jax.Array:
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
    _as_written: InnerLoss | None = None

    def under(self, policies: BlockPolicies | None, of_blocks: BlockPolicies) -> InnerLoss:
        """The loss under `policies`, or as written; `of_blocks` are any policies of the blocks.

        Raises:
          UnsupportedError: the step takes no gradient through its blocks, or several, or one inside a `vmap`, a `shard_map` or
            another gradient.
          BlockError, NoEffectError: a block is never called, or a policy has no effect.
        """
        if self._place is None:
            self._place = self._place_of_loss(of_blocks)
        if policies is None:
            self._as_written = self._as_written or self._found(BlockPolicies(()))
            return self._as_written
        return self._found(policies)

    def _found(self, policies: BlockPolicies) -> InnerLoss:
        assert self._place is not None, "the loss has a place"
        gradients, jaxpr = _checked_gradients(self.step, self.arguments, policies)
        found, blocks = gradients[self._place], frozenset(block for block, _ in policies.entries)
        text = str(found.jaxpr)
        # Micro-batches that are unrolled are equal gradients. A body that is traced twice runs once.
        rounds = sum(_rounds(jaxpr, each.scope) for each in gradients if str(each.jaxpr) == text)
        return InnerLoss(found.jaxpr, blocks, found.frozen, found.trained, found.outputs, rounds or 1)

    def _place_of_loss(self, policies: BlockPolicies) -> int:
        gradients, _ = _checked_gradients(self.step, self.arguments, policies)
        through = [(place, each) for place, each in enumerate(gradients) if any(marks(each.jaxpr))]
        if where := next((each.where for _, each in through if each.where), ""):
            raise UnsupportedError(
                f"step={self.name!r} takes the gradient of its blocks {where}: their residuals are not those of the whole "
                "step, so they are neither listed nor planned. Policies can be set and measured"
            )
        by_text = {str(each.jaxpr): place for place, each in through}
        if len(by_text) == 1:
            return by_text.popitem()[1]
        number = f"{len(by_text)} gradients" if by_text else "no gradient"
        remedy = (
            "give the workload of each loss by itself, as Workload(loss, …)"
            if by_text
            else "check that the step differentiates the model, or that blocks names the layers that it differentiates"
        )
        raise UnsupportedError(f"step={self.name!r} takes {number} through its blocks; expected one: {remedy}")


def _checked_gradients(
    step: Callable[..., Any], arguments: tuple[Any, ...], policies: BlockPolicies
) -> tuple[list[Gradient], Any]:
    waiting = replace(policies, waits=True).anew()
    gradients, jaxpr, record = gradients_of(step, arguments, waiting)
    if (error := missed(waiting, record)) is not None:
        raise error
    return gradients, jaxpr


def gradients_of(
    step: Callable[..., Any], arguments: tuple[Any, ...], policies: BlockPolicies
) -> tuple[list[Gradient], ClosedJaxpr, Record]:
    """The gradients that a step takes under `policies` that wait, in order, with marks for the blocks; the step; the record."""
    records: list[Record] = []

    def run(*args: Any) -> list[Any]:
        outputs, record = run_under(policies, step, args, {})
        records.append(record)
        return [leaf for leaf in jax.tree.leaves(outputs) if compat.is_operand(leaf)]

    try:
        with noting_gradients() as gradients:
            jaxpr = jax.make_jaxpr(run)(*arguments)
    except Exception as error:
        if not isinstance(error, RematError):
            types = [f"{leaf.dtype}{list(leaf.shape)}" for leaf in jax.tree.leaves(arguments)]
            more = f" and {len(types) - _SHOWN} more" if len(types) > _SHOWN else ""
            name = getattr(step, "__name__", "step")
            error.add_note(
                f"remat_jax traced the step {name!r}, as jax.jit would, with arrays of these types: "
                f"{', '.join(types[-_SHOWN:])}{more}"
            )
        raise
    return gradients, jaxpr, records[-1]


def _rounds(jaxpr: ClosedJaxpr, scope: str) -> int:
    """How often the equations in a named scope run; 0 if there are none."""
    if any(scope in compat.scopes(eqn) for eqn in jaxpr.jaxpr.eqns):
        return 1
    lengths = [(eqn.params["length"] if eqn.primitive.name == "scan" else 1, bodies(eqn)) for eqn in jaxpr.jaxpr.eqns]
    return sum(length * max((_rounds(body, scope) for body in inside), default=0) for length, inside in lengths)
