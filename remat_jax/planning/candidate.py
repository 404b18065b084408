"""Candidates: training steps that may be compiled, with their estimates, and what compiling showed."""

from __future__ import annotations

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
    """The bytes that one block saves, recomputes and offloads. `cut`: if scanned, another scan begins with it."""

    saved: int
    recomputed: int
    offloaded: int
    cut: bool = False


Loads = tuple[Load, ...]
"""The load of each block, in forward order."""


@dataclass(frozen=True)
class KeptArrays:
    """What one layer keeps between the passes.

    Attributes:
      saved, offloaded: the names of the arrays that the backward pass reads and the layer keeps, on the device and on the host.
      checkpointed: whether the layer is a checkpoint; without one, XLA may fuse and recompute freely.
    """

    saved: frozenset[str]
    offloaded: frozenset[str] = frozenset()
    checkpointed: bool = True


@dataclass(frozen=True)
class StepCandidate:
    """A training step that may be compiled. Two candidates are equal if and only if they are the same program.

    These fields say which program it is, and candidates are compared by them:

      kept: what each layer keeps, in forward order.
      cuts: where a scan is cut between layers that keep the same.
      groups: for each group of layers, its first layer and the first layer after it.
      memory_limit: XLA's memory limit in bytes; None for the device's memory.

    Policies are made of these (`translate.policies_of`), so they have to say the same as the fields above:

      name: the named policy, or the text of policies by layer, such as one with groups of layers; empty for a mix of policies.
      choices: the solver's choices for each layer; None if they cannot express the program.

    These say what is known of it:

      source: the generator that proposed it.
      loads: the bytes of each layer.
      seconds: the time to keep, recompute and copy residuals, estimated from the traced program. It is only a part of the
        step's time.
      doubt: by how many seconds `seconds` may be off, in addition to the doubts of its family.
      expected_bytes: the predicted device bytes; None to predict them from the loads.
      near: a step that differs little from it, so that its time has the same pace; None for the pace of its family.
    """

    kept: tuple[KeptArrays, ...]
    cuts: Cuts = ()
    groups: tuple[tuple[int, int], ...] = ()
    memory_limit: int | None = None
    source: str = field(default="", compare=False)
    name: str = field(default="", compare=False)
    loads: Loads = field(default=(), compare=False, repr=False)
    seconds: float = field(default=0.0, compare=False)
    doubt: float = field(default=0.0, compare=False)
    choices: Choices | None = field(default=None, compare=False, repr=False)
    expected_bytes: int | None = field(default=None, compare=False)
    near: StepCandidate | None = field(default=None, compare=False, repr=False)

    @property
    def host_bytes(self) -> int:
        """Estimated bytes in host memory."""
        return sum(load.offloaded for load in self.loads)

    @property
    def saved_bytes(self) -> int:
        """Estimated bytes that the layers save on the device, without their inputs."""
        return sum(load.saved for load in self.loads)

    @property
    def checkpoints(self) -> bool:
        """Whether the layers are checkpoints, as under every policy but `off`."""
        return all(kept.checkpointed for kept in self.kept)

    @property
    def is_plain(self) -> bool:
        """Whether its memory follows from what its checkpoints keep: no groups, no memory limit."""
        return self.checkpoints and not self.groups and self.memory_limit is None

    @property
    def family(self) -> str:
        """Candidates of one family are compiled to similar multiples of their traced times."""
        if self.memory_limit is not None:
            return "memory limit"
        if not self.checkpoints:
            return "off"
        return "groups" if self.groups else "named" if self.name else "mix"

    @property
    def title(self) -> str:
        """The candidate in words, for findings."""
        limit = " with a memory limit" if self.memory_limit is not None else ""
        return (self.name or ("a mix of policies that offloads" if self.host_bytes else "a mix of policies")) + limit


@dataclass(frozen=True)
class Compiled:
    """The compiled memory of a candidate.

    Attributes:
      sound: False if compilation failed, the program may be miscompiled, or the compiler refused it as too large.
      sizes, program: all figures from the compiler, and the program that it compiled; None if compilation failed.
      more: the device bytes that it needs in addition with other kernels, which a GPU may choose (`without_triton`); None if it
        was not compiled with them.
      late: the timeout ended its compilation.
    """

    device_bytes: int
    host_bytes: int
    sound: bool = True
    sizes: Any = field(default=None, compare=False)
    program: Any = field(default=None, compare=False, repr=False)
    more: int | None = None
    late: bool = False

    @property
    def most_bytes(self) -> int:
        """The device bytes with those kernels that need most, as far as it was compiled with them."""
        return self.device_bytes + (self.more or 0)

    @property
    def refused(self) -> bool:
        """Whether the compiler refused the step because it does not fit the device; its memory is known, but not its time."""
        return bool(getattr(self.sizes, "refusal", ""))

    @property
    def unfinished(self) -> bool:
        """Whether its compilation was ended once the memory was known (`Sizes.unfinished`)."""
        return bool(getattr(self.sizes, "unfinished", False))

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
    if plan.cuts:
        return tuple(policy.choices for policy in plan.policies)
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
