"""Removes a model's own checkpoints around blocks that have a policy.

    jax.checkpoint(… checkpoint(policy)(block) …)   →   … checkpoint(policy)(block) …

The outer checkpoint would discard the residuals that the block's policy keeps. JAX traces the body of a `jax.checkpoint` region
before it binds the region. If the traced body contains a block with a policy, the body is evaluated without the region. A scan,
a lifted transform or `nnx.bridge` may be between the region and the block.
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


_regions: ContextVar[list[Any] | None] = ContextVar("regions", default=None)


@contextmanager
def noting_regions() -> Iterator[list[Any]]:
    """Collects the bodies of the model's checkpoint regions that are traced inside this context."""
    regions: list[Any] = []
    with compat.setting(_regions, regions):
        yield regions


def _gives_way(body: Any) -> bool:
    """Whether the policy of a block in `body` replaces the checkpoint region around `body`. Counts replaced regions."""
    regions = _regions.get()
    if regions is not None:
        regions.append(body)
    replaces = {compat.replaces_checkpoints(eqn) for eqn in equations(body)}
    for mark in filter(None, map(mark_of, equations(body))):
        policy = mark.marked.policy
        policies = [of_run for _, of_run in policy.runs] if isinstance(policy, LayerPolicies) else [policy]
        if not all(map(is_off, policies)):
            replaces.add(not mark.marked.keeps)
    if True in replaces:
        scope.record().replaced += 1
        return True
    if False in replaces:
        warn(KEPT)
    return False


compat.let_checkpoints_give_way(_gives_way)
