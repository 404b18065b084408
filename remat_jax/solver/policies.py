"""What one block does with its residuals, what that costs, and the plan of a stack of such blocks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

from remat_jax.errors import PlanningError
from remat_jax.solver.checks import all_of
from remat_jax.solver.problem import Block, HostLink, Stack


class Choice(StrEnum):
    """What happens to a residual. ``unused``: neither kept nor computed again, where backward does not need it.

    >>> Choice("offload").value
    'offload'
    """

    SAVE = "save"
    OFFLOAD = "offload"
    RECOMPUTE = "recompute"
    UNUSED = "unused"


@dataclass(frozen=True)
class BlockPolicy:
    """A block and a choice for each of its residuals, in their order.

    Raises:
        PlanningError: a choice is not allowed for its residual, or needs a parent that is not there.

    >>> from remat_jax.solver.problem import Residual
    >>> block = Block("layer", (Residual("x", 8.0), Residual("up", 32.0, 0.5, parents=("x",))), 1.0, 2.0)
    >>> policy = BlockPolicy(block, ("offload", "recompute"))
    >>> policy.saved_bytes, policy.host_bytes, policy.transient_bytes, policy.recompute_seconds
    (0.0, 8.0, 40.0, 0.5)
    """

    block: Block
    choices: tuple[Choice, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "choices", tuple(Choice(one) for one in all_of("BlockPolicy: choices", self.choices, str)))
        if len(self.choices) != len(self.block.residuals):
            raise PlanningError(f"BlockPolicy: {len(self.choices)} choices for {len(self.block.residuals)} residuals.")
        for residual, choice in zip(self.block.residuals, self.choices, strict=True):
            wrong = (
                (choice is Choice.SAVE and not residual.may_save)
                or (choice is Choice.OFFLOAD and not residual.may_offload)
                or (choice is Choice.RECOMPUTE and residual.seconds is None)
                or (choice is Choice.UNUSED and residual.needed)
            )
            if wrong:
                raise PlanningError(f"BlockPolicy: {residual.name!r} of {self.block.name!r} cannot be {choice.value!r}.")
            lost = [name for name in residual.parents if self.of[name] is Choice.UNUSED]
            if choice is Choice.RECOMPUTE and lost:
                raise PlanningError(f"BlockPolicy: recomputing {residual.name!r} needs {lost}, which are not there.")

    @cached_property
    def of(self) -> dict[str, Choice]:
        """The choice by the residual's name."""
        return {one.name: choice for one, choice in zip(self.block.residuals, self.choices, strict=True)}

    def _bytes(self, wanted: Choice) -> float:
        return sum(one.bytes for one, choice in zip(self.block.residuals, self.choices, strict=True) if choice is wanted)

    @cached_property
    def saved_bytes(self) -> float:
        """Kept on the device between the passes, the block's input included where it is always kept."""
        return self.block.input_bytes + self._bytes(Choice.SAVE)

    @cached_property
    def host_bytes(self) -> float:
        """Kept in host memory."""
        return self._bytes(Choice.OFFLOAD)

    @cached_property
    def transient_bytes(self) -> float:
        """On the device besides, while the block's backward pass runs."""
        again = self.block.recomputed_share * self._bytes(Choice.RECOMPUTE)
        return self.block.working_bytes + again + self.block.fetched_share * self.host_bytes

    @cached_property
    def recompute_seconds(self) -> float:
        """Of what is computed again."""
        pairs = zip(self.block.residuals, self.choices, strict=True)
        return sum(one.seconds or 0.0 for one, choice in pairs if choice is Choice.RECOMPUTE)

    def extra_seconds(self, link: HostLink | None) -> float:
        """What it costs over saving everything: computing again, and the copies that the block's compute does not hide."""
        if not self.host_bytes or link is None:
            return self.recompute_seconds
        backward = self.block.backward_seconds + self.recompute_seconds
        out = link.exposed_out(self.host_bytes, self.block.forward_seconds)
        return self.recompute_seconds + out + link.exposed_in(self.host_bytes, backward)


@dataclass(frozen=True)
class Range:
    """Blocks of one kind that follow each other and do the same.

    Attributes:
        block: the kind's name.
        first: the index of the first of them within its kind.
        count: how many.
        policy: what each of them does.
    """

    block: str
    first: int
    count: int
    policy: BlockPolicy


@dataclass(frozen=True)
class StackPlan:
    """A plan for a stack.

    Attributes:
        ranges: what each block does, in the order of the forward pass.
        seconds: of the whole step.
        peak_bytes: on the device, fixed bytes included.
        host_bytes: in host memory.
        extra_seconds: over saving everything.
        lower_bound: the seconds that no plan is below, as far as the solver knows.
    """

    ranges: tuple[Range, ...]
    seconds: float
    peak_bytes: float
    host_bytes: float
    extra_seconds: float
    lower_bound: float = 0.0

    @property
    def policies(self) -> tuple[BlockPolicy, ...]:
        """Of every single block, in the order of the forward pass."""
        return tuple(one.policy for one in self.ranges for _ in range(one.count))


def peak_bytes(stack: Stack, policies: Sequence[BlockPolicy]) -> float:
    """The most that a stack needs on the device: what is kept up to a block, and what that block needs besides.

    >>> from remat_jax.solver.problem import Residual
    >>> stack = Stack((Block("layer", (Residual("x", 8.0),), 1.0, 2.0, working_bytes=5.0, repeats=3),), fixed_bytes=100.0)
    >>> peak_bytes(stack, [BlockPolicy(one, ("save",)) for one in stack.positions()])
    129.0
    """
    kept, peak = stack.fixed_bytes, stack.fixed_bytes
    for policy in policies:
        kept += policy.saved_bytes
        peak = max(peak, kept + policy.transient_bytes)
    return peak


def stack_plan(stack: Stack, policies: Sequence[BlockPolicy], *, bound: float = 0.0) -> StackPlan:
    """The plan in which each block, in the order of the forward pass, does what ``policies`` say.

    ``bound`` is the least extra time that the solver left possible.
    """
    placed = [(at, block) for at, run in enumerate(stack.runs()) for block in [run] * run.repeats]
    # Layers that do the same are checked and added up once.
    each: dict[tuple[int, tuple[Choice, ...]], BlockPolicy] = {}
    found: list[BlockPolicy] = []
    for (at, block), one in zip(placed, policies, strict=True):
        if (at, one.choices) not in each:
            each[at, one.choices] = BlockPolicy(block, one.choices)
        found.append(each[at, one.choices])
    extra = sum(one.extra_seconds(stack.link) for one in found)
    return StackPlan(
        ranges=ranges(found),
        seconds=stack.base_seconds + extra,
        peak_bytes=peak_bytes(stack, found),
        host_bytes=math.fsum(one.host_bytes for one in found),
        extra_seconds=extra,
        lower_bound=stack.base_seconds + min(bound, extra),
    )


def ranges(policies: Sequence[BlockPolicy]) -> tuple[Range, ...]:
    """Blocks of one kind that follow each other and do the same, brought together."""
    found: list[Range] = []
    for policy in policies:
        name, last = policy.block.name, found[-1] if found else None
        if last is None or last.block != name:
            found.append(Range(name, 0, 1, policy))
        elif last.policy.choices == policy.choices:
            found[-1] = Range(name, last.first, last.count + 1, last.policy)
        else:
            found.append(Range(name, last.first + last.count, 1, policy))
    return tuple(found)
