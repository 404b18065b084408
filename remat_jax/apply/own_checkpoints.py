"""Removes a model's own checkpoints around blocks that have a policy.

    jax.checkpoint(… checkpoint(policy)(block) …)   →   … checkpoint(policy)(block) …

The outer checkpoint would discard the residuals that the block's policy keeps. JAX traces the body of a `jax.checkpoint` region
before it binds the region. If the traced body contains a block with a policy, the body is evaluated without the region. A scan,
a lifted transform or `nnx.bridge` may be between the region and the block.

A region that is the whole block (`@nnx.remat` on `__call__`) is replaced too (`in_place`):

    checkpoint(policy)(jax.checkpoint(f))   →   checkpoint(policy)(f)
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from jax.extend.core import ClosedJaxpr, JaxprEqn

from remat_jax import compat
from remat_jax.apply import scope
from remat_jax.apply.audit import Audit
from remat_jax.apply.binding import RegionPolicy, run_jaxpr
from remat_jax.core.block import is_smooth
from remat_jax.core.marks import Marked, mark_of
from remat_jax.core.walk import bodies, equations, interpret, rebind, retrace
from remat_jax.errors import ArgumentError
from remat_jax.policy import LayerPolicies, is_off
from remat_jax.warning import warn

CHOICES = ("replace", "keep")

KEPT = (
    "own_checkpoints='keep': the blocks are inside the model's own checkpoints (nn.remat, jax.checkpoint), which discard the "
    "residuals that a policy keeps; leave own_checkpoints out, and the policy replaces these checkpoints"
)


def check_choice(own_checkpoints: object) -> bool:
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


_regions: ContextVar[list[ClosedJaxpr] | None] = ContextVar("regions", default=None)


@contextmanager
def noting_regions() -> Iterator[list[ClosedJaxpr]]:
    """Collects the bodies of the model's checkpoint regions that are traced inside this context."""
    regions: list[ClosedJaxpr] = []
    compat.install_hooks()
    with compat.setting(_regions, regions):
        yield regions


def _gives_way(body: ClosedJaxpr) -> bool:
    """Whether the policy of a block in `body` replaces the checkpoint region around `body`. Counts replaced regions."""
    regions = _regions.get()
    if regions is not None:
        regions.append(body)
    replaces = {compat.replaces_checkpoints(eqn) for eqn in equations(body)}
    for mark in filter(None, map(mark_of, equations(body))):
        if _has_effect(mark.marked):
            replaces.add(not mark.marked.keeps)
    if True in replaces:
        scope.record().replaced += 1
        return True
    if False in replaces:
        warn(KEPT)
    return False


compat.let_checkpoints_give_way(_gives_way)


def _has_effect(policy: RegionPolicy) -> bool:
    """Whether a block's policy is other than `off`, in any layer."""
    given = policy.policy if isinstance(policy, Marked) else policy
    return not all(map(is_off, [of_run for _, of_run in given.runs] if isinstance(given, LayerPolicies) else [given]))


def in_place(
    jaxpr: ClosedJaxpr,
    path: str,
    inputs: Sequence[bool],
    values: Sequence[Any],
    looped: bool = False,
    *,
    policy: RegionPolicy,
    audit: Audit,
    has_parameters: bool = True,
) -> list[Any]:
    """Evaluate a block as `run_jaxpr` does.

    If the whole block is one checkpoint region of the model, the policy takes the region's place. A `jit` or a scan may be
    around the region: the methods of NNX and Equinox modules may have several decorators.
    """
    run = functools.partial(run_jaxpr, path=path, policy=policy, audit=audit, has_parameters=has_parameters)
    if _has_effect(policy) and _is_region(jaxpr):
        if not compat.checkpoints_stay():
            scope.record().replaced += 1
            return _inside(jaxpr, inputs, values, looped, run)
        warn(KEPT)
        scope.record().kept += 1
    return run(jaxpr, inputs=inputs, values=values, looped=looped)


def _inside(
    jaxpr: ClosedJaxpr, inputs: Sequence[bool], values: Sequence[Any], looped: bool, run: Callable[..., list[Any]]
) -> list[Any]:
    if not _is_region(jaxpr):
        return run(jaxpr, inputs=inputs, values=values, looped=looped)
    whole = _whole(jaxpr)
    flags = dict(zip(jaxpr.jaxpr.invars, inputs, strict=True))

    def visit(eqn: JaxprEqn, operands: list[Any]) -> list[Any] | None:
        selected = [not hasattr(atom, "val") and flags.get(atom, False) for atom in eqn.invars]
        if eqn is not whole:
            flags.update(dict.fromkeys(eqn.outvars, any(selected)))
            return None
        if compat.is_checkpoint(eqn):
            return _inside(compat.checkpoint_parts(eqn)[0], selected, operands, looped, run)
        around = looped or eqn.primitive.name == "scan"
        return rebind(eqn, operands, lambda _, body: retrace(body, lambda *args: _inside(body, selected, args, around, run)))

    return interpret(jaxpr, values, visit)


def _whole(jaxpr: ClosedJaxpr) -> Any:
    """The only equation that computes floating-point arrays, if it is a checkpoint region, a `jit` or a scan; else None."""
    smooth = [eqn for eqn in jaxpr.jaxpr.eqns if any(is_smooth(var.aval) for var in eqn.outvars)]
    around = len(smooth) == 1 and (compat.is_checkpoint(smooth[0]) or smooth[0].primitive.name in ("jit", "pjit", "scan"))
    return smooth[0] if around and not compat.is_chunk_policy(smooth[0].params.get("policy")) else None


def _is_region(jaxpr: ClosedJaxpr) -> bool:
    """Whether the whole `jaxpr` is one checkpoint region, maybe inside a `jit` or a scan."""
    whole = _whole(jaxpr)
    return whole is not None and (compat.is_checkpoint(whole) or _is_region(bodies(whole)[0]))
