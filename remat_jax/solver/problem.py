"""A planning problem as plain data: blocks with residuals, stacks of blocks, and the link to host memory.

Bytes are per device, seconds per training step. Both may be fractions in any consistent unit. ``docs/how/planner.md`` states
the problem and how it is solved.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from graphlib import CycleError, TopologicalSorter

from remat_jax.errors import PlanningError, nearest
from remat_jax.solver.checks import all_of, check_count, check_names, check_number, check_share


@dataclass(frozen=True)
class HostLink:
    """The link to host memory: one queue in each direction, shared by all copies in that direction.

    Attributes:
        out_bytes_per_s: the achieved rate from device to host, not the nominal rate.
        in_bytes_per_s: the achieved rate from host to device.
        hidden_share: the share of a block's compute time that can run beside its copies, from 0 to 1.
        memory_bytes_per_s: the rate of device memory, which copies use too; infinite if that is not counted.

    Raises:
        PlanningError: a rate is not positive, or the share is not between 0 and 1.

    >>> HostLink(50.0, 50.0).exposed_out(100.0, 1.5)
    0.5
    """

    out_bytes_per_s: float
    in_bytes_per_s: float
    hidden_share: float = 1.0
    memory_bytes_per_s: float = math.inf

    def __post_init__(self) -> None:
        check_number("HostLink: out_bytes_per_s", self.out_bytes_per_s, positive=True)
        check_number("HostLink: in_bytes_per_s", self.in_bytes_per_s, positive=True)
        check_share("HostLink: hidden_share", self.hidden_share)
        check_number("HostLink: memory_bytes_per_s", self.memory_bytes_per_s, positive=True, infinite=True)

    @property
    def seconds_per_byte(self) -> float:
        """Seconds of device memory for each offloaded byte: the copy out reads it, and the copy back writes it."""
        return 2 / self.memory_bytes_per_s

    def exposed_out(self, size: float, compute_seconds: float) -> float:
        """The seconds of a copy of ``size`` bytes to the host that ``compute_seconds`` of compute do not hide."""
        return max(0.0, size / self.out_bytes_per_s - self.hidden_share * compute_seconds)

    def exposed_in(self, size: float, compute_seconds: float) -> float:
        """The same for the copy back to the device."""
        return max(0.0, size / self.in_bytes_per_s - self.hidden_share * compute_seconds)


@dataclass(frozen=True)
class ResidualCosts:
    """An array that a block's backward pass reads, or that another residual is computed from.

    Attributes:
        name: unique in its block.
        bytes: its size.
        seconds: time to recompute it from its parents; None if that is impossible, as for a block's input.
        parents: the residuals of the same block that it is computed from.
        may_save, may_offload: whether it may be kept in device memory, in host memory.
        needed: whether the backward pass reads it. Any other residual is kept or computed only for its children.
        kept_seconds: time that keeping it takes, on either side: writing it, and copying it into the stack of a scan.

    Raises:
        PlanningError: a number is negative, NaN or infinite, or no choice is allowed for a needed residual.
    """

    name: str
    bytes: float
    seconds: float | None = None
    parents: tuple[str, ...] = ()
    may_save: bool = True
    may_offload: bool = True
    needed: bool = True
    kept_seconds: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "parents", all_of(f"ResidualCosts {self.name!r}: parents", self.parents, str))
        check_number(f"ResidualCosts {self.name!r}: bytes", self.bytes)
        check_number(f"ResidualCosts {self.name!r}: kept_seconds", self.kept_seconds)
        if self.seconds is not None:
            check_number(f"ResidualCosts {self.name!r}: seconds", self.seconds)
        if self.needed and self.seconds is None and not self.may_save and not self.may_offload:
            raise PlanningError(
                f"ResidualCosts {self.name!r}: backward needs it, but it can be neither saved, offloaded nor recomputed; "
                "allow one of them, or give seconds."
            )


@dataclass(frozen=True)
class Block:
    """The unit of checkpointing: its residuals, its times, and the memory it needs while it runs.

    The backward pass of a block needs, besides the saved bytes: ``working_bytes``, ``recomputed_share`` of the bytes of its
    recomputed residuals, and ``fetched_share`` of the bytes of its offloaded residuals. With a share of 1 all of these
    residuals are alive at once. With less they are alive one after the other; with more there are buffers for the next block.

    Attributes:
        name: unique in its stack.
        residuals: in any order.
        forward_seconds, backward_seconds: times of one block without what its residuals cost.
        working_bytes: the working set of its backward pass, whatever the policy.
        input_bytes: size of an input that every policy keeps on the device; 0 if the input is among the residuals.
        repeats: the number of consecutive blocks.
        recomputed_share, fetched_share: see above.

    Raises:
        PlanningError: a number is wrong, a name occurs twice, a parent is unknown, or the parents form a cycle.

    >>> Block("layer", (ResidualCosts("x", 8.0), ResidualCosts("up", 32.0, 0.5, parents=("x",))), 1.0, 2.0, repeats=24).order
    (0, 1)
    """

    name: str
    residuals: tuple[ResidualCosts, ...]
    forward_seconds: float
    backward_seconds: float
    working_bytes: float = 0.0
    input_bytes: float = 0.0
    repeats: int = 1
    recomputed_share: float = 1.0
    fetched_share: float = 1.0

    def __post_init__(self) -> None:
        where = f"Block {self.name!r}"
        object.__setattr__(self, "residuals", all_of(f"{where}: residuals", self.residuals, ResidualCosts))
        for name in ("forward_seconds", "backward_seconds", "working_bytes", "input_bytes"):
            check_number(f"{where}: {name}", getattr(self, name))
        for name in ("recomputed_share", "fetched_share"):
            check_number(f"{where}: {name}", getattr(self, name))
        check_count(f"{where}: repeats", self.repeats)
        check_names(f"{where}: residuals", (residual.name for residual in self.residuals))
        object.__setattr__(self, "_order", _order(where, self.residuals))

    @property
    def order(self) -> tuple[int, ...]:
        """The indices of the residuals, parents before children."""
        return self._order  # type: ignore[attr-defined,no-any-return]

    def without_offload(self) -> Block:
        """The same block without offload.

        Raises:
            PlanningError: a residual that the backward pass needs can only be offloaded.
        """
        return replace(self, residuals=tuple(replace(residual, may_offload=False) for residual in self.residuals))


def _order(where: str, residuals: Sequence[ResidualCosts]) -> tuple[int, ...]:
    index = {each.name: number for number, each in enumerate(residuals)}
    for each in residuals:
        for parent in each.parents:
            if parent not in index:
                raise PlanningError(
                    f"{where}: {each.name!r} has the parent {parent!r}, which is not one of its residuals."
                    + nearest(parent, index)
                )
    try:
        names = TopologicalSorter({each.name: each.parents for each in residuals}).static_order()
        return tuple(index[name] for name in names)
    except CycleError as error:
        circle = " → ".join(reversed(error.args[1]))
        raise PlanningError(
            f"{where}: residuals are computed from each other in a circle: {circle}; remove one parent."
        ) from None


@dataclass(frozen=True)
class Stack:
    """A model as a sequence of blocks, the first nearest the input: a vision tower, a language model, a head.

    Attributes:
        blocks: the kinds of blocks in the order of the forward pass; ``repeats`` is the number of blocks of a kind.
        link: the link to host memory; None without offload.
        fixed_bytes: device memory in use during the whole step: parameters, gradients, optimizer state.
        offload_last: whether the very last block may offload. Its backward pass follows its forward pass at once, so no
            compute hides the copies.

    Raises:
        PlanningError: there is no block, a name occurs twice, or a number is wrong.
    """

    blocks: tuple[Block, ...]
    link: HostLink | None = None
    fixed_bytes: float = 0.0
    offload_last: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "blocks", all_of("Stack: blocks", self.blocks, Block))
        if not self.blocks:
            raise PlanningError("Stack: blocks is empty; give at least one Block.")
        check_names("Stack: blocks", (block.name for block in self.blocks))
        check_number("Stack: fixed_bytes", self.fixed_bytes)
        if self.link is not None and not isinstance(self.link, HostLink):
            raise PlanningError(f"Stack: link={self.link!r}; expected a HostLink, or None where nothing may be offloaded.")
        for block in self.blocks if self.link is None else self.blocks[-1:] if not self.offload_last else ():
            stuck = [each.name for each in block.residuals if each.needed and each.seconds is None and not each.may_save]
            if stuck:
                why = "there is no link" if self.link is None else "the last block may not"
                raise PlanningError(
                    f"Stack: residuals {stuck} of {block.name!r} can only be offloaded, but {why}; let them be saved, or give "
                    "a link and offload_last=True."
                )

    def runs(self) -> tuple[Block, ...]:
        """The blocks as solvers see them: without offloads that are not allowed, and the last block of each run by itself.

        A run needs most memory at its last block, and the very last block may not offload.
        """
        divided: list[Block] = []
        for block in self.blocks:
            allowed = block if self.link is not None else block.without_offload()
            if block.repeats > 1:
                divided.append(replace(allowed, repeats=block.repeats - 1))
            divided.append(replace(allowed, repeats=1))
        if not self.offload_last:
            divided[-1] = divided[-1].without_offload()
        return tuple(divided)

    def positions(self) -> tuple[Block, ...]:
        """Every single block, in the order of the forward pass."""
        return tuple(block for run in self.runs() for block in [replace(run, repeats=1)] * run.repeats)

    @property
    def base_seconds(self) -> float:
        """The time of a step without what its residuals cost."""
        return sum(block.repeats * (block.forward_seconds + block.backward_seconds) for block in self.blocks)
