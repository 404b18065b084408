"""The forms of a planning problem: blocks with residuals, chains of stages, and the link to host memory. Plain data.

Bytes are those of one device, seconds those of one training step. Both may be fractions, and any unit will do that is the same
everywhere. The forms are written down, with what each solver makes of them, in ``docs/how/planner.md``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from graphlib import CycleError, TopologicalSorter

from remat_jax.errors import PlanningError, nearest
from remat_jax.solver.checks import all_of, check_count, check_names, check_number, check_share


@dataclass(frozen=True)
class HostLink:
    """The link to host memory: one queue in each direction, shared by all that is copied that way.

    Attributes:
        out_bytes_per_s: device to host, as it is reached, not as it is sold.
        in_bytes_per_s: host to device.
        hidden_share: the share of a block's compute time that can run beside its copies, from 0 to 1.

    Raises:
        PlanningError: a rate is not positive, or the share is not between 0 and 1.

    >>> HostLink(50.0, 50.0).exposed_out(100.0, 1.5)
    0.5
    """

    out_bytes_per_s: float
    in_bytes_per_s: float
    hidden_share: float = 1.0

    def __post_init__(self) -> None:
        check_number("HostLink: out_bytes_per_s", self.out_bytes_per_s, positive=True)
        check_number("HostLink: in_bytes_per_s", self.in_bytes_per_s, positive=True)
        check_share("HostLink: hidden_share", self.hidden_share)

    def exposed_out(self, size: float, compute_seconds: float) -> float:
        """The seconds of copying ``size`` bytes to the host that ``compute_seconds`` of compute do not hide."""
        return max(0.0, size / self.out_bytes_per_s - self.hidden_share * compute_seconds)

    def exposed_in(self, size: float, compute_seconds: float) -> float:
        """The same for copying them back."""
        return max(0.0, size / self.in_bytes_per_s - self.hidden_share * compute_seconds)


@dataclass(frozen=True)
class Residual:
    """An array that a block's backward pass reads, or that another residual is computed from.

    Attributes:
        name: unique in its block.
        bytes: what it takes while it is kept.
        seconds: what computing it again takes, once its parents are there; None where it cannot be, as for a block's input.
        parents: the residuals of the same block that it is computed from.
        may_save, may_offload: whether it may be kept in device memory, in host memory.
        needed: whether the backward pass reads it. One that is not is kept or computed only for its children.

    Raises:
        PlanningError: a number is negative, NaN or infinite, or a needed residual can be had in no way.
    """

    name: str
    bytes: float
    seconds: float | None = None
    parents: tuple[str, ...] = ()
    may_save: bool = True
    may_offload: bool = True
    needed: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "parents", all_of(f"Residual {self.name!r}: parents", self.parents, str))
        check_number(f"Residual {self.name!r}: bytes", self.bytes)
        if self.seconds is not None:
            check_number(f"Residual {self.name!r}: seconds", self.seconds)
        if self.needed and self.seconds is None and not self.may_save and not self.may_offload:
            raise PlanningError(
                f"Residual {self.name!r}: backward needs it, and it may be neither saved, offloaded nor recomputed; "
                "allow one of them, or give seconds."
            )


@dataclass(frozen=True)
class Block:
    """What is checkpointed as one: its residuals, its times, and what it needs while it runs.

    While its backward pass runs there are, beside all that is kept: ``working_bytes``, ``recomputed_share`` of the bytes of
    its recomputed residuals and ``fetched_share`` of those of its offloaded ones. Shares of 1 say that all of them are there
    at once; less, that they come and go one after the other; more, that there are buffers for the next block besides.

    Attributes:
        name: unique in its stack.
        residuals: in any order.
        forward_seconds, backward_seconds: of one block with everything saved.
        working_bytes: the working set of its backward pass, whatever the policy.
        input_bytes: kept on the device from the forward to the backward pass under every policy. 0 where its input is among
            the residuals.
        repeats: how many such blocks follow each other.
        recomputed_share, fetched_share: see above.

    Raises:
        PlanningError: a number is wrong, a name occurs twice, a parent is unknown, or parents go round in a circle.

    >>> Block("layer", (Residual("x", 8.0), Residual("up", 32.0, 0.5, parents=("x",))), 1.0, 2.0, repeats=24).order
    (0, 1)
    """

    name: str
    residuals: tuple[Residual, ...]
    forward_seconds: float
    backward_seconds: float
    working_bytes: float = 0.0
    input_bytes: float = 0.0
    repeats: int = 1
    recomputed_share: float = 1.0
    fetched_share: float = 1.0

    def __post_init__(self) -> None:
        where = f"Block {self.name!r}"
        object.__setattr__(self, "residuals", all_of(f"{where}: residuals", self.residuals, Residual))
        for name in ("forward_seconds", "backward_seconds", "working_bytes", "input_bytes"):
            check_number(f"{where}: {name}", getattr(self, name))
        for name in ("recomputed_share", "fetched_share"):
            check_number(f"{where}: {name}", getattr(self, name))
        check_count(f"{where}: repeats", self.repeats)
        check_names(f"{where}: residuals", (one.name for one in self.residuals))
        object.__setattr__(self, "_order", _order(where, self.residuals))

    @property
    def order(self) -> tuple[int, ...]:
        """The indices of the residuals, parents before children."""
        return self._order  # type: ignore[attr-defined,no-any-return]

    def without_offload(self) -> Block:
        """The same block with nothing that may be offloaded.

        Raises:
            PlanningError: a residual that backward needs can only be offloaded.
        """
        return replace(self, residuals=tuple(replace(one, may_offload=False) for one in self.residuals))


def _order(where: str, residuals: Sequence[Residual]) -> tuple[int, ...]:
    index = {one.name: number for number, one in enumerate(residuals)}
    for one in residuals:
        for parent in one.parents:
            if parent not in index:
                raise PlanningError(
                    f"{where}: {one.name!r} has the parent {parent!r}, which is none of its residuals." + nearest(parent, index)
                )
    try:
        names = TopologicalSorter({one.name: one.parents for one in residuals}).static_order()
        return tuple(index[name] for name in names)
    except CycleError as error:
        circle = " → ".join(reversed(error.args[1]))
        raise PlanningError(
            f"{where}: residuals are computed from each other in a circle: {circle}; remove one parent."
        ) from None


@dataclass(frozen=True)
class Stack:
    """A model as blocks one after the other, the first nearest the input: a vision tower, a language model, a head.

    Attributes:
        blocks: in the order of the forward pass; ``repeats`` says how many there are of each.
        link: the link to host memory; None where nothing may be offloaded.
        fixed_bytes: what is on the device all the time: parameters, gradients, optimizer state.
        offload_last: whether the very last block may offload. Its backward pass follows its forward pass at once, so that
            there is no time to hide a round trip.

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
        check_names("Stack: blocks", (one.name for one in self.blocks))
        check_number("Stack: fixed_bytes", self.fixed_bytes)
        if self.link is not None and not isinstance(self.link, HostLink):
            raise PlanningError(f"Stack: link={self.link!r}; expected a HostLink, or None where nothing may be offloaded.")
        for block in self.blocks if self.link is None else self.blocks[-1:] if not self.offload_last else ():
            stuck = [one.name for one in block.residuals if one.needed and one.seconds is None and not one.may_save]
            if stuck:
                why = "there is no link" if self.link is None else "the last block may not"
                raise PlanningError(
                    f"Stack: residuals {stuck} of {block.name!r} can only be offloaded, and {why}; "
                    "let them be saved, or give a link and offload_last=True."
                )

    def runs(self) -> tuple[Block, ...]:
        """The blocks as solvers see them: what may not offload does not, and the last block of each run stands alone.

        The last one of a run is where the run needs most, and the very last one must not offload.
        """
        found: list[Block] = []
        for block in self.blocks:
            able = block if self.link is not None else block.without_offload()
            if block.repeats > 1:
                found.append(replace(able, repeats=block.repeats - 1))
            found.append(replace(able, repeats=1))
        if not self.offload_last:
            found[-1] = found[-1].without_offload()
        return tuple(found)

    def positions(self) -> tuple[Block, ...]:
        """Every single block, in the order of the forward pass."""
        return tuple(one for run in self.runs() for one in [replace(run, repeats=1)] * run.repeats)

    @property
    def base_seconds(self) -> float:
        """The time of a step in which everything is saved."""
        return sum(one.repeats * (one.forward_seconds + one.backward_seconds) for one in self.blocks)
