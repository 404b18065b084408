"""The steps of candidates, compiled side by side."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any

from remat_jax.apply.replaced import AS_WRITTEN
from remat_jax.errors import BlockError, CompileError, PolicyError, UnsupportedError
from remat_jax.hardware import Target
from remat_jax.memory.compile.compiler import Sizes, compile_programs
from remat_jax.memory.compile.exporting import ExportedProgram, export_step
from remat_jax.memory.compile.process import Children
from remat_jax.memory.compile.tuned_kernels import Kernels
from remat_jax.memory.measure import is_miscompiled
from remat_jax.planning.candidate import FAILED, Compiled, StepCandidate, Tried
from remat_jax.planning.problem import Described
from remat_jax.planning.search import MOST_COMPILED, SIDE_BY_SIDE
from remat_jax.planning.translate import policies_of
from remat_jax.report.tables import format_bytes, format_seconds
from remat_jax.workload import Workload

# What keeps one step from being compiled, and says nothing of another: layers in nested scans cannot differ, say.
_OF_ONE_STEP = (CompileError, PolicyError, BlockError, UnsupportedError)

_LONGEST = 300
"""Characters of an error in a note."""

Progress = Callable[[str, int, int], None]
"""What is being done, how many steps are compiled, how many may be."""


@dataclass
class Compiler:
    """Compiles the steps of candidates until a deadline, and notes which it could not compile.

    Attributes:
      timeout: seconds, in all; `deadline` is its end by the monotonic clock.
      progress: told what is being compiled, and the best so far.
      notes: what it leaves out is added to these.
      count: how many steps were asked for.
    """

    workload: Workload
    described: Described
    target: Target
    timeout: float
    deadline: float
    kernels: Kernels
    progress: Progress
    notes: list[str]
    count: int = field(default=0, init=False)
    _tracing: float = field(default=0.0, init=False)
    """The most seconds that tracing one step took."""

    @property
    def is_over(self) -> bool:
        """Whether the deadline would pass while a step is traced and what the plan computes again is counted."""
        return time.monotonic() + 2 * self._tracing > self.deadline

    def compile(
        self, candidates: Sequence[StepCandidate], best: Tried | None, *, memory_limit: int | None = None
    ) -> list[Compiled]:
        """What the compiler says of candidates; nothing where the time is up and something fits already.

        Args:
          candidates: compiled side by side.
          best: the best so far.
          memory_limit: bytes that XLA schedules for; None for its own.

        Raises:
          CompileError, PolicyError, BlockError, UnsupportedError: of the first step, where no step could be compiled so far.
        """
        if best is not None and self.is_over:
            self.notes.append(f"The search ended after timeout={self.timeout:g} s; with a longer one a plan may be faster")
            return []
        keys = [one.name or f"plan {self.count + index + 1}" for index, one in enumerate(candidates)]
        self._tell(keys, best)
        with ThreadPoolExecutor(min(SIDE_BY_SIDE, os.cpu_count() or 1)) as pool, Children() as children:
            # Each by itself, so that one that cannot be compiled does not take the other with it; and while the first is
            # compiled the next is traced.
            pairs = zip(keys, candidates, strict=True)
            asked = [self._asked(pool, children, key, one, memory_limit) for key, one in pairs]
            wait(asked)
        errors = {key: error for key, one in zip(keys, asked, strict=True) if (error := one.exception()) is not None}
        self._judge(list(errors.values()), best, all_failed=len(errors) == len(keys))
        self.count += len(keys)
        for key, error in errors.items():
            self.notes.append(f"Left out: {key} could not be compiled: {first_sentence(error)}")
        return [
            Compiled(FAILED, 0, sound=False) if key in errors else self._seen(one, told.result())
            for key, one, told in zip(keys, candidates, asked, strict=True)
        ]

    def _judge(self, errors: Sequence[BaseException], best: Tried | None, *, all_failed: bool) -> None:
        """Raise the first error where it ends the search: nothing else is known, no time is left, or it is none of one step."""
        fatal = [error for error in errors if not isinstance(error, _OF_ONE_STEP)]
        if all_failed and (not self.count or (time.monotonic() > self.deadline and best is None)):
            fatal += errors
        if fatal:
            raise fatal[0]

    def _asked(
        self, pool: ThreadPoolExecutor, children: Children, key: str, candidate: StepCandidate, memory_limit: int | None
    ) -> Future[Sizes]:
        """The sizes of a candidate's step, once it is compiled; it is traced here."""
        begin = time.monotonic()
        try:
            program = export_step(key, self._step(candidate), self.target)
        except _OF_ONE_STEP as error:
            refused: Future[Sizes] = Future()
            refused.set_exception(error)
            return refused
        self._tracing = max(self._tracing, time.monotonic() - begin)
        return pool.submit(self._sizes, program, children, memory_limit)

    def _sizes(self, program: ExportedProgram, children: Children, memory_limit: int | None) -> Sizes:
        left = max(1.0, self.deadline - time.monotonic())
        given: dict[str, Any] = {"memory_limit": memory_limit, "kernels": self.kernels, "children": children}
        return compile_programs([program], self.target, timeout=left, **given)[program.key]

    def _step(self, candidate: StepCandidate) -> Any:
        return self.workload.step("off" if candidate.name in ("off", AS_WRITTEN) else policies_of(self.described, candidate))

    @staticmethod
    def _seen(candidate: StepCandidate, sizes: Sizes) -> Compiled:
        wrong = candidate.host_bytes > 0 and is_miscompiled(sizes)
        return Compiled(sizes.device, sizes.host, sound=not wrong, sizes=sizes)

    def _tell(self, keys: Sequence[str], best: Tried | None) -> None:
        so_far = ""
        if best is not None:
            seconds = best.compiled.seconds or self.described.base_seconds + best.candidate.seconds
            name = best.candidate.name or "a plan"
            so_far = f"; best so far: {name}, {format_seconds(seconds)}, {format_bytes(best.compiled.device_bytes)}"
        most = max(MOST_COMPILED, self.count + len(keys))
        self.progress(f"compiling {' and '.join(keys)} for {self.target.name}{so_far}", self.count, most)


def first_sentence(error: BaseException) -> str:
    """XLA's sentences can be of thousands of characters, with the types of all that a loop carries.

    >>> len(first_sentence(ValueError("expected " + "f32[39,1,75600,5120] " * 99)))
    300
    """
    text = one_line(str(error).split("\n")[0].split("; ")[0])
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 2]} …"


def one_line(text: str) -> str:
    """What a plan's file takes: nothing that a terminal would not print as it is."""
    return " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())
