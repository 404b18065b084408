"""Programs and plans: values, operations, and plain typed actions.

A program is everything that a training step could do: operations that read and write values. A plan is a list of actions.
`simulator.simulate` runs a plan on a program and knows nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from remat_jax.errors import PlanningError
from remat_jax.solver.problem import HostLink, all_of, check_names, check_number


@dataclass(frozen=True)
class Value:
    """A value that takes memory.

    Attributes:
        name: unique in its program.
        bytes: on the device, once it is computed; in host memory, once it is there.
        recomputed_bytes: on the device, when it was computed before; None: the same.
        fetched_bytes: on the device, on its way to the host and once it is back; None: the same.
        may_save, may_offload: whether what computes it first may leave it on the device, may send it to the host.
    """

    name: str
    bytes: float = 0.0
    recomputed_bytes: float | None = None
    fetched_bytes: float | None = None
    may_save: bool = True
    may_offload: bool = False

    def __post_init__(self) -> None:
        for name in ("bytes", "recomputed_bytes", "fetched_bytes"):
            if getattr(self, name) is not None:
                check_number(f"Value {self.name!r}: {name}", getattr(self, name))

    @property
    def in_transit_bytes(self) -> float:
        """The device bytes of a copy to the host or back."""
        return self.bytes if self.fetched_bytes is None else self.fetched_bytes

    @property
    def again_bytes(self) -> float:
        """The device bytes of the value when it is recomputed."""
        return self.bytes if self.recomputed_bytes is None else self.recomputed_bytes


@dataclass(frozen=True)
class Operation:
    """One computation: it can run when all values that it reads are on the device.

    Attributes:
        name: unique in its program.
        seconds: how long it takes.
        reads, writes: names of values.
        extra_bytes: what it needs on the device besides, while it runs.
        in_place: whether what it writes takes no memory before it is done.
    """

    name: str
    seconds: float
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    extra_bytes: float = 0.0
    in_place: bool = False


@dataclass(frozen=True)
class Program:
    """Everything that a step could do.

    Attributes:
        values, operations: in any order.
        initial: the values that are on the device at the start.
        goal: the values that must have been computed at the end.
        fixed_bytes: on the device all the time.
        link: the link to host memory, or None.

    Raises:
        PlanningError: a name occurs twice or is unknown.
    """

    values: tuple[Value, ...]
    operations: tuple[Operation, ...]
    initial: tuple[str, ...] = ()
    goal: tuple[str, ...] = ()
    fixed_bytes: float = 0.0
    link: HostLink | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "values", all_of("Program: values", self.values, Value))
        object.__setattr__(self, "operations", all_of("Program: operations", self.operations, Operation))
        check_names("Program: values", (value.name for value in self.values))
        check_names("Program: operations", (operation.name for operation in self.operations))
        check_number("Program: fixed_bytes", self.fixed_bytes)
        used = {name for operation in self.operations for name in (*operation.reads, *operation.writes)}
        unknown = sorted((used | {*self.initial, *self.goal}) - {value.name for value in self.values})
        if unknown:
            raise PlanningError(f"Program: values {unknown} are named and not given; add a Value for each.")

    @cached_property
    def value(self) -> dict[str, Value]:
        """The values by name."""
        return {value.name: value for value in self.values}

    @cached_property
    def operation(self) -> dict[str, Operation]:
        """The operations by name."""
        return {operation.name: operation for operation in self.operations}


@dataclass(frozen=True)
class Compute:
    """Run an operation; of the values that it writes, ``save`` stay on the device, ``offload`` go to the host, the rest is
    dropped.
    """

    operation: str
    save: tuple[str, ...] = ()
    offload: tuple[str, ...] = ()


@dataclass(frozen=True)
class Fetch:
    """Fetch a value from host memory and free the host's copy."""

    value: str


@dataclass(frozen=True)
class Free:
    """Free a value on the device."""

    value: str


@dataclass(frozen=True)
class Wait:
    """Wait for all copies started since the last wait; only compute between two waits hides these copies."""


Action = Compute | Fetch | Free | Wait


@dataclass(frozen=True)
class Plan:
    """A solver's answer: the actions, and claims about them.

    Attributes:
        program: what the actions are for.
        actions: in order.
        seconds: of the whole step.
        peak_bytes: on the device, fixed bytes included; memory is looked at while something runs.
        host_bytes: in host memory, at most.
        lower_bound: the seconds that the solver proved no plan of its model to beat.
    """

    program: Program
    actions: tuple[Action, ...]
    seconds: float
    peak_bytes: float
    host_bytes: float = 0.0
    lower_bound: float = 0.0
