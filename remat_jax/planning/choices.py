"""What the blocks of a stack do, one by one: runs of equal ones, and the plans beside one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from remat_jax.planning.fitting import singles
from remat_jax.solver import BlockPolicy, Choice, Stack, StackPlan, stack_plan

Choices = tuple[tuple[Choice, ...], ...]
"""Of every single block in forward order, what it does with its residuals."""
Cuts = tuple[int, ...]
"""Before which single blocks, counted through the stack, a scan is cut though the blocks on both sides do the same."""

_ORDERS: tuple[Callable[[BlockPolicy, BlockPolicy], Any], ...] = (
    # What offloads comes first: the very last block may not.
    lambda one, last: (one.host_bytes == 0, one.saved_bytes),
    lambda one, last: one.choices == last.choices,
)
"""Ranks of a block among those of its kind, of which one is the last, by its policy."""
_ALIKE = 1 + 1e-9
"""The same numbers added up in another order."""


def together(stack: Stack, plan: StackPlan) -> Choices:
    """What the blocks of a plan do, those of a kind that do the same brought together where that needs no more.

    Those that keep least come first if they may: what the last ones keep, nearest the loss, is there for the shortest time.
    """
    chosen = [one.policy for one in plan.ranges for _ in range(one.count)]
    for rank in _ORDERS:
        alike: list[BlockPolicy] = []
        for block in stack.blocks:
            of_kind = chosen[len(alike) : len(alike) + block.repeats]
            order = list(dict.fromkeys(one.choices for one in of_kind))
            alike += sorted(of_kind, key=lambda one: (rank(one, of_kind[-1]), order.index(one.choices)))
        changed = stack_plan(stack, alike)
        if changed.peak_bytes <= plan.peak_bytes * _ALIKE and changed.extra_seconds <= plan.extra_seconds * _ALIKE:
            return tuple(one.choices for one in alike)
    return tuple(one.choices for one in chosen)


def block_policies(stack: Stack, choices: Choices) -> list[BlockPolicy]:
    """What every single block of a stack does."""
    pairs = list(zip((at for at, block in enumerate(stack.blocks) for _ in range(block.repeats)), choices, strict=True))
    # Layers that do the same are checked and added up once.
    each = {(at, chosen): BlockPolicy(stack.blocks[at], chosen) for at, chosen in dict.fromkeys(pairs)}
    return [each[pair] for pair in pairs]


def one_residual_more(stack: Stack, choices: Choices, cuts: Cuts = ()) -> list[Choices]:
    """Every way to save one residual more in a run of equal blocks that do the same."""
    found = []
    blocks = singles(stack)
    for start, stop in runs(stack, choices, cuts):
        for index, (residual, choice) in enumerate(zip(blocks[start].residuals, choices[start], strict=True)):
            if choice is not Choice.SAVE and residual.may_save:
                changed = (*choices[start][:index], Choice.SAVE, *choices[start][index + 1 :])
                found.append((*choices[:start], *[changed] * (stop - start), *choices[stop:]))
    return found


def borders(stack: Stack, choices: Choices, cuts: Cuts) -> Cuts:
    """Where every run begins: with these as cuts it stays a run, whatever it is changed to."""
    return tuple(start for start, _ in runs(stack, choices, cuts))


def runs(stack: Stack, what: Sequence[Any], cuts: Cuts = ()) -> list[tuple[int, int]]:
    """Where runs of equal blocks that do the same, and are not cut, begin and end, in forward order."""
    found: list[tuple[int, int]] = []
    blocks = singles(stack)
    for index, (block, chosen) in enumerate(zip(blocks, what, strict=True)):
        if found and index not in cuts and blocks[found[-1][0]].name == block.name and what[found[-1][0]] == chosen:
            found[-1] = (found[-1][0], index + 1)
        else:
            found.append((index, index + 1))
    return found
