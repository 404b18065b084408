"""The outcome for people: a table per model, the checks, and the meaning of the figures in words."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.table import Table

from remat_jax.report import format_bytes, format_error, table
from remat_jax.report.tables import byte_unit, scaled_bytes
from torch_ref import MODES

from .outcome import Outcome, Row
from .torch_rows import FRAMEWORK as TORCH

COLUMNS = (
    "framework,\n  mode or policy",
    "loss",
    "gradient\nerror",
    "block\nruns",
    "kept on\ndevice",
    "kept on\nhost",
    "peak in\nPyTorch",
    "peak on\nCPU",
    "peak on\nH200",
)
LEGEND = (
    "Gradient error: the largest of any parameter, in float64, against PyTorch off. Block runs: how often a block's first "
    "operation runs in a step, all layers together. Kept: residuals, from the forward to the backward pass. Peak, of a step "
    "with Adam: PyTorch tracked on fake tensors; JAX compiled for this CPU (scanned layers only; a CPU has one memory, so "
    "offload saves nothing there) and for an H200."
)


def tables(outcome: Outcome) -> list[Table]:
    """One table per model, then the checks; 120 columns are enough for them."""
    models = dict.fromkeys(row.model for row in outcome.rows)
    return [*(_of_model(model, [r for r in outcome.rows if r.model == model]) for model in models), _checks(outcome)]


def reading(outcome: Outcome) -> list[str]:
    """The meaning of the first model's figures, in a sentence or two each."""
    model = outcome.rows[0].model
    rows = {(row.framework, row.mode): row for row in outcome.rows if row.model == model}
    frameworks = [name for name in (TORCH, "JAX Linen") if (name, "off") in rows]
    sentences = [_checkpoint(rows, frameworks), _offload(rows, frameworks)]
    sentences += [_policy(rows["JAX Linen", "off"], row) for row in rows.values() if row.mode not in MODES]
    sentences.append(_agreement(outcome))
    return [sentence for sentence in sentences if sentence]


def _of_model(model: str, rows: Sequence[Row]) -> Table:
    amounts = [row.residual_device_bytes for row in rows] + [x for row in rows for x in row.peak_bytes.values() if x]
    unit = byte_unit(max(amounts))
    cells, heads = [], set()
    for framework in dict.fromkeys(row.framework for row in rows):
        heads.add(len(cells))
        cells.append((framework, *[""] * (len(COLUMNS) - 1)))
        cells += [(_indented(row.mode), *_figures(row, unit)) for row in rows if row.framework == framework]
    shown = [place for place, _ in enumerate(COLUMNS) if any(line[place] for line in cells)]
    made = table(
        f"{model}: memory in {unit}",
        [COLUMNS[place] for place in shown],
        [[line[place] for place in shown] for line in cells],
    )
    _slim(made)
    for place, line in enumerate(made.rows):
        line.style = "bold" if place in heads else None
        line.end_section = place + 1 in heads
    return made


def _indented(mode: str) -> str:
    """A mode on the line below its framework; the rules of a long policy on separate lines."""
    return f"  {mode}" if len(mode) < 32 else "  " + mode.replace("; ", ";\n    ")


def _figures(row: Row, unit: str) -> tuple[str, ...]:
    def size(n: int | None) -> str:
        return "" if n is None else f"{scaled_bytes(n, unit):.1f}"

    return (
        f"{row.loss:.4f}",
        format_error(row.grad_error),
        str(row.block_executions),
        size(row.residual_device_bytes),
        size(row.residual_host_bytes),
        *(size(row.peak_bytes.get(kind)) for kind in ("torch", "cpu", "h200")),
    )


def _checks(outcome: Outcome) -> Table:
    cells = [
        ("holds" if check.holds else "FAILS", check.name, f"{check.figure:.3g}", f"{check.bound:g}", check.detail)
        for check in outcome.checks
    ]
    made = table("Checks", ("", "what", "found", "at most", "worst in"), cells)
    _slim(made)
    for line, check in zip(made.rows, outcome.checks, strict=True):
        line.style = None if check.holds else "bold red"
    return made


def _slim(made: Table) -> None:
    made.box, made.padding, made.pad_edge, made.title_justify = box.SIMPLE_HEAD, (0, 1, 0, 0), False, "left"


def _checkpoint(rows: dict[tuple[str, str], Row], frameworks: Sequence[str]) -> str:
    parts = []
    for name in frameworks:
        off, on = rows[name, "off"], rows[name, "checkpoint"]
        share = on.residual_device_bytes / off.residual_device_bytes
        parts.append(
            f"{name} keeps {format_bytes(on.residual_device_bytes)} instead of {format_bytes(off.residual_device_bytes)} "
            f"({share:.0%}) for the backward pass"
        )
    runs, plain = (rows[frameworks[0], mode].block_executions for mode in ("checkpoint", "off"))
    return f"checkpoint runs blocks {runs} times in a step instead of {plain}: {'; '.join(parts)}."


def _offload(rows: dict[tuple[str, str], Row], frameworks: Sequence[str]) -> str:
    name = frameworks[-1]
    off, on, without = (rows[name, mode] for mode in ("off", "offload", "checkpoint"))
    sentence = (
        f"offload does the same and moves the blocks' inputs, {format_bytes(on.residual_host_bytes)}, to the host: "
        f"{format_bytes(on.residual_device_bytes)} of residuals stay on the device"
    )
    peaks = [row.peak_bytes.get("h200") for row in (off, without, on)]
    if all(peak is not None for peak in peaks):
        plain, checkpoint, offload = map(format_bytes, peaks)
        sentence += f". On an H200 the step of {name} needs {plain} plain, {checkpoint} with checkpoint, {offload} with offload"
    return sentence + "."


def _policy(off: Row, row: Row) -> str:
    sentence = f"{row.mode}: {format_bytes(row.residual_device_bytes)} on the device"
    if row.residual_host_bytes:
        sentence += f" and {format_bytes(row.residual_host_bytes)} on the host"
    plain, peak = (one.peak_bytes.get("h200") for one in (off, row))
    if plain is not None and peak is not None:
        sentence += f"; the step on an H200 needs {format_bytes(peak)} instead of {format_bytes(plain)}"
    again = "is not computed again" if row.block_executions == off.block_executions else "is computed again"
    return f"{sentence}; a block's first operation {again}."


def _agreement(outcome: Outcome) -> str:
    if not outcome.passed:
        failed = [check.name for check in outcome.checks if not check.holds]
        return f"NOT PASSED: {len(failed)} of {len(outcome.checks)} checks fail: {'; '.join(failed)}."
    worst = max(row.grad_error for row in outcome.rows)
    return (
        f"All {len(outcome.rows)} rows compute the same: no gradient is farther than {format_error(worst)} from PyTorch's "
        f"plain one in float64, and all {len(outcome.checks)} checks hold."
    )
