"""The files that XLA writes while it compiles one program, and what is read from them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from remat_jax.errors import ArgumentError, TargetError, UnsupportedError
from remat_jax.hardware import Target
from remat_jax.memory.compile.exported import ExportedProgram
from remat_jax.memory.hlo.live import LiveBuffer, Schedule, Timeline, named_arguments
from remat_jax.memory.hlo.text import HloModule, parse
from remat_jax.memory.step_time.schedule import StepTime, step_time


@dataclass(frozen=True)
class XlaFiles:
    """The files of one program in `folder`: XLA's dump, and the compiled text, which the compile process writes."""

    folder: Path

    @property
    def options(self) -> dict[str, Any]:
        """The options with which XLA dumps the optimised program, its buffers and their live ranges."""
        # The dump takes no measurable time. `.*` is needed because a user's XLA_FLAGS may dump only one module, like MaxText's.
        return {"xla_dump_to": str(self.folder / "dump"), "xla_dump_hlo_as_text": True, "xla_dump_hlo_module_re": ".*"}

    @property
    def compiled_text(self) -> Path:
        """The file for the compiled text."""
        return self.folder / "compiled.hlo"

    def dumped(self, ending: str) -> str | None:
        """The text of the last dumped file with this ending; None if XLA wrote none."""
        paths = sorted((self.folder / "dump").glob(f"*{ending}"))
        return paths[-1].read_text(encoding="utf-8", errors="replace") if paths else None

    def is_dumped(self, ending: str) -> bool:
        """Whether XLA wrote a file with this ending."""
        return any((self.folder / "dump").glob(f"*{ending}"))

    def optimised(self, ending: str) -> HloModule | None:
        """The dumped module with this ending; None if there is none, or if it cannot be read."""
        return _parsed(self.dumped(ending))

    def compiled(self) -> HloModule | None:
        """The module of the compiled text; None if there is none, or if it cannot be read."""
        return _parsed(self.compiled_text.read_text(encoding="utf-8")) if self.compiled_text.exists() else None

    def live(self, module: HloModule | None, program: ExportedProgram) -> tuple[tuple[LiveBuffer, ...], Timeline | None]:
        """The values of `Sizes.live` and `Sizes.timeline`, with the arguments' names; () and None if they are unknown."""
        assignment, ranges = self.dumped("-buffer-assignment.txt"), self.dumped("-live-range.txt")
        if module is None or assignment is None or ranges is None:
            return (), None
        schedule = Schedule(module, assignment, ranges)
        timeline = Timeline.of(schedule)
        timeline = replace(timeline, buffers=named_arguments(timeline.buffers, program.arguments))
        return named_arguments(schedule.at_peak(), program.arguments), timeline


def _parsed(text: str | None) -> HloModule | None:
    try:
        return None if text is None else parse(text)
    except UnsupportedError:
        return None


def modelled_time(module: HloModule | None, target: Target, program: ExportedProgram) -> tuple[StepTime | None, str]:
    """The time of a compiled module, and the reason if it is unknown (the time is then None)."""
    if module is None:
        return None, "the compiled module could not be read"
    try:
        return step_time(module, target, kernels=dict(program.kernels)), ""
    except (ArgumentError, TargetError) as error:
        return None, str(error)
