"""The order in which an optimizer's leaves are updated: as far as it is known, that in which their gradients are made."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import jax

from remat_jax import compat
from remat_jax.train.traced import Path

_FIRST, _STATE = jax.tree_util.SequenceKey(0), jax.tree_util.SequenceKey(1)


def owners(paths: Sequence[Path]) -> list[int | None]:
    """For each leaf of the second tree (the state), the index of the leaf of the first (gradients, parameters) that it is for.

    It is known by its path, which ends in the parameter's, as `mu/layers_1/kernel` does; None for other trees and other leaves.
    """
    first = {path[1:]: index for index, path in enumerate(paths) if path[0] == _FIRST}

    def owner(path: Path) -> int | None:
        if path[0] != _STATE:
            return None
        return next((first[path[start:]] for start in range(1, len(path) + 1) if path[start:] in first), None)

    return [owner(path) for path in paths]


def update_order(paths: Sequence[Path], made: Sequence[tuple[int, ...]]) -> list[int]:
    """The outputs `(updates, state)` of an optimizer, by index, parameter by parameter.

    A parameter's leaves of state stand before its update, which reads them. The parameter whose gradient was made first comes
    first (`made`, for each output of the first tree): one whose update had to wait for others would be kept until then. Where
    that does not tell, the last parameter comes first, numbers in a path counting as numbers.
    """
    groups: dict[int, list[int]] = {index: [] for index, path in enumerate(paths) if path[0] == _FIRST}
    rest: list[int] = []
    for index, (path, owner) in enumerate(zip(paths, owners(paths), strict=True)):
        if path[0] != _FIRST:
            (rest if owner is None else groups[owner]).append(index)
    backwards = sorted(groups, key=lambda index: _in_natural_order(paths[index]), reverse=True)
    backwards.sort(key=lambda index: made[index])
    return [one for index in backwards for one in (*groups[index], index)] + rest


def made_at(leaf: Any) -> tuple[int, ...]:
    """The place of the equation that made `leaf` in what is being traced, then the place inside of that; empty if none did."""
    made = compat.made_by(leaf)
    return () if made is None else (made[0], *_made_inside(*made[1:]))


def _made_inside(eqn: Any, var: Any) -> tuple[int, ...]:
    """Where the body of a call (`jit`, `checkpoint`, …) makes the output `var` of the call."""
    bodies = [compat.closed(value).jaxpr for value in eqn.params.values() if compat.is_jaxpr(value)]
    if len(bodies) != 1 or len(bodies[0].outvars) != len(eqn.outvars) or not any(out is var for out in eqn.outvars):
        return ()
    inner = bodies[0].outvars[next(index for index, out in enumerate(eqn.outvars) if out is var)]
    for place, maker in enumerate(bodies[0].eqns):
        if any(out is inner for out in maker.outvars):
            return (place, *_made_inside(maker, inner))
    return ()


def _in_natural_order(path: Path) -> list[Any]:
    text = jax.tree_util.keystr(path, simple=True, separator="/")
    return [(1, int(part), "") if part.isdigit() else (0, 0, part) for part in re.split(r"(\d+)", text)]
