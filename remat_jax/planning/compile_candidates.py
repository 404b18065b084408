"""Compiles the steps of candidates in parallel."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any

from remat_jax.errors import BlockError, CompileError, PolicyError, UnsupportedError
from remat_jax.hardware import Target
from remat_jax.memory.compile.backends import backend_of
from remat_jax.memory.compile.compiler import compile_programs
from remat_jax.memory.compile.exported import ExportedProgram
from remat_jax.memory.compile.exporting import export_step
from remat_jax.memory.compile.options import Kernels
from remat_jax.memory.compile.process import Children, NotDoneError
from remat_jax.planning.candidate import FAILED, Compiled, StepCandidate, Tried
from remat_jax.planning.findings import PlanFinding, info
from remat_jax.planning.loop import MOST_COMPILED, SIDE_BY_SIDE
from remat_jax.planning.outcome import time_of
from remat_jax.planning.problem import Described
from remat_jax.planning.translate import policies_of
from remat_jax.report.tables import format_bytes
from remat_jax.workload import Workload

# Errors of one step; other steps may still compile. For example, layers in nested scans cannot have different policies.
_OF_ONE_STEP = (CompileError, PolicyError, BlockError, UnsupportedError)

_LONGEST = 300
"""The maximum number of characters of an error's text in a note."""

_SHARE_FOR_TIMES = 0.6
"""If no step has a time after this share of the timeout, compilations are ended once their memory is known. Where machine code
takes longer, the time is better spent on the memory of more steps."""

Progress = Callable[[str, int, int], None]
"""Called with the current activity, the number of compiled steps, and the expected total, which may grow."""


@dataclass
class Compiler:
    """Compiles the steps of candidates until `deadline` (of `time.monotonic`); failures become `findings`.

    `timeout` is the seconds for the whole search. `gain` gives the share of the best step's time that a candidate is expected
    to save; progress says it. With `memory_only`, a compilation is ended once its memory is known. `count` is the number of
    steps submitted so far. `late` are the steps whose compilation the timeout ended before their memory was known.
    """

    workload: Workload
    described: Described
    target: Target
    timeout: float
    deadline: float
    kernels: Kernels
    progress: Progress
    findings: list[PlanFinding]
    gain: Callable[[StepCandidate, StepCandidate], float] | None = None
    memory_only: bool = False
    count: int = field(default=0, init=False)
    late: list[StepCandidate] = field(default_factory=list, init=False)
    _only_failures: bool = field(default=False, init=False)
    """Whether a call of `compile` was the first, and all its steps failed."""
    _tracing: float = field(default=0.0, init=False)
    """The longest tracing time of a step, in seconds."""
    _longest: float = field(default=0.0, init=False)
    """The longest time of a call of `compile`, in seconds."""
    _has_times: bool = field(default=False, init=False)
    """Whether the compilation of a step was finished."""

    def _left(self, best: Tried | None) -> float:
        """The seconds that are left; once a step fits, without those for compiling it without Triton (`without_triton`)."""
        reserved = best is not None and backend_of(self.target).chooses_kernels_on_device
        return self.deadline - time.monotonic() - (self._longest if reserved else 0.0)

    def _is_over(self, best: Tried | None) -> bool:
        """Whether too little time is left to trace another step and to count the FLOPs that the plan recomputes."""
        return self._left(best) < 2 * self._tracing

    def _is_enough(self, key: str) -> bool:
        """Whether a step's memory is enough, and its time is not waited for."""
        no_times = not self._has_times and self.deadline - time.monotonic() < (1 - _SHARE_FOR_TIMES) * self.timeout
        return self.memory_only or no_times

    def compile(self, candidates: Sequence[StepCandidate], best: Tried | None) -> list[Compiled]:
        """The compiled memory of each candidate, as `compile_now`; an empty list if the time is up and a step was submitted."""
        return [] if self.count and self._is_over(best) else self.compile_now(candidates, best)

    def compile_now(self, candidates: Sequence[StepCandidate], best: Tried | None) -> list[Compiled]:
        """The compiled memory of each candidate.

        Once a step fits, a failure of another step is only a finding.

        Raises:
          CompileError, PolicyError, BlockError, UnsupportedError: no step fits yet, all `candidates` failed, and either no step
            could be compiled in two calls, or the time is up. The first error is raised.
        """
        begin = time.monotonic()
        keys = [step.name or f"plan {self.count + index + 1}" for index, step in enumerate(candidates)]
        keys = [
            key if step.memory_limit is None else f"{key} with a memory limit"
            for key, step in zip(keys, candidates, strict=True)
        ]
        self._report(keys, candidates, best)
        with ThreadPoolExecutor(min(SIDE_BY_SIDE, os.cpu_count() or 1)) as pool, Children() as children:

            def compiled(program: ExportedProgram, candidate: StepCandidate) -> Compiled:
                shared: dict[str, Any] = {"kernels": self.kernels, "children": children, "is_enough": self._is_enough}
                limits: dict[str, Any] = {"memory_limit": candidate.memory_limit, "timeout": max(1.0, self._left(best))}
                sizes = compile_programs([program], self.target, **limits, **shared)[program.key]
                self._has_times |= not sizes.unfinished and not sizes.refusal
                is_wrong = candidate.host_bytes > 0 and sizes.is_miscompiled
                return Compiled(sizes.device, sizes.host, not is_wrong and not sizes.refusal, sizes, program)

            # Each step is submitted by itself: a failing step does not affect others, and tracing overlaps compilation.
            futures = [self._submitted(pool, compiled, *pair) for pair in zip(keys, candidates, strict=True)]
            wait(futures)
        self._longest = max(self._longest, time.monotonic() - begin)
        errors = {key: error for key, future in zip(keys, futures, strict=True) if (error := future.exception()) is not None}
        if best is None:
            self._raise_fatal(list(errors.values()), all_failed=len(errors) == len(keys))
        self.count += len(keys)
        late = {key for key, error in errors.items() if isinstance(error, NotDoneError)}
        self.late += [candidate for key, candidate in zip(keys, candidates, strict=True) if key in late]
        self.findings += [
            info("left_out", f"Left out: {key} could not be compiled: {first_sentence(error)}")
            for key, error in errors.items()
            if key not in late
        ]
        return [
            Compiled(FAILED, 0, sound=False, late=key in late) if key in errors else future.result()
            for key, future in zip(keys, futures, strict=True)
        ]

    def _submitted(
        self,
        pool: ThreadPoolExecutor,
        compiled: Callable[[ExportedProgram, StepCandidate], Compiled],
        key: str,
        candidate: StepCandidate,
    ) -> Future[Compiled]:
        """Trace a candidate's step in this thread, and submit it for compilation."""
        begin = time.monotonic()
        try:
            program = export_step(key, self.workload.step(policies_of(self.described, candidate)), self.target)
        except Exception as error:  # `_raise_fatal` raises all but `_OF_ONE_STEP` unless a step already fits
            refused: Future[Compiled] = Future()
            refused.set_exception(error)
            return refused
        self._tracing = max(self._tracing, time.monotonic() - begin)
        return pool.submit(compiled, program, candidate)

    def _raise_fatal(self, errors: Sequence[BaseException], *, all_failed: bool) -> None:
        """Raise the first error not in `_OF_ONE_STEP`. If there is none, raise the first error in the cases of `compile`."""
        fatal = [error for error in errors if not isinstance(error, _OF_ONE_STEP)]
        if all_failed and (self._only_failures or time.monotonic() > self.deadline):
            fatal += errors
        self._only_failures = all_failed and not self.count
        if fatal:
            raise fatal[0]

    def _report(self, keys: Sequence[str], candidates: Sequence[StepCandidate], best: Tried | None) -> None:
        so_far = ""
        if best is not None:
            seconds = best.compiled.seconds or self.described.base_seconds + best.candidate.seconds
            name = best.candidate.title
            device = format_bytes(best.compiled.device_bytes)
            so_far = f"; best so far: {name}, {time_of(best, seconds, self.target)}, {device}"
            if self.gain is not None:
                gain = 100 * max(self.gain(candidate, best.candidate) for candidate in candidates)
                so_far += f"; going on may gain {gain:.1f} %, Ctrl-C keeps the best"
        most = max(MOST_COMPILED, self.count + len(keys))
        self.progress(f"compiling {' and '.join(keys)} for {self.target.name}{so_far}", self.count, most)


def first_sentence(error: BaseException) -> str:
    """The first sentence of an error, shortened: XLA may list all types of a loop's carry, in thousands of characters.

    >>> len(first_sentence(ValueError("expected " + "f32[39,1,75600,5120] " * 99)))
    300
    """
    if isinstance(error, NotDoneError):  # it names the time that was left, not the timeout that the caller gave
        return "the timeout was over; give a longer one"
    text = one_line(str(error).split("\n")[0].split("; ")[0])
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 2]} …"


def one_line(text: str) -> str:
    """`text` in one line of printable characters, as a plan's file requires."""
    return " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())
