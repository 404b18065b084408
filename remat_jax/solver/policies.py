"""A block's policy (one choice per residual) with its costs, and the plan of a stack of blocks."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

from remat_jax.errors import PlanningError
from remat_jax.solver.problem import Block, Choice, HostLink, Stack, all_of


@dataclass(frozen=True)
class BlockPolicy:
    """A block and one choice for each of its residuals, in order; raises `PlanningError` for a choice that is not allowed.

    >>> from remat_jax.solver.problem import ResidualCosts
    >>> block = Block("layer", (ResidualCosts("x", 8.0), ResidualCosts("up", 32.0, 0.5, parents=("x",))), 1.0, 2.0)
    >>> policy = BlockPolicy(block, ("offload", "recompute"))
    >>> policy.saved_bytes, policy.host_bytes, policy.transient_bytes, policy.recompute_seconds
    (0.0, 8.0, 40.0, 0.5)
    """

    block: Block
    choices: tuple[Choice, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "choices", tuple(map(Choice, all_of("BlockPolicy: choices", self.choices, str))))
        if len(self.choices) != len(self.block.residuals):
            raise PlanningError(f"BlockPolicy: {len(self.choices)} choices for {len(self.block.residuals)} residuals.")
        for residual, choice in zip(self.block.residuals, self.choices, strict=True):
            if choice not in residual.choices:
                raise PlanningError(f"BlockPolicy: {residual.name!r} of {self.block.name!r} cannot be {choice.value!r}.")
            absent = [name for name in residual.parents if self.of[name] is Choice.UNUSED]
            if choice is Choice.RECOMPUTE and absent:
                raise PlanningError(
                    f"BlockPolicy: recomputing {residual.name!r} needs its parents {absent}, which the policy leaves unused."
                )

    @cached_property
    def of(self) -> dict[str, Choice]:
        """A dict from residual name to choice."""
        return {residual.name: choice for residual, choice in zip(self.block.residuals, self.choices, strict=True)}

    def _total(self, cost: str, *choices: Choice) -> float:
        """The sum of an attribute of `ResidualCosts` over the residuals with these choices."""
        pairs = zip(self.block.residuals, self.choices, strict=True)
        costs: list[float] = [getattr(residual, cost) for residual, choice in pairs if choice in choices]
        return sum(costs)

    @cached_property
    def saved_bytes(self) -> float:
        """Device bytes live between the forward and the backward pass, including `Block.input_bytes`."""
        return self.block.input_bytes + self._total("bytes", Choice.SAVE)

    @cached_property
    def host_bytes(self) -> float:
        """Bytes in host memory."""
        return self._total("bytes", Choice.OFFLOAD)

    @cached_property
    def transient_bytes(self) -> float:
        """Additional device bytes during the block's own backward pass."""
        recomputed = self.block.recomputed_share * self._total("bytes", Choice.RECOMPUTE)
        return self.block.working_bytes + recomputed + self.block.fetched_share * self.host_bytes

    @cached_property
    def recompute_seconds(self) -> float:
        """Seconds to recompute residuals."""
        return self._total("seconds", Choice.RECOMPUTE)

    @cached_property
    def kept_seconds(self) -> float:
        """Seconds to save and offload residuals, without the copies to and from the host."""
        return self._total("kept_seconds", Choice.SAVE, Choice.OFFLOAD)

    def extra_seconds(self, link: HostLink | None) -> float:
        """Seconds to keep and recompute residuals, including copies that the block's compute does not hide."""
        work = self.recompute_seconds + self.kept_seconds
        if not self.host_bytes or link is None:
            return work
        work += link.seconds_per_byte * self.host_bytes
        out = link.exposed_out(self.host_bytes, self.block.forward_seconds)
        return work + out + link.exposed_in(self.host_bytes, self.block.backward_seconds + work)


@dataclass(frozen=True)
class StackPlan:
    """A plan for a stack.

    Attributes:
        policies: one policy per block, in forward order.
        seconds: time of the whole step.
        peak_bytes: peak device memory, including fixed bytes.
        host_bytes: bytes in host memory.
        extra_seconds: time to keep, recompute and copy residuals.
        lower_bound: the solver's lower bound on the seconds of any plan.
        cuts: indices of blocks, in forward order, before which a scan is cut although both sides have the same policy.
    """

    policies: tuple[BlockPolicy, ...]
    seconds: float
    peak_bytes: float
    host_bytes: float
    extra_seconds: float
    lower_bound: float = 0.0
    cuts: tuple[int, ...] = ()


def scans(blocks: Sequence[Block], keys: Sequence[Any], cuts: Collection[int] = ()) -> list[tuple[int, int]]:
    """The first block of each scan, and the first block after it.

    Consecutive equal blocks with equal keys, such as their choices, are in one scan, unless it is cut before one of them
    (`StackPlan.cuts`). A block without late bytes is alone, because only its own bytes matter.
    """
    each = list(zip((block.name for block in blocks), keys, strict=True))
    joined = (at > 0 and block.late_bytes and at not in cuts and each[at] == each[at - 1] for at, block in enumerate(blocks))
    starts = [at for at, is_joined in enumerate(joined) if not is_joined]
    return list(pairwise([*starts, len(each)]))


def not_yet_allocated(blocks: Sequence[Block], spans: Sequence[tuple[int, int]]) -> list[float]:
    """For each scan of `scans`, the late bytes of earlier scans that are not allocated while it runs backward.

    Scans of one kind and of the same length share the zeros from which their gradients start, so the gradients of all of them
    are there once the first runs backward. A scan of one layer is no loop, and needs no zeros.
    """
    if not any(block.late_bytes for block in blocks):
        return [0.0] * len(spans)
    free = []
    for at in range(len(spans)):
        begun = {(blocks[first].name, stop - first) for first, stop in spans[at:] if stop - first > 1}
        earlier = (each for each in spans[:at] if (blocks[each[0]].name, each[1] - each[0]) not in begun)
        free.append(sum((stop - first) * blocks[first].late_bytes for first, stop in earlier))
    return free


def peak_bytes(stack: Stack, policies: Sequence[BlockPolicy], cuts: Collection[int] = ()) -> float:
    """A stack's peak device memory: the fixed bytes, plus the largest sum, over the blocks, of a block's transient bytes and
    the bytes saved by the block and all earlier blocks, without late bytes of earlier blocks (`not_yet_allocated`).

    The blocks of one scan (`scans`) count as one block.
    """
    blocks = [policy.block for policy in policies]
    spans = scans(blocks, [policy.choices for policy in policies], cuts)
    kept = peak = stack.fixed_bytes
    for (start, stop), free in zip(spans, not_yet_allocated(blocks, spans), strict=True):
        kept += sum(policy.saved_bytes for policy in policies[start:stop])
        peak = max(peak, kept + policies[start].transient_bytes - free)
    return peak


def stack_plan(stack: Stack, policies: Sequence[BlockPolicy], *, bound: float = 0.0, cuts: tuple[int, ...] = ()) -> StackPlan:
    """The plan with these policies, one per block; ``bound`` is the solver's lower bound on the extra seconds."""
    runs = stack.runs()
    run_of_block = [at for at, run in enumerate(runs) for _ in range(run.repeats)]
    chosen = list(zip(run_of_block, (policy.choices for policy in policies), strict=True))
    # Equal layers under equal policies share a `BlockPolicy`, which is checked and added up once.
    distinct = {(at, choices): BlockPolicy(runs[at], choices) for at, choices in dict.fromkeys(chosen)}
    checked = tuple(distinct[each] for each in chosen)
    extra = sum(policy.extra_seconds(stack.link) for policy in checked)
    return StackPlan(
        policies=checked,
        seconds=stack.base_seconds + extra,
        peak_bytes=peak_bytes(stack, checked, cuts),
        host_bytes=math.fsum(policy.host_bytes for policy in checked),
        extra_seconds=extra,
        lower_bound=stack.base_seconds + min(bound, extra),
        cuts=cuts,
    )
