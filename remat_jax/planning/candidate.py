"""Candidate steps: the choices of their blocks, their bytes and estimated time, and their compiled memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from remat_jax.solver import Block, BlockPolicy, Choice, Stack, StackPlan, stack_plan

Choices = tuple[tuple[Choice, ...], ...]
"""For each block in forward order, the choice for each of its residuals."""
Cuts = tuple[int, ...]
"""Indices of blocks, in forward order. A scan is cut before each of these blocks, even if the previous block has the same
choices."""

FAILED = 2**62
"""The device bytes of a candidate that could not be compiled."""

_ORDERS: tuple[Callable[[BlockPolicy, BlockPolicy], Any], ...] = (
    # Blocks that offload come first, because the stack's last block may not offload; on ties, the block that saves less.
    lambda policy, last: (policy.host_bytes == 0, policy.saved_bytes),
    lambda policy, last: policy.choices == last.choices,
)
"""Sort keys for the blocks of one kind, tried in this order: functions of a block's policy and of the last block's policy. The
second key puts blocks with the last block's choices at the end."""
_ROUNDING = 1 + 1e-9
"""Two sums count as equal up to this factor, because the same numbers may be added in different orders."""


@dataclass(frozen=True)
class Load:
    """The bytes that one block saves, recomputes and offloads."""

    saved: int
    recomputed: int
    offloaded: int


Loads = tuple[Load, ...]
"""The load of each block, in forward order."""


@dataclass(frozen=True)
class StepCandidate:
    """One candidate for the training step.

    Attributes:
      name: the named policy, or the text of groups of layers; empty for a plan of the solver.
      seconds: the time to keep, recompute and copy residuals, estimated from the traced program. It is only a part of the
        step's time.
      choices: the choices of a plan of the solver; None for a named policy or groups of layers.
      like: the choices that are equivalent to the named policy; None if there are none.
      cuts: where a scan is cut between blocks with equal choices. A cut changes the compiled memory, but not the estimates.
      inside: for groups of layers, the policy of each layer inside a group; else empty.
      grouped: the number of layers in groups, counted from the first layer.
      expected_bytes: the predicted device bytes; None to predict them from the loads.
    """

    name: str
    loads: Loads
    seconds: float
    choices: Choices | None = None
    cuts: Cuts = ()
    like: Choices | None = None
    inside: str = ""
    grouped: int = 0
    expected_bytes: int | None = None

    @property
    def policy_name(self) -> str:
        """The named policy of every block, or of every layer inside groups; empty for a plan of the solver."""
        return self.inside or self.name

    @property
    def effective_choices(self) -> Choices | None:
        """The choices of each block; None if no choices describe the candidate."""
        return self.like if self.choices is None else self.choices

    @property
    def host_bytes(self) -> int:
        """Estimated bytes in host memory."""
        return sum(load.offloaded for load in self.loads)

    def is_same(self, other: StepCandidate) -> bool:
        """Whether both candidates count as the same program, because all their estimates are equal."""
        mine, theirs = ((step.name == "off", step.loads, step.cuts, step.inside) for step in (self, other))
        return mine == theirs and math.isclose(self.seconds, other.seconds, rel_tol=1e-9, abs_tol=1e-15)


@dataclass(frozen=True)
class Compiled:
    """The compiled memory of a candidate. `sizes` has all figures from the compiler; it is None if compilation failed.

    `sound` is False if compilation failed or the program may be miscompiled.
    """

    device_bytes: int
    host_bytes: int
    sound: bool = True
    sizes: Any = field(default=None, compare=False)

    @property
    def seconds(self) -> float | None:
        """The modelled time of the compiled schedule; None if unknown."""
        return None if self.sizes is None else self.sizes.seconds


@dataclass(frozen=True)
class Tried:
    """A compiled candidate and its predicted memory."""

    candidate: StepCandidate
    compiled: Compiled
    predicted_bytes: int


def singles(stack: Stack) -> list[Block]:
    """The block of each layer, in forward order."""
    return [block for block in stack.blocks for _ in range(block.repeats)]


def runs(stack: Stack, actions: Sequence[Any], cuts: Cuts = ()) -> list[tuple[int, int]]:
    """The start and end of each run of equal blocks with equal actions and no cut inside, in forward order."""
    each = list(zip((block.name for block in singles(stack)), actions, strict=True))
    starts = [index for index, block in enumerate(each) if not index or index in cuts or block != each[index - 1]]
    return list(pairwise([*starts, len(each)]))


def block_policies(stack: Stack, choices: Choices) -> list[BlockPolicy]:
    """The policy of each block of a stack, in forward order."""
    pairs = list(zip((at for at, block in enumerate(stack.blocks) for _ in range(block.repeats)), choices, strict=True))
    # Layers with equal choices share a policy, which is checked and summed once.
    policies = {(at, chosen): BlockPolicy(stack.blocks[at], chosen) for at, chosen in dict.fromkeys(pairs)}
    return [policies[pair] for pair in pairs]


def choices_together(stack: Stack, plan: StackPlan) -> Choices:
    """A plan's choices, reordered so that equal choices of one kind are adjacent, if that costs neither memory nor time.

    Blocks that save least come first if possible, because residuals of later blocks have shorter live ranges.
    """
    for rank in _ORDERS:
        ordered: list[BlockPolicy] = []
        for block in stack.blocks:
            of_kind = plan.policies[len(ordered) : len(ordered) + block.repeats]
            first = list(dict.fromkeys(policy.choices for policy in of_kind))
            ordered += sorted(of_kind, key=lambda policy: (rank(policy, of_kind[-1]), first.index(policy.choices)))
        changed = stack_plan(stack, ordered)
        if changed.peak_bytes <= plan.peak_bytes * _ROUNDING and changed.extra_seconds <= plan.extra_seconds * _ROUNDING:
            return tuple(policy.choices for policy in ordered)
    return tuple(policy.choices for policy in plan.policies)


def one_residual_more(stack: Stack, choices: Choices, cuts: Cuts = ()) -> list[Choices]:
    """The choices of each variant that saves one more residual, in every block of one run (`runs`)."""
    neighbours = []
    blocks = singles(stack)
    for start, stop in runs(stack, choices, cuts):
        for index, (residual, choice) in enumerate(zip(blocks[start].residuals, choices[start], strict=True)):
            if choice is not Choice.SAVE and residual.may_save:
                changed = (*choices[start][:index], Choice.SAVE, *choices[start][index + 1 :])
                neighbours.append((*choices[:start], *[changed] * (stop - start), *choices[stop:]))
    return neighbours
