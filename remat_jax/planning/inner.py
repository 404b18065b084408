"""Separates the residuals that checkpoints inside a block's loops recompute from the block's other residuals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, JaxprEqn

from remat_jax import compat
from remat_jax.core.walk import bodies, equations, given_names
from remat_jax.cost.cost import is_pass
from remat_jax.cost.flat import Array, Flat, FlatEqn, flatten

_DROPS = (None, jax.checkpoint_policies.nothing_saveable)
"""The policies of checkpoints that save only their inputs."""


def inner_names(jaxpr: ClosedJaxpr) -> frozenset[str]:
    """The names of the arrays that checkpoints in the closed `jaxpr` drop, if these checkpoints save only their inputs."""
    regions = filter(compat.is_checkpoint, equations(jaxpr))
    dropping = (eqn for eqn in regions if compat.checkpoint_parts(eqn)[1].get("policy") in _DROPS)
    inside = [body for eqn in dropping for body in bodies(eqn)]
    results = {name for body in inside for array in flatten(body).outputs for name in array.names}
    return frozenset(name for body in inside for name in given_names(body)) - results


def apart(flat: Flat, inside: frozenset[str]) -> tuple[Flat, frozenset[Array]]:
    """`flat` with some loops split in two, and the residuals of checkpoints inside loops.

    A residual of these checkpoints has a name in `inside`, and only the backward pass reads it. A loop that computes such
    residuals and other arrays is split into one loop for the residuals and one for the other arrays.

    The backward pass of an inner checkpoint starts from the checkpoint's inputs under every policy. Chunked attention is an
    example: if its result is saved, only the scores are recomputed; if nothing is saved, the result is recomputed, and then
    the scores again.
    """
    read = {array for eqn in flat.eqns for array in eqn.inputs}
    made = {array for eqn in flat.eqns if eqn.primitive == "scan" for array in eqn.outputs} - read
    inner_residuals = frozenset(array for array in made if inside.intersection(array.names))
    eqns: list[FlatEqn] = []
    for eqn in flat.eqns:
        parts = _parts(eqn, inner_residuals)
        # Splitting would repeat the loop's other computations in both parts.
        if len(parts) > 1 and _has_other_work(parts[1].eqn, inside):
            parts = [eqn]
        if len(parts) == 1 and not inner_residuals.issuperset(eqn.outputs):
            inner_residuals = inner_residuals.difference(eqn.outputs)
        eqns += parts
    return replace(flat, eqns=tuple(eqns)), inner_residuals


def _has_other_work(loop: JaxprEqn, inside: frozenset[str]) -> bool:
    """Whether a loop's body has an equation that cannot fuse and that computes no array named in `inside`."""
    for eqn in flatten(compat.closed(loop.params["jaxpr"])).eqns:
        if eqn.primitive == "scan":
            if _has_other_work(eqn.eqn, inside):
                return True
        elif not is_pass(eqn) and not any(inside.intersection(array.names) for array in eqn.outputs):
            return True
    return False


def _parts(eqn: FlatEqn, inner_residuals: frozenset[Array]) -> list[FlatEqn]:
    """Two equations: one for the outputs not in `inner_residuals`, one for the rest. `[eqn]` if it cannot be split."""
    places = [
        [place for place, array in enumerate(eqn.outputs) if (array in inner_residuals) == wanted] for wanted in (False, True)
    ]
    parts = [_part(eqn, of_part) for of_part in places] if all(places) else [None]
    return [part for part in parts if part is not None] if None not in parts else [eqn]


def _part(eqn: FlatEqn, places: Sequence[int]) -> FlatEqn | None:
    """An equation that computes only the outputs of `eqn` at the indices `places`; None if one equation is not enough."""

    def run(*values: Any) -> list[Any]:
        results = compat.bind(eqn.eqn, values)
        return [results[place] for place in places]

    small = flatten(compat.dce(jax.make_jaxpr(run)(*(array.aval for array in eqn.inputs))))
    if len(small.eqns) != 1:
        return None
    (part,) = small.eqns
    arrays = dict(zip(small.inputs, eqn.inputs, strict=True))
    arrays |= dict(zip(small.outputs, (eqn.outputs[place] for place in places), strict=True))
    inputs, outputs = (tuple(arrays.get(array, array) for array in group) for group in (part.inputs, part.outputs))
    return FlatEqn(part.eqn, inputs, outputs)
