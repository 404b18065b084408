"""Checkpoints in the loops of a block: separates the residuals that they recompute for themselves from those of the block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax

from remat_jax import compat
from remat_jax.core.walk import bodies, equations
from remat_jax.cost.cost import is_pass
from remat_jax.cost.flat import Array, Flat, FlatEqn, flatten

_DROPS = (None, jax.checkpoint_policies.nothing_saveable)
"""The policies of checkpoints that keep only their inputs."""


def inner_names(jaxpr: Any) -> frozenset[str]:
    """The names inside the checkpoints of the closed `jaxpr` that keep only their inputs, without their results' names."""
    regions = filter(compat.is_checkpoint, equations(jaxpr))
    dropping = (eqn for eqn in regions if compat.checkpoint_parts(eqn)[1].get("policy") in _DROPS)
    inside = [body for eqn in dropping for body in bodies(eqn)]
    found = {compat.given_name(eqn) for body in inside for eqn in equations(body)}
    results = {name for body in inside for array in flatten(body).outputs for name in array.names}
    return frozenset(name for name in found - results if name is not None)


def apart(flat: Flat, inside: frozenset[str]) -> tuple[Flat, frozenset[Array]]:
    """`flat` with loops split in two, and the residuals of the checkpoints inside these loops.

    A loop is split if it computes both residuals of an inner checkpoint and other arrays. An inner residual has a name of
    `inside`, and only the backward pass reads it.

    The backward pass of an inner checkpoint starts from the checkpoint's inputs, whatever else is kept. Chunked attention is
    an example: if its result is kept, only the scores are recomputed; if nothing is kept, the result is recomputed, and the
    scores are computed once more.
    """
    read = {array for one in flat.eqns for array in one.inputs}
    made = {array for one in flat.eqns if one.primitive == "scan" for array in one.outputs} - read
    own = frozenset(array for array in made if inside.intersection(array.names))
    eqns: list[FlatEqn] = []
    for one in flat.eqns:
        parts = _parts(one, own)
        # The other computations of such a loop would be in both parts.
        if len(parts) > 1 and _has_other_work(parts[1].eqn, inside):
            parts = [one]
        if len(parts) == 1 and not own.issuperset(one.outputs):
            own = own.difference(one.outputs)
        eqns += parts
    return replace(flat, eqns=tuple(eqns)), own


def _has_other_work(eqn: Any, inside: frozenset[str]) -> bool:
    """Whether the body of a loop computes arrays without a name of `inside`."""
    for one in flatten(compat.closed(eqn.params["jaxpr"])).eqns:
        if one.primitive == "scan":
            if _has_other_work(one.eqn, inside):
                return True
        elif not is_pass(one) and not any(inside.intersection(array.names) for array in one.outputs):
            return True
    return False


def _parts(one: FlatEqn, own: frozenset[Array]) -> list[FlatEqn]:
    flags = [array in own for array in one.outputs]
    if not any(flags) or all(flags):
        return [one]
    parts = [_part(one, [index for index, flag in enumerate(flags) if flag == wanted]) for wanted in (False, True)]
    return [part for part in parts if part is not None] if None not in parts else [one]


def _part(one: FlatEqn, places: Sequence[int]) -> FlatEqn | None:
    """The part of an equation that computes its outputs at `places`; None if that part is not a single equation."""

    def run(*values: Any) -> list[Any]:
        results = compat.bind(one.eqn, values)
        return [results[place] for place in places]

    small = flatten(compat.dce(jax.make_jaxpr(run)(*(array.aval for array in one.inputs))))
    if len(small.eqns) != 1:
        return None
    (eqn,) = small.eqns
    arrays = dict(zip(small.inputs, one.inputs, strict=True))
    arrays |= dict(zip(small.outputs, (one.outputs[place] for place in places), strict=True))
    inputs, outputs = (tuple(arrays.get(array, array) for array in group) for group in (eqn.inputs, eqn.outputs))
    return FlatEqn(eqn.eqn, inputs, outputs)
