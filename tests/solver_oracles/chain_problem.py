"""Chains: consecutive stages, each of which may run again from its input."""

from __future__ import annotations

from dataclasses import dataclass

from remat_jax.errors import PlanningError
from remat_jax.solver.problem import HostLink, all_of, check_names, check_number


@dataclass(frozen=True)
class Option:
    """One way to run a stage of a chain such that its backward pass can follow: the kept bytes and their cost.

    Attributes:
        name: unique in its stage.
        kept_bytes: kept on the device until the backward pass, the stage's output included.
        forward_seconds, backward_seconds: compute, recomputation included.
        host_bytes: kept in host memory.
        forward_bytes, backward_bytes: what the two passes need on the device besides, while they run.

    Raises:
        PlanningError: a number is negative, NaN or infinite.
    """

    name: str
    kept_bytes: float
    forward_seconds: float
    backward_seconds: float
    host_bytes: float = 0.0
    forward_bytes: float = 0.0
    backward_bytes: float = 0.0

    def __post_init__(self) -> None:
        for name in ("kept_bytes", "forward_seconds", "backward_seconds", "host_bytes", "forward_bytes", "backward_bytes"):
            check_number(f"Option {self.name!r}: {name}", getattr(self, name))


@dataclass(frozen=True)
class Stage:
    """One stage of a chain: its output, the time of a forward pass that keeps nothing else, and its options.

    Raises:
        PlanningError: there is no option, or one keeps less than the output.
    """

    name: str
    output_bytes: float
    forward_seconds: float
    options: tuple[Option, ...]

    def __post_init__(self) -> None:
        where = f"Stage {self.name!r}"
        object.__setattr__(self, "options", all_of(f"{where}: options", self.options, Option))
        check_number(f"{where}: output_bytes", self.output_bytes)
        check_number(f"{where}: forward_seconds", self.forward_seconds)
        check_names(f"{where}: options", (option.name for option in self.options))
        if not self.options:
            raise PlanningError(f"{where}: options is empty; give at least the one that saves everything.")
        for option in self.options:
            if option.kept_bytes < self.output_bytes:
                raise PlanningError(
                    f"{where}: option {option.name!r} keeps {option.kept_bytes!r} bytes, less than its output of "
                    f"{self.output_bytes!r}; kept_bytes counts the output too."
                )


@dataclass(frozen=True)
class Chain:
    """Stages one after the other, any of which may run again from its input; the loss follows the last and costs nothing.

    Attributes:
        stages: in the order of the forward pass.
        input_bytes: the first stage's input, which is there throughout.
        link: the link to host memory; None where no option offloads.
        fixed_bytes: what is on the device all the time beside it.

    Raises:
        PlanningError: there is no stage, a name occurs twice, a number is wrong, or an option offloads without a link.
    """

    stages: tuple[Stage, ...]
    input_bytes: float = 0.0
    link: HostLink | None = None
    fixed_bytes: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "stages", all_of("Chain: stages", self.stages, Stage))
        if not self.stages:
            raise PlanningError("Chain: stages is empty; give at least one Stage.")
        check_names("Chain: stages", (stage.name for stage in self.stages))
        check_number("Chain: input_bytes", self.input_bytes)
        check_number("Chain: fixed_bytes", self.fixed_bytes)
        for stage in self.stages:
            if self.link is None and any(option.host_bytes for option in stage.options):
                raise PlanningError(f"Chain: stage {stage.name!r} has an option with host_bytes; give the chain a link.")
