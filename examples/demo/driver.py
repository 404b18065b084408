"""The whole comparison: train while the steps are compiled for the GPU, judge."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from remat_jax import MemoryReport, compat
from torch_ref import MODES

from . import jax_rows, torch_rows
from .cases import CASES, Case
from .checks import grad_error, judged, reference_of
from .compiling import Compiling, Key
from .outcome import Evidence, Outcome, Row
from .setting import Setting

Tell = Callable[[str, int, int], None]
"""`tell(what, done, total)`: `what` is in progress, and `done` of `total` parts are complete."""


def run(setting: Setting | None = None, tell: Tell | None = None) -> Outcome:
    """Train every model in every mode of both frameworks, measure, and judge.

    Nothing is written. `tell` may be called from other threads.

    Raises:
      CompileError: XLA's GPU compiler failed.
    """
    evidence, notes = collect(setting or Setting(), tell)
    return Outcome(rows_of(evidence), judged(evidence), notes)


def collect(setting: Setting, tell: Tell | None = None) -> tuple[list[Evidence], tuple[str, ...]]:
    """All measurements of `run`, and the remarks that a reader needs."""
    compat.keep_to_cpu_without_gpu()
    cases = [CASES[name](setting) for name in setting.models]
    progress = _Progress(tell)
    with torch_rows.one_thread(), Compiling(cases, setting.target, setting.timeout, progress.done) as compiling:
        rows = sum(len(MODES) + sum(len(form.asked) for form in setting.forms(case.name)) for case in cases)
        progress.expect(len(compiling.jobs) + rows)
        # PyTorch first: the compiling threads begin by tracing, which other work in JAX would slow down.
        trained = [*_torch_rows(cases, progress), *_jax_rows(cases, progress)]
        progress.say("waiting for XLA's GPU compiler")
        reports = compiling.reports()
    return [_completed(one, reports) for one in trained], _notes(compiling.unavailable, reports)


def _torch_rows(cases: Sequence[Case], progress: _Progress) -> list[Evidence]:
    trained = []
    for case in cases:
        for mode in MODES:
            progress.say(f"{case.name} in {torch_rows.FRAMEWORK}: {mode}")
            trained.append(torch_rows.measure(case, mode, torch_rows.TorchTrainer(case, mode)))
            progress.done()
    return trained


def _jax_rows(cases: Sequence[Case], progress: _Progress) -> list[Evidence]:
    trained = []
    for case in cases:
        for form in case.setting.forms(case.name):
            for asked in form.asked:
                progress.say(f"{case.name} in {form.framework}: {asked.mode}")
                trained.append(jax_rows.measure(case, form, asked, jax_rows.JaxTrainer(case, form, asked.policy)))
                progress.done()
    return trained


def _completed(one: Evidence, reports: Mapping[Key, MemoryReport]) -> Evidence:
    report = reports.get((one.model, one.framework, one.mode))
    if report is None:
        return one
    return replace(one, peak_bytes={**one.peak_bytes, report.target: report.device_bytes}, host_bytes=report.host_bytes)


def rows_of(evidence: Sequence[Evidence]) -> tuple[Row, ...]:
    """The rows of the table."""
    return tuple(
        Row(
            framework=one.framework,
            model=one.model,
            mode=one.mode,
            loss=one.losses[-1],
            grad_error=grad_error(reference_of(evidence, one.model), one),
            block_executions=one.block_executions,
            residual_device_bytes=one.residual_device_bytes,
            residual_host_bytes=one.residual_host_bytes,
            peak_bytes=one.peak_bytes,
        )
        for one in evidence
    )


def _notes(unavailable: str, reports: Mapping[Key, MemoryReport]) -> tuple[str, ...]:
    """Remarks for the reader: why there are no figures for the GPU, and each warning of a report once."""
    notes = [f"Nothing was compiled for a GPU. {unavailable}"] if unavailable else []
    warnings: dict[str, list[str]] = {}
    for (model, framework, mode), report in reports.items():
        for warning in report.warnings:
            warnings.setdefault(warning, []).append(f"{model}, {framework}, {mode}")
    for warning, labels in warnings.items():
        where = labels[0] + (f", and {len(labels) - 1} more rows" if len(labels) > 1 else "")
        notes.append(f"{warning[0].upper()}{warning[1:]}. ({where})")
    return tuple(notes)


class _Progress:
    """Counts the completed parts and reports them, from any thread."""

    def __init__(self, tell: Tell | None) -> None:
        self._tell, self._lock = tell, threading.Lock()
        self._doing, self._behind, self._total = "", 0, 0

    def expect(self, total: int) -> None:
        self._total = total

    def say(self, doing: str) -> None:
        with self._lock:
            self._doing = doing
            self._send()

    def done(self) -> None:
        with self._lock:
            self._behind += 1
            self._send()

    def _send(self) -> None:
        if self._tell is not None:
            self._tell(self._doing, self._behind, self._total)
