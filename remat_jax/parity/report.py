"""The report of a comparison, printed as tables and written as a page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Group

from remat_jax.parity.page import page
from remat_jax.parity.report_data import ParityData, TensorRow, said, shape_text, unseen
from remat_jax.report.document import write_whole
from remat_jax.report.tables import format_bytes, format_error, format_ratio, render, table

_SHOWN, _SHOWN_ALONE = 60, 6
"""The most rows of the printed tables; the second is per mode. `to_dict` and the page have all rows."""


class ParityReport(ParityData):
    """The result of `compare`.

    Attributes:
        rows: a row for each output, parameter, input, state and update.
        checks: the precision of both frameworks, the modes of PyTorch, the planted faults, the training run, …
        memory: residual bytes and peak memory of both frameworks in every mode.
        kept_alone: the arrays that only one framework keeps; without these both keep the same bytes.
        divergences: `forward` and `backward` → the first module that differs, or None; empty if nothing differs.
        hidden: Flax modules that ran where nothing can be captured, such as in a `while` loop. They cannot be named as the
            first module that differs. Empty if nothing differs.
        differences: the settings in which the models differ, such as an epsilon, by module, read before any run. A difference
            without effect on the values fails nothing.
        torch, flax: the names of the compared models.
        rules: the weight map, as text.
        modes, dtypes, optimizer: the arguments of the comparison.

    >>> from remat_jax.parity.report_data import Check, TensorRow
    >>> row = TensorRow("output", "logits", errors={"off": 3e-16})
    >>> checks = (Check("planted faults", passed=True, found="12 of 12 were found"),)
    >>> ParityReport((row,), checks, (), "Net", "Net", "", ("off",), ("float64",)).passed
    True
    >>> ParityReport((), checks, (), "Net", "Net", "", ("off",), ("float64",)).passed  # nothing was compared
    False
    """

    def to_html(self, path: str | Path) -> Path:
        """Write one self-contained page: a table that sorts and filters, the tree of modules, memory bars."""
        return write_whole(path, page(self))

    def __rich__(self) -> Any:
        parts = [_checks_table(self)]
        parts += [_settings_table(self)] if self.differences else []
        parts += [_rows_table(self)]
        parts += [_memory_table(self)] if self.memory else []
        parts += [_alone_table(self)] if self.kept_alone else []
        parts += [said(where, found) for where, found in self.divergences.items() if found]
        parts += [unseen(self.hidden)] if self.hidden else []
        return Group(*parts, self.verdict())

    def __str__(self) -> str:
        return render(self)


def _checks_table(report: ParityData) -> Any:
    rows = [(check.name, "ok" if check.passed else "FAILED", check.found) for check in report.checks]
    return table(f"{report.torch} (PyTorch) and {report.flax} (Flax)", ("check", "", "found"), rows)


def _settings_table(report: ParityData) -> Any:
    cells = [(one["path"] or "the whole model", one["what"], one["torch"], one["flax"]) for one in report.differences]
    return table("Settings that differ", ("module", "setting", "in PyTorch", "in Flax"), cells)


def _rows_table(report: ParityData) -> Any:
    """The rows as a table, worst first; a passed report shows only its largest figures."""
    dtypes = [dtype for dtype in report.dtypes if dtype != "float64"]
    ordered = sorted(report.rows, key=lambda row: (row.passed, -_worst(row, dtypes)))
    shown, hidden = ordered[:_SHOWN], ordered[_SHOWN:]
    cells = [
        (
            row.kind,
            row.name,
            shape_text(row.shape),
            format_error(row.error),
            *(format_ratio(row.ratio(dtype)) for dtype in dtypes),
            "ok" if row.passed else _brief(row.problems),
        )
        for row in shown
    ]
    columns = ("kind", "tensor", "shape", "float64 error", *(f"{dtype} ratio" for dtype in dtypes), "verdict")
    rest = f"and {len(hidden)} more, all passed" if hidden and all(row.passed for row in hidden) else f"and {len(hidden)} more"
    return table("Tensors, worst first", columns, cells, caption=rest if hidden else None)


def _worst(row: TensorRow, dtypes: Sequence[str]) -> float:
    return max([*(row.ratio(dtype) or 0.0 for dtype in dtypes), *([row.error * 1e12] if row.error else [])], default=0.0)


def _brief(problems: Sequence[str]) -> str:
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return f"{problems[0]}{more}" if problems else "not compared"


def _memory_table(report: ParityData) -> Any:
    columns = ("mode", "framework", "kept: device", "kept: host", "peak", "source of the peak")
    cells = [
        (row.mode, row.framework, row.device_bytes, row.host_bytes, row.peak_bytes, row.peak_from) for row in report.memory
    ]
    return table(
        "Memory: residuals, and the peak of both passes",
        columns,
        cells,
        formats=dict.fromkeys(columns[2:5], format_bytes),
    )


def _alone_table(report: ParityData) -> Any:
    columns = ("mode", "kept by", "where", "made by", "shape", "arrays", "size")
    by_mode = [[one for one in report.kept_alone if one.mode == mode] for mode in report.modes]
    shown = [one for group in by_mode for one in group[:_SHOWN_ALONE]]
    hidden = [one for group in by_mode for one in group[_SHOWN_ALONE:]]
    cells = [(one.mode, one.framework, one.place, one.name, shape_text(one.shape), one.count, one.bytes) for one in shown]
    rest = f"and {len(hidden)} more, {format_bytes(sum(one.bytes for one in hidden))}" if hidden else None
    title = "Kept by only one framework; all other residuals are equal to the byte"
    return table(title, columns, cells, formats={"size": format_bytes}, caption=rest)
