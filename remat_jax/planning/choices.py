"""The choices of the single blocks of a stack: runs of equal blocks, and neighbouring plans."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from remat_jax.planning.fitting import singles
from remat_jax.solver import BlockPolicy, Choice, Stack, StackPlan, stack_plan

Choices = tuple[tuple[Choice, ...], ...]
"""For every single block in forward order, the choice for each of its residuals."""
Cuts = tuple[int, ...]
"""The blocks, counted through the stack, before which a scan is cut although the blocks on both sides have equal choices."""

_ORDERS: tuple[Callable[[BlockPolicy, BlockPolicy], Any], ...] = (
    # Blocks that offload come first: the very last block may not offload.
    lambda policy, last: (policy.host_bytes == 0, policy.saved_bytes),
    lambda policy, last: policy.choices == last.choices,
)
"""Sort keys for the blocks of a kind, from a block's policy and the last block's policy."""
_ALIKE = 1 + 1e-9
"""The tolerance for equal numbers that were summed in another order."""


def together(stack: Stack, plan: StackPlan) -> Choices:
    """The choices of a plan's blocks, with equal choices of a kind made adjacent if that costs neither memory nor time.

    Blocks that keep least come first if possible: residuals of the last blocks, nearest the loss, live shortest.
    """
    for rank in _ORDERS:
        alike: list[BlockPolicy] = []
        for block in stack.blocks:
            of_kind = plan.policies[len(alike) : len(alike) + block.repeats]
            order = list(dict.fromkeys(policy.choices for policy in of_kind))
            alike += sorted(of_kind, key=lambda policy: (rank(policy, of_kind[-1]), order.index(policy.choices)))
        changed = stack_plan(stack, alike)
        if changed.peak_bytes <= plan.peak_bytes * _ALIKE and changed.extra_seconds <= plan.extra_seconds * _ALIKE:
            return tuple(policy.choices for policy in alike)
    return tuple(policy.choices for policy in plan.policies)


def block_policies(stack: Stack, choices: Choices) -> list[BlockPolicy]:
    """The policy of every single block of a stack."""
    pairs = list(zip((at for at, block in enumerate(stack.blocks) for _ in range(block.repeats)), choices, strict=True))
    # Layers with equal choices are checked and summed once.
    each = {(at, chosen): BlockPolicy(stack.blocks[at], chosen) for at, chosen in dict.fromkeys(pairs)}
    return [each[pair] for pair in pairs]


def one_residual_more(stack: Stack, choices: Choices, cuts: Cuts = ()) -> list[Choices]:
    """Every way to save one residual more in a run of equal blocks with equal choices."""
    neighbours = []
    blocks = singles(stack)
    for start, stop in runs(stack, choices, cuts):
        for index, (residual, choice) in enumerate(zip(blocks[start].residuals, choices[start], strict=True)):
            if choice is not Choice.SAVE and residual.may_save:
                changed = (*choices[start][:index], Choice.SAVE, *choices[start][index + 1 :])
                neighbours.append((*choices[:start], *[changed] * (stop - start), *choices[stop:]))
    return neighbours


def borders(stack: Stack, choices: Choices, cuts: Cuts) -> Cuts:
    """The start of every run: with these cuts each run stays a run after any change of its choices."""
    return tuple(start for start, _ in runs(stack, choices, cuts))


def runs(stack: Stack, what: Sequence[Any], cuts: Cuts = ()) -> list[tuple[int, int]]:
    """The start and end of each run of equal blocks with equal choices and no cut, in forward order."""
    spans: list[tuple[int, int]] = []
    blocks = singles(stack)
    for index, (block, chosen) in enumerate(zip(blocks, what, strict=True)):
        if spans and index not in cuts and blocks[spans[-1][0]].name == block.name and what[spans[-1][0]] == chosen:
            spans[-1] = (spans[-1][0], index + 1)
        else:
            spans.append((index, index + 1))
    return spans
