"""Tied tensors: two PyTorch names for an array that Flax has once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from remat_jax.porting.links import links_of_tensors
from remat_jax.porting.rules import Rules
from remat_jax.porting.tensors import address, same_memory

Arrays = dict[str, np.ndarray]


def pairs(rules: Rules, names: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The ties of these names, as (the name that rules use, the second name); only one of the two need be in `names`."""
    seen = set()
    for name in names:
        for tie in rules.ties:
            for captures in (pattern.match(name) for pattern in tie):
                pair = tuple(pattern.format(captures) for pattern in tie) if captures is not None else (None, None)
                if None not in pair and pair not in seen:
                    seen.add(pair)
                    yield pair  # type: ignore[misc]  # two texts


def names_of(rules: Rules, name: str) -> set[str]:
    """A name and the names tied to it."""
    return {name, *(each for pair in pairs(rules, {name: None}) for each in pair)}


def join_tied(rules: Rules, arrays: Arrays, problems: list[str], gradients: Mapping[str, Any] | None = None) -> Arrays:
    """The arrays with each tie under the name that rules use: equal values once, and gradients added."""
    result = dict(arrays)
    for one, other in list(pairs(rules, arrays)):
        if other not in result:
            continue
        second = result.pop(other)
        first = result.setdefault(one, second)
        if first is second:
            continue
        if first.shape != second.shape or first.dtype != second.dtype:
            kinds = f"{first.dtype} {first.shape} and {second.dtype} {second.shape}"
            problems.append(f"{other}: tied to {one}, but they are {kinds}")
        elif gradients is None:
            equal = first.tobytes() == second.tobytes()
            problems += (
                [] if equal else [f"{other}: tied to {one}, but their values differ; remove the tie, or give equal tensors"]
            )
        elif not same_memory(gradients[one], gradients[other]):
            result[one] = (first.astype(np.float64) + second.astype(np.float64)).astype(first.dtype)
    return result


def add_tied(rules: Rules, tensors: Arrays, like: Mapping[str, Any] | None) -> None:
    """Add the second name of every tie if `like` has it, or if there is no `like`."""
    for one, other in list(pairs(rules, tensors)):
        if like is None or other in like:
            tensors.setdefault(other, tensors[one])
        if like is not None and one not in like:
            tensors.pop(one, None)


def refuse_shared(rules: Rules, state_dict: Mapping[str, Any], arrays: Arrays, problems: list[str]) -> None:
    """Refuse a tensor with two names that would fill two arrays: the arrays would diverge in training."""
    tied = {frozenset(pair) for pair in pairs(rules, state_dict)}
    taken = links_of_tensors(rules, arrays)
    by_address: dict[Any, list[str]] = {}
    for name in taken:
        by_address.setdefault(address(state_dict[name]), []).append(name)
    for names in by_address.values():
        for other in names[1:]:
            if same_memory(state_dict[names[0]], state_dict[other]) and frozenset((names[0], other)) not in tied:
                problems.append(
                    f"{other}: duplicated: it is the same tensor as {names[0]}, but would fill a second array, which then "
                    f"trains separately; share one array in Flax, and write 'tie: {names[0]} = {other}'; or give copies if "
                    "the arrays should train separately"
                )
