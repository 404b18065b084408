"""The choices of a block for its residuals, their costs, and the plan of a stack of blocks."""

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
    """What happens to a residual. ``unused``: neither kept nor recomputed, if the backward pass does not need it.

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
        PlanningError: a choice is not allowed for its residual, or needs an absent parent.

    >>> from remat_jax.solver.problem import ResidualCosts
    >>> block = Block("layer", (ResidualCosts("x", 8.0), ResidualCosts("up", 32.0, 0.5, parents=("x",))), 1.0, 2.0)
    >>> policy = BlockPolicy(block, ("offload", "recompute"))
    >>> policy.saved_bytes, policy.host_bytes, policy.transient_bytes, policy.recompute_seconds
    (0.0, 8.0, 40.0, 0.5)
    """

    block: Block
    choices: tuple[Choice, ...]

    def __post_init__(self) -> None:
        object.__setattr__(
            self, "choices", tuple(Choice(choice) for choice in all_of("BlockPolicy: choices", self.choices, str))
        )
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
            absent = [name for name in residual.parents if self.of[name] is Choice.UNUSED]
            if choice is Choice.RECOMPUTE and absent:
                raise PlanningError(f"BlockPolicy: recomputing {residual.name!r} needs {absent}, which are missing.")

    @cached_property
    def of(self) -> dict[str, Choice]:
        """The choice for each residual's name."""
        return {residual.name: choice for residual, choice in zip(self.block.residuals, self.choices, strict=True)}

    def _bytes(self, wanted: Choice) -> float:
        return sum(each.bytes for each, choice in zip(self.block.residuals, self.choices, strict=True) if choice is wanted)

    @cached_property
    def saved_bytes(self) -> float:
        """Device bytes between the forward and the backward pass, including an input that every policy keeps."""
        return self.block.input_bytes + self._bytes(Choice.SAVE)

    @cached_property
    def host_bytes(self) -> float:
        """Bytes in host memory."""
        return self._bytes(Choice.OFFLOAD)

    @cached_property
    def transient_bytes(self) -> float:
        """Further device bytes while the block's backward pass runs."""
        recomputed = self.block.recomputed_share * self._bytes(Choice.RECOMPUTE)
        return self.block.working_bytes + recomputed + self.block.fetched_share * self.host_bytes

    @cached_property
    def recompute_seconds(self) -> float:
        """Seconds of the recomputation."""
        pairs = zip(self.block.residuals, self.choices, strict=True)
        return sum(residual.seconds or 0.0 for residual, choice in pairs if choice is Choice.RECOMPUTE)

    @cached_property
    def kept_seconds(self) -> float:
        """Seconds that keeping residuals takes."""
        pairs = zip(self.block.residuals, self.choices, strict=True)
        return sum(residual.kept_seconds for residual, choice in pairs if choice in (Choice.SAVE, Choice.OFFLOAD))

    def extra_seconds(self, link: HostLink | None) -> float:
        """What the residuals cost: keeping them, recomputation, and copies that the block's compute does not hide."""
        work = self.recompute_seconds + self.kept_seconds
        if not self.host_bytes or link is None:
            return work
        work += link.seconds_per_byte * self.host_bytes
        out = link.exposed_out(self.host_bytes, self.block.forward_seconds)
        return work + out + link.exposed_in(self.host_bytes, self.block.backward_seconds + work)


@dataclass(frozen=True)
class Range:
    """Consecutive blocks of one kind under one policy.

    Attributes:
        block: the kind's name.
        first: the index of the first block within its kind.
        count: the number of blocks.
        policy: the policy of each block.
    """

    block: str
    first: int
    count: int
    policy: BlockPolicy


@dataclass(frozen=True)
class StackPlan:
    """A plan for a stack.

    Attributes:
        ranges: the blocks with their policies, in the order of the forward pass.
        seconds: time of the whole step.
        peak_bytes: peak device memory, including fixed bytes.
        host_bytes: bytes in host memory.
        extra_seconds: what the residuals cost: keeping, recomputing and copying them.
        lower_bound: the solver's lower bound of any plan's seconds.
    """

    ranges: tuple[Range, ...]
    seconds: float
    peak_bytes: float
    host_bytes: float
    extra_seconds: float
    lower_bound: float = 0.0

    @property
    def policies(self) -> tuple[BlockPolicy, ...]:
        """The policy of every single block, in the order of the forward pass."""
        return tuple(blocks.policy for blocks in self.ranges for _ in range(blocks.count))


def peak_bytes(stack: Stack, policies: Sequence[BlockPolicy]) -> float:
    """A stack's peak device memory: the largest sum of the bytes saved up to a block and the block's own need.

    >>> from remat_jax.solver.problem import ResidualCosts
    >>> stack = Stack((Block("layer", (ResidualCosts("x", 8.0),), 1.0, 2.0, working_bytes=5.0, repeats=3),), fixed_bytes=100.0)
    >>> peak_bytes(stack, [BlockPolicy(one, ("save",)) for one in stack.positions()])
    129.0
    """
    kept, peak = stack.fixed_bytes, stack.fixed_bytes
    for policy in policies:
        kept += policy.saved_bytes
        peak = max(peak, kept + policy.transient_bytes)
    return peak


def stack_plan(stack: Stack, policies: Sequence[BlockPolicy], *, bound: float = 0.0) -> StackPlan:
    """The plan with these policies, one for each block in the order of the forward pass.

    ``bound`` is the solver's lower bound of the extra time.
    """
    placed = [(at, block) for at, run in enumerate(stack.runs()) for block in [run] * run.repeats]
    # Equal layers under equal policies are checked and added up once.
    distinct: dict[tuple[int, tuple[Choice, ...]], BlockPolicy] = {}
    checked: list[BlockPolicy] = []
    for (at, block), policy in zip(placed, policies, strict=True):
        if (at, policy.choices) not in distinct:
            distinct[at, policy.choices] = BlockPolicy(block, policy.choices)
        checked.append(distinct[at, policy.choices])
    extra = sum(policy.extra_seconds(stack.link) for policy in checked)
    return StackPlan(
        ranges=ranges(checked),
        seconds=stack.base_seconds + extra,
        peak_bytes=peak_bytes(stack, checked),
        host_bytes=math.fsum(policy.host_bytes for policy in checked),
        extra_seconds=extra,
        lower_bound=stack.base_seconds + min(bound, extra),
    )


def ranges(policies: Sequence[BlockPolicy]) -> tuple[Range, ...]:
    """Consecutive blocks of one kind under one policy, joined."""
    joined: list[Range] = []
    for policy in policies:
        name, last = policy.block.name, joined[-1] if joined else None
        if last is None or last.block != name:
            joined.append(Range(name, 0, 1, policy))
        elif last.policy.choices == policy.choices:
            joined[-1] = Range(name, last.first, last.count + 1, last.policy)
        else:
            joined.append(Range(name, last.first + last.count, 1, policy))
    return tuple(joined)
