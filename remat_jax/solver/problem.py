"""A planning problem as plain data: blocks with residuals, stacks of blocks, and the link to host memory.

Sizes are bytes per device, and times are seconds per training step. Both may be fractions, and other units are allowed if all
numbers use them. Malformed data raises `PlanningError`. ``docs/how/planner.md`` states the problem and how it is solved.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from typing import Any

from remat_jax.errors import PlanningError, nearest


class Choice(StrEnum):
    """What happens to a residual. ``unused`` (neither kept nor recomputed) is allowed if the backward pass does not read it."""

    SAVE = "save"
    OFFLOAD = "offload"
    RECOMPUTE = "recompute"
    UNUSED = "unused"


@dataclass(frozen=True)
class HostLink:
    """The link to host memory: one queue in each direction, shared by all copies in that direction.

    Attributes:
        out_bytes_per_s: the achieved rate from device to host, not the nominal rate.
        in_bytes_per_s: the achieved rate from host to device.
        hidden_share: the share of a block's compute time that can overlap its copies, from 0 to 1.
        memory_bytes_per_s: the bandwidth of device memory. Copies use a part of it; infinity neglects this part.

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
        check_number("HostLink: hidden_share", self.hidden_share)
        if self.hidden_share > 1:
            raise PlanningError(
                f"HostLink: hidden_share={self.hidden_share!r}; expected a share of the compute time, from 0 to 1."
            )
        check_number("HostLink: memory_bytes_per_s", self.memory_bytes_per_s, positive=True, infinite=True)

    @property
    def seconds_per_byte(self) -> float:
        """Seconds of device-memory traffic per offloaded byte: the copy out reads it, and the copy back writes it."""
        return 2 / self.memory_bytes_per_s

    def exposed_out(self, size: float, compute_seconds: float) -> float:
        """The exposed seconds of copying ``size`` bytes to the host: those that ``compute_seconds`` of compute do not hide."""
        return max(0.0, size / self.out_bytes_per_s - self.hidden_share * compute_seconds)

    def exposed_in(self, size: float, compute_seconds: float) -> float:
        """The exposed seconds of copying ``size`` bytes back to the device."""
        return max(0.0, size / self.in_bytes_per_s - self.hidden_share * compute_seconds)


@dataclass(frozen=True)
class ResidualCosts:
    """An array that a block's backward pass reads, or from which another residual is computed.

    Attributes:
        name: unique in its block.
        bytes: its size.
        seconds: time to recompute it from its parents; None if it cannot be recomputed, like a block's input.
        parents: the names of the residuals of the same block from which it is computed.
        may_save, may_offload: whether it may be saved, and whether it may be offloaded.
        needed: whether the backward pass reads it. If not, it is kept or recomputed only to recompute other residuals.
        kept_seconds: time to keep it (save or offload it): writing it, and copying it into a scan's stacked array.
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
        if not self.choices:
            raise PlanningError(
                f"ResidualCosts {self.name!r}: backward needs it, but it can be neither saved, offloaded nor recomputed; "
                "allow one of them, or give seconds."
            )

    @property
    def choices(self) -> tuple[Choice, ...]:
        """The allowed choices, in the order of `Choice`."""
        allowed = (self.may_save, self.may_offload, self.seconds is not None, not self.needed)
        return tuple(itertools.compress(Choice, allowed))


@dataclass(frozen=True)
class Block:
    """The unit of checkpointing: its residuals, its times, and the memory that its backward pass needs.

    In addition to the saved bytes, the backward pass of a block needs ``working_bytes``, plus ``recomputed_share`` times the
    bytes of its recomputed residuals, plus ``fetched_share`` times the bytes of its offloaded residuals. With a share of 1 all
    of these residuals are live at once; with a smaller share, only some are. A ``fetched_share`` above 1 also counts arrays
    already fetched for the block whose backward pass runs next.

    Blocks with ``late_bytes`` are layers of scans: consecutive equal ones under one policy are one scan, which keeps what
    all of them save until its backward pass ends. The late bytes, such as the gradients of the layers' parameters, are a
    part of the stack's fixed bytes. A scan allocates those of all its layers when its backward pass begins. Until then, the
    backward passes of later blocks can use this memory.

    Attributes:
        name: unique in its stack.
        residuals: in any order.
        forward_seconds, backward_seconds: times of one block, without keeping or recomputing residuals.
        working_bytes: the working set of its backward pass under any policy.
        input_bytes: size of an input that every policy keeps on the device; 0 if the input is among the residuals.
        repeats: the number of consecutive equal blocks.
        recomputed_share, fetched_share: the shares described above.
        late_bytes: the bytes described above, of one block.

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
    late_bytes: float = 0.0

    def __post_init__(self) -> None:
        where = f"Block {self.name!r}"
        object.__setattr__(self, "residuals", all_of(f"{where}: residuals", self.residuals, ResidualCosts))
        shares = ("recomputed_share", "fetched_share")
        for name in ("forward_seconds", "backward_seconds", "working_bytes", "input_bytes", "late_bytes", *shares):
            check_number(f"{where}: {name}", getattr(self, name))
        check_count(f"{where}: repeats", self.repeats)
        check_names(f"{where}: residuals", (residual.name for residual in self.residuals))
        _ = self.order  # raises for unknown parents and cycles

    @cached_property
    def parents(self) -> tuple[tuple[int, ...], ...]:
        """For each residual, the indices of its parents."""
        index = {residual.name: at for at, residual in enumerate(self.residuals)}
        for residual in self.residuals:
            for parent in residual.parents:
                if parent not in index:
                    raise PlanningError(
                        f"Block {self.name!r}: {residual.name!r} has the parent {parent!r}, which is not one of its residuals."
                        + nearest(parent, index)
                    )
        return tuple(tuple(index[parent] for parent in residual.parents) for residual in self.residuals)

    @cached_property
    def order(self) -> tuple[int, ...]:
        """The indices of the residuals, parents before children."""
        try:
            return tuple(TopologicalSorter(dict(enumerate(self.parents))).static_order())
        except CycleError as error:
            circle = " → ".join(self.residuals[at].name for at in reversed(error.args[1]))
            raise PlanningError(
                f"Block {self.name!r}: residuals are computed from each other in a circle: {circle}; remove one parent."
            ) from None

    def without_offload(self) -> Block:
        """The same block with offload forbidden; raises `PlanningError` if a needed residual can only be offloaded."""
        return replace(self, residuals=tuple(replace(residual, may_offload=False) for residual in self.residuals))


@dataclass(frozen=True)
class Stack:
    """A model as a sequence of blocks in forward order, such as a vision tower, a language model and a head.

    Attributes:
        blocks: one block per kind, in forward order; ``repeats`` is the number of blocks of the kind.
        link: the link to host memory; None forbids offload.
        fixed_bytes: device memory in use during the whole step: parameters, gradients (`Block.late_bytes`), optimizer state.
        offload_last: whether the last block of the stack may offload. Its backward pass directly follows its forward pass,
            so no compute hides its copies.
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
            stuck = [residual.name for residual in block.residuals if residual.choices == (Choice.OFFLOAD,)]
            if stuck:
                why = "there is no link" if self.link is None else "the last block may not offload"
                raise PlanningError(
                    f"Stack: residuals {stuck} of {block.name!r} can only be offloaded, but {why}; let them be saved, or give "
                    "a link and offload_last=True."
                )

    def runs(self, parts: int = 1) -> tuple[Block, ...]:
        """The blocks with each kind split into ``parts`` runs of almost equal length, and forbidden offloads removed.

        The last block of each run becomes a run of its own: a run needs most memory at its last block, and the last block of
        the stack may not be allowed to offload.
        """
        divided: list[Block] = []
        for block in self.blocks:
            allowed = block if self.link is not None else block.without_offload()
            count = min(block.repeats, parts)
            borders = (block.repeats * part // count for part in range(count + 1))
            for start, stop in itertools.pairwise(borders):
                if stop - start > 1:
                    divided.append(replace(allowed, repeats=stop - start - 1))
                divided.append(replace(allowed, repeats=1))
        if not self.offload_last:
            divided[-1] = divided[-1].without_offload()
        return tuple(divided)

    def positions(self) -> tuple[Block, ...]:
        """All blocks one by one, in forward order."""
        return tuple(block for run in self.runs() for block in [replace(run, repeats=1)] * run.repeats)

    @property
    def base_seconds(self) -> float:
        """The time of a step without keeping or recomputing residuals."""
        return sum(block.repeats * (block.forward_seconds + block.backward_seconds) for block in self.blocks)


# --- checks of numbers, names and budgets ------------------------------------------------------------------------------


def check_number(where: str, value: object, *, positive: bool = False, infinite: bool = False) -> None:
    """Raise `PlanningError` unless ``value`` is a number ≥ 0 (> 0 if ``positive``), finite unless ``infinite``."""
    good = isinstance(value, int | float) and not isinstance(value, bool) and (value > 0 if positive else value >= 0)
    # An integer may be larger than any float: compare it with the largest float.
    good = good and (value <= sys.float_info.max or (infinite and value == math.inf))  # type: ignore[operator]
    if not good:
        kind = "a number" if infinite else "a finite number"
        raise PlanningError(f"{where}={value!r}; expected {kind}, {'greater than' if positive else 'at least'} 0.")


def check_count(where: str, value: object, least: int = 1, most: int | None = None) -> None:
    """Raise `PlanningError` unless ``value`` is an integer from ``least`` to ``most``."""
    whole = isinstance(value, int) and not isinstance(value, bool)
    if not whole or value < least or (most is not None and value > most):  # type: ignore[operator]
        bound = f"at least {least}" if most is None else f"from {least} to {most}"
        raise PlanningError(f"{where}={value!r}; expected an integer, {bound}.")


def check_budget(name: str, value: object) -> None:
    """Raise `PlanningError` unless ``value`` is positive (a host budget may be 0); infinity means no limit."""
    check_number(name, value, positive=name == "budget", infinite=True)


def check_names(where: str, names: Iterable[str]) -> None:
    """Raise `PlanningError` for empty names and duplicate names."""
    listed = list(names)
    wrong = [name for name in listed if not isinstance(name, str) or not name]
    twice = sorted(name for name, count in Counter(map(str, listed)).items() if count > 1)
    if wrong or twice:
        fault = "empty or not strings" if wrong else "used twice"
        raise PlanningError(f"{where}: names {wrong or twice} are {fault}; names must be unique, non-empty strings.")


def all_of(where: str, values: Any, kind: type) -> tuple[Any, ...]:
    """``values`` as a tuple; raises `PlanningError` unless all are instances of ``kind``."""
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise PlanningError(f"{where}={values!r}; expected a sequence of {kind.__name__}.")
    checked = tuple(values)
    for value in checked:
        if not isinstance(value, kind):
            raise PlanningError(f"{where}: {value!r} is a {type(value).__name__}; expected {kind.__name__}.")
    return checked
