"""Checkpoints in the loops of a block: what they compute again for themselves, apart from what they compute for the block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax

from remat_jax import compat
from remat_jax.graph.flat import Array, Flat, FlatEqn, flatten
from remat_jax.graph.walk import bodies, equations

_CHECKPOINTS = frozenset({"checkpoint", "remat", "remat2"})


def inner_names(jaxpr: Any) -> frozenset[str]:
    """The names that are given inside the checkpoints of the closed `jaxpr`."""
    inside = (body for eqn in equations(jaxpr) if eqn.primitive.name in _CHECKPOINTS for body in bodies(eqn))
    found = (compat.given_name(eqn) for body in inside for eqn in equations(body))
    return frozenset(name for name in found if name is not None)


def apart(flat: Flat, inside: frozenset[str]) -> tuple[Flat, frozenset[Array]]:
    """`flat` with each loop as two where it makes residuals of a checkpoint inside it and something else; and these residuals.

    They are what has a name of `inside` and is read by the backward pass alone.

    The backward pass of such a checkpoint starts from what it was given, whatever else is kept. Attention in chunks is one:
    with its result kept, only the scores are computed again; with nothing kept, the result is, and the scores once more.
    """
    read = {array for one in flat.eqns for array in one.inputs}
    made = {array for one in flat.eqns if one.primitive == "scan" for array in one.outputs} - read
    own = frozenset(array for array in made if inside.intersection(array.names))
    return replace(flat, eqns=tuple(part for one in flat.eqns for part in _parts(one, own))), own


def _parts(one: FlatEqn, own: frozenset[Array]) -> list[FlatEqn]:
    flags = [array in own for array in one.outputs]
    if not any(flags) or all(flags):
        return [one]
    parts = [_part(one, [index for index, flag in enumerate(flags) if flag == wanted]) for wanted in (False, True)]
    return [part for part in parts if part is not None] if None not in parts else [one]


def _part(one: FlatEqn, places: Sequence[int]) -> FlatEqn | None:
    """What of an equation makes its outputs at `places`; None where that is no equation of its own."""

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
