"""Groups of layers as data. A group is consecutive layers under one checkpoint that keeps only the first layer's input."""

from __future__ import annotations

import bisect
import itertools
import re
from collections.abc import Iterable, Sequence
from typing import Any

from remat_jax.errors import PolicyError

Group = tuple[int, int]
"""The first layer of a group, counted from 0, and the first layer after the group."""
_IN_GROUPS = re.compile(r"(.*\S)\s+in\s+groups\s+of\s+(\S+)\s*", re.DOTALL)


def split_groups(text: str, argument: str) -> tuple[str, int | None]:
    """The policy in a run's text, and the number of layers in each group (None without groups)."""
    match = _IN_GROUPS.fullmatch(text)
    if match is None:
        return text, None
    size = match[2]
    if not (size.isascii() and size.isdigit() and len(size) < 8 and int(size)):
        raise PolicyError(
            f"{argument}: 'in groups of {size:.20}': a group needs 1 layer or more; write 'N × policy in groups of 4'."
        )
    return match[1], int(size)


def is_in_groups(text: str) -> bool:
    """Whether a text ends in 'in groups of N'."""
    return _IN_GROUPS.fullmatch(text) is not None


def checked_groups(groups: Any, runs: Sequence[tuple[int, Any]], cuts: Iterable[int]) -> tuple[Group, ...]:
    """The groups, sorted.

    Raises:
        PolicyError: a group is not inside one run, contains a cut or overlaps another group, or its policy offloads.
    """
    if not isinstance(groups, Sequence) or isinstance(groups, str):
        raise PolicyError(f"LayerPolicies: groups={groups!r}: expected pairs (first layer, first layer after the group).")
    checked = sorted(_checked_pair(pair) for pair in groups)
    borders = [0, *itertools.accumulate(count for count, _ in runs)]
    cut = set(cuts)
    last_end = 0
    for first, end in checked:
        if first < last_end:
            raise PolicyError(f"LayerPolicies: groups: layer {first} is in two groups; a layer is in one group at most.")
        last_end = end
        run = min(bisect.bisect_right(borders, first), len(runs)) - 1
        if not borders[run] <= first < end <= borders[run + 1]:
            raise PolicyError(
                f"LayerPolicies: groups: the group of layers {first} to {end - 1}: expected layers of one run, such as those "
                f"from {borders[run]} to {borders[run + 1] - 1}."
            )
        inside = cut & set(range(first + 1, end))
        if inside:
            raise PolicyError(
                f"LayerPolicies: a cut before layer {min(inside)} inside the group of layers {first} to {end - 1}: cut between "
                "groups."
            )
        policy = runs[run][1]
        if policy.offloads:
            raise PolicyError(
                f"LayerPolicies: the policy {str(policy)!r} of the layers {first} to {end - 1} offloads inside a group, but a "
                "group is recomputed as a whole and keeps no residuals of its layers. Use 'full' inside the group, or remove "
                "the group."
            )
    return tuple(checked)


def series_borders(groups: Sequence[Group]) -> set[int]:
    """The layers before which a series of consecutive groups of equal size begins or ends."""
    sizes = {first: end - first for first, end in groups}
    size_before = {end: end - first for first, end in groups}
    starts = {first for first, size in sizes.items() if size_before.get(first) != size}
    return starts | (size_before.keys() - sizes.keys())


def _checked_pair(pair: Any) -> Group:
    whole = isinstance(pair, Sequence) and not isinstance(pair, str) and len(pair) == 2
    if not whole or any(isinstance(layer, bool) or not isinstance(layer, int) for layer in pair) or not 0 <= pair[0] < pair[1]:
        raise PolicyError(
            f"LayerPolicies: group={pair!r}: expected a pair (first layer, first layer after the group), as in (0, 4)."
        )
    return pair[0], pair[1]
