"""Policies of blocks replace a model's own checkpoints around these blocks.

A checkpoint around a checkpointed block discards the residuals that the block's policy keeps. When JAX binds a `jax.checkpoint`
region, the region's body is traced already. If the body contains a block with a policy, it is evaluated without the region. So
it does not matter which function made the region, or what is between region and block: a scan, a lifted transform,
`nnx.bridge`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from remat_jax import compat
from remat_jax.apply import scope
from remat_jax.core.marks import mark_of
from remat_jax.core.walk import equations
from remat_jax.errors import ArgumentError
from remat_jax.policy import LayerPolicies, is_off
from remat_jax.warning import warn

CHOICES = ("replace", "keep")

KEPT = (
    "own_checkpoints='keep': the blocks are inside the model's own checkpoints (nn.remat, jax.checkpoint), which discard the "
    "residuals that a policy keeps; leave own_checkpoints out, and the policy replaces these checkpoints"
)


def check_choice(own_checkpoints: Any) -> bool:
    """Whether the model's own checkpoints are kept.

    Raises:
      ArgumentError: `own_checkpoints` is not one of the choices.

    >>> check_choice("replace"), check_choice("keep")
    (False, True)
    """
    if own_checkpoints not in CHOICES:
        raise ArgumentError(
            f"own_checkpoints={own_checkpoints!r}: expected 'replace' (policies replace the model's own checkpoints around "
            "the blocks) or 'keep' (the model's own checkpoints stay)"
        )
    return bool(own_checkpoints == "keep")


_noted: ContextVar[list[Any] | None] = ContextVar("noted", default=None)


@contextmanager
def noting_regions() -> Iterator[list[Any]]:
    """Collects the body of every checkpoint region of the model that is traced inside this context."""
    regions: list[Any] = []
    token = _noted.set(regions)
    try:
        yield regions
    finally:
        _noted.reset(token)


def _gives_way(body: Any) -> bool:
    """Whether the policy of a block in this body replaces the checkpoint region around the body; counts the region if so."""
    noted = _noted.get()
    if noted is not None:
        noted.append(body)
    asked = {compat.replaces_checkpoints(eqn) for eqn in equations(body)}
    for mark in filter(None, map(mark_of, equations(body))):
        if not _is_all_off(mark.marked.policy):
            asked.add(not mark.marked.keeps)
    record = scope.innermost_record()
    if True in asked:
        if record is not None:
            record.replaced += 1
        return True
    if False in asked:
        warn(KEPT)
    return False


def _is_all_off(policy: Any) -> bool:
    if isinstance(policy, LayerPolicies):
        return all(is_off(one) for _, one in policy.ranges)
    return is_off(policy)


compat.let_checkpoints_give_way(_gives_way)
