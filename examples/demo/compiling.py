"""Compiles every JAX step for the target, in separate processes in the background."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from remat_jax import MemoryReport, compat
from remat_jax.errors import UnsupportedError
from remat_jax.memory.measure import measure_many

from .cases import Case
from .setting import Asked, Form

# Each process holds a compiler; more processes than cores only take turns.
PROCESSES = 2
Key = tuple[str, str, str]
"""Model, framework, mode."""


class Compiling:
    """The reports of all rows for one target, made in the background."""

    def __init__(self, cases: list[Case], target: str | None, timeout: float, on_done: Callable[[], None]) -> None:
        self.target, self.timeout, self.on_done = target, timeout, on_done
        self.unavailable = "" if target is None else _unavailable()
        self.pool = ThreadPoolExecutor(PROCESSES, thread_name_prefix="compile")
        self.jobs: list[tuple[Case, Form, tuple[Asked, ...], Future[list[MemoryReport]]]] = []
        if target is None or self.unavailable:
            return
        for case, form, asked in _by_size(cases):
            self.jobs.append((case, form, asked, self.pool.submit(self._compile, case, form, asked)))

    def __enter__(self) -> Compiling:
        return self

    def __exit__(self, *error: object) -> None:
        self.pool.shutdown(wait=True, cancel_futures=True)

    def _compile(self, case: Case, form: Form, asked: tuple[Asked, ...]) -> list[MemoryReport]:
        policies = [one.policy for one in asked]
        workload = case.jax_job(form, "float32").workload
        reports = measure_many(workload, policies, self.target or "cpu", timeout=self.timeout)
        self.on_done()
        return reports

    def reports(self) -> dict[Key, MemoryReport]:
        """All reports, once they are complete; empty if there is no compiler for the target."""
        return {
            (case.name, form.framework, one.mode): report
            for case, form, asked, future in self.jobs
            for one, report in zip(asked, future.result(), strict=True)
        }


def _by_size(cases: list[Case]) -> list[tuple[Case, Form, tuple[Asked, ...]]]:
    """The rows that are compiled together, the longest group first, so that both processes end at about the same time."""
    batches = [
        (case, form, part)
        for case in cases
        for form in case.setting.forms(case.name)
        for part in (form.asked[:3], form.asked[3:])
        if part
    ]
    return sorted(batches, key=lambda one: (one[1].scan, -len(one[2])))


def _unavailable() -> str:
    try:
        compat.require_gpu_compiler()
    except UnsupportedError as error:
        return str(error)
    return ""
